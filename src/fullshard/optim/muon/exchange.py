"""Owner ranks of matrices, and the two all-to-alls of a round: shards to the owners, shards of the updates back.

[Note: Owners compute]
Every rank sends its shard of each matrix to the matrix's owner rank, which computes the update and sends each rank its
shard of that: 2 b P (N-1)/N^2 bytes per rank for P elements on N ranks, instead of b P (N-1)/N for all-gathering all
matrices on all ranks, each of which then computes everything.

The message from one rank to another has the sender's shards of the receiver's matrices of the round, one after another,
then one flag per matrix, which is not 0 if the sender has a gradient of it. The message back has the same sizes; its
flags tell if any rank had a gradient. So a rank without a gradient takes part with zeros and learns if there is an
update; the messages depend on the parameters alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.engine.parameters.tensor_shards import View
from fullshard.memory import Work
from fullshard.optim.muon.sharded_matrix import ShardedMatrix, ShardGroup

__all__ = ["Assignment", "MatrixTraffic", "Round"]


@dataclass(frozen=True)
class Assignment:
    """Owner ranks of matrices, and the rounds in which they are exchanged. Build with ``build``.

    The matrix with the most work goes to the rank with the least work so far, then the next one (LPT): no rank has more
    than the mean and one matrix, and at most 4/3 of the optimum. Every rank computes its largest matrices first, so
    that those of one round take about the same time.

    Args:
        owner_ranks: One rank per matrix.
        rounds: Indices of matrices; each rank's are in the order in which it computes them.
    """

    owner_ranks: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @classmethod
    def build(cls, work: Sequence[float], nbytes: Sequence[int], ranks: int, round_bytes: int) -> Assignment:
        """Assign matrices to ``ranks`` ranks.

        Args:
            work: Work of each matrix, in any unit.
            nbytes: Bytes of each full matrix, in the dtype of communication.
            ranks: Number of ranks.
            round_bytes: Limit for the matrices of one owner rank in a round, unless a single one is larger.
        """
        owner_ranks = [0] * len(work)
        round_of = [0] * len(work)
        loads = [(0.0, rank) for rank in range(ranks)]
        filled = [(0, 0)] * ranks  # each rank's last round, and the bytes in it
        heaviest_first = sorted(range(len(work)), key=lambda index: (-work[index], index))
        for index in heaviest_first:
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + work[index], rank))
            number, held = filled[rank]
            if held and held + nbytes[index] > round_bytes:
                number, held = number + 1, 0
            filled[rank] = (number, held + nbytes[index])
            owner_ranks[index], round_of[index] = rank, number
        rounds: list[list[int]] = [[] for _ in range(max(round_of, default=-1) + 1)]
        for index in heaviest_first:
            rounds[round_of[index]].append(index)
        return cls(tuple(owner_ranks), tuple(map(tuple, rounds)))


class MatrixTraffic(NamedTuple):
    """Bytes that one rank sends to others per step; it receives as many.

    Args:
        out: Shards of matrices to their owner ranks.
        back: Shards of the updates from the owner ranks.
    """

    out: int
    back: int

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.out + self.back


class PendingExchange(NamedTuple):
    """An all-to-all in flight. What is sent is kept alive with it; what is received is valid after ``wait``."""

    work: Work
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Wait for the all-to-all and return what was received."""
        self.work.wait()
        return self.received


class _MessageSlot(NamedTuple):
    """Location of one matrix's shard and flag in a tensor of messages, in elements."""

    start: int
    shard: View
    flag: int

    def on(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the shard in the messages."""
        return messages.narrow(0, self.start, self.shard.numel).view(self.shard.shape)


class Round:
    """Message layout of one round, computed once. See [Note: Owners compute].

    Args:
        matrices: Matrices of the round, all sharded over the same ranks.
        owner_ranks: Owner of each matrix, a rank of the group.
        shard_group: Ranks that they are sharded over.
        dtype: Dtype of the messages.
    """

    matrices: list[ShardedMatrix]
    owner_ranks: list[int]
    dtype: torch.dtype
    shard_group: ShardGroup
    rank: int
    _shard_slots: dict[int, _MessageSlot]  # by matrix: this rank's shard in the messages to and from owner ranks
    _owned_slots: dict[int, tuple[_MessageSlot, ...]]  # by matrix owned here: every rank's shard in the messages of all
    _sizes_to_owners: list[int]  # elements of the message to (and from) each owner
    _sizes_from_ranks: list[int]

    def __init__(
        self, matrices: Sequence[ShardedMatrix], owner_ranks: Sequence[int], shard_group: ShardGroup, dtype: torch.dtype
    ) -> None:
        self.matrices, self.owner_ranks = list(matrices), list(owner_ranks)
        self.shard_group, self.dtype, self.rank = shard_group, dtype, shard_group.group.rank()
        ranks = range(len(shard_group.ranks))
        owned = [[index for index, owner in enumerate(owner_ranks) if owner == rank] for rank in ranks]
        to_owners = [[matrices[index].shards[self.rank] for index in indices] for indices in owned]
        from_ranks = [[matrices[index].shards[rank] for index in owned[self.rank]] for rank in ranks]
        slots, self._sizes_to_owners = _lay_out(to_owners)
        self._shard_slots = dict(zip(chain(*owned), chain(*slots), strict=True))
        slots, self._sizes_from_ranks = _lay_out(from_ranks)
        self._owned_slots = dict(zip(owned[self.rank], zip(*slots, strict=True), strict=True))

    def traffic(self, rank: int) -> MatrixTraffic:
        """Return the bytes that a rank of the group sends, flags included."""
        out = back = 0
        for matrix, owner in zip(self.matrices, self.owner_ranks, strict=True):
            if owner == rank:
                back += matrix.numel - matrix.shards[rank].numel + len(matrix.shards) - 1
            else:
                out += matrix.shards[rank].numel + 1
        return MatrixTraffic(out * self.dtype.itemsize, back * self.dtype.itemsize)

    def send(self, shards: Sequence[torch.Tensor], missing: Collection[int]) -> PendingExchange:
        """Start sending this rank's shards to the owner ranks.

        Args:
            shards: This rank's shard of each matrix, of any dtype and device.
            missing: Indices of matrices that this rank has no gradient of.
        """
        message = self._new(self._sizes_to_owners)
        torch._foreach_copy_([self._shard_slots[index].on(message) for index in range(len(shards))], list(shards))
        for index in missing:
            message[self._shard_slots[index].flag] = 0.0
        return self._exchange(message, self._sizes_to_owners, self._sizes_from_ranks)

    def full_matrices(self, received: torch.Tensor, missing: Collection[int]) -> dict[int, torch.Tensor]:
        """Assemble the matrices that this rank owns, except those that no rank has a gradient of.

        Args:
            received: Messages of all ranks.
            missing: As in ``send``. Flags are read only for these, which waits for the device.
        """
        found: dict[int, torch.Tensor] = {}
        for index, slots in self._owned_slots.items():
            if index in missing and not any(received[slot.flag].item() for slot in slots):
                continue
            full = found[index] = self.matrices[index].empty_full(self.dtype, received.device)
            torch._foreach_copy_([slot.shard.on(full) for slot in slots], [slot.on(received) for slot in slots])
        return found

    def send_back(self, updates: dict[int, torch.Tensor]) -> PendingExchange:
        """Start sending the updates of matrices that this rank owns to the ranks that hold their shards.

        Args:
            updates: Updates by index; matrices without an update are left out.
        """
        message = self._new(self._sizes_from_ranks)
        for index, slots in self._owned_slots.items():
            if index in updates:
                full = self.matrices[index].in_memory_order(updates[index])
                torch._foreach_copy_([slot.on(message) for slot in slots], [slot.shard.on(full) for slot in slots])
            else:
                for slot in slots:
                    message[slot.flag] = 0.0
        return self._exchange(message, self._sizes_from_ranks, self._sizes_to_owners)

    def shard_update(self, received: torch.Tensor, index: int) -> torch.Tensor:
        """Return this rank's shard of the update of a matrix."""
        return self._shard_slots[index].on(received)

    def any_rank_had_gradient(self, received: torch.Tensor, index: int) -> bool:
        """Return True if the owner rank has sent an update of the matrix. Waits for the device."""
        return bool(received[self._shard_slots[index].flag].item())

    def _new(self, sizes: Sequence[int]) -> torch.Tensor:
        # Ones, so that all flags are set.
        return torch.ones(sum(sizes), dtype=self.dtype, device=self.shard_group.device)

    def _exchange(
        self, message: torch.Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> PendingExchange:
        received = self._new(received_sizes)
        item = self.dtype.itemsize
        work = dist.all_to_all_single(
            received.view(torch.uint8),  # bytes: back ends do not support all dtypes
            message.view(torch.uint8),
            [size * item for size in received_sizes],
            [size * item for size in sent_sizes],
            group=self.shard_group.group,
            async_op=True,
        )
        return PendingExchange(work, message, received)


def _lay_out(messages: Sequence[Sequence[View]]) -> tuple[list[list[_MessageSlot]], list[int]]:
    """Lay out messages, one to or from each rank: the shards, then their flags. Return slots and sizes per message."""
    slots, sizes, start = [], [], 0
    for shards in messages:
        *starts, flags = accumulate((shard.numel for shard in shards), initial=start)
        pairs = zip(starts, shards, strict=True)
        slots.append([_MessageSlot(begin, shard, flags + index) for index, (begin, shard) in enumerate(pairs)])
        sizes.append(flags + len(shards) - start)
        start = flags + len(shards)
    return slots, sizes
