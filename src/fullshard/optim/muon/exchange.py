"""The two all-to-alls of a round: shards of matrices to the owner ranks, shards of the updates back.

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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.memory import Work
from fullshard.optim.muon.assignment import MatrixTraffic
from fullshard.optim.muon.sharded_matrix import ShardedMatrix, ShardGroup

__all__ = ["Round"]


@dataclass(frozen=True)
class _MessageSlot:
    """Location of one matrix's shard in a message, in elements."""

    start: int
    shape: tuple[int, ...]
    flag: int

    def on(self, message: torch.Tensor) -> torch.Tensor:
        """Return the shard in a message."""
        numel = self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]
        return message.narrow(0, self.start, numel).view(self.shape)


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
    owned: list[int]  # indices of the matrices that this rank owns
    dtype: torch.dtype
    shard_group: ShardGroup
    rank: int
    _shard_slots: dict[int, _MessageSlot]  # by matrix: this rank's shard in the messages to and from owner ranks
    _owned_slots: dict[int, list[_MessageSlot]]  # by matrix owned here: every rank's shard in the messages from all
    _sizes_to_owners: list[int]  # elements of the message to (and from) each owner
    _sizes_from_ranks: list[int]
    _flags_to_owners: torch.Tensor  # positions
    _flags_from_ranks: torch.Tensor

    def __init__(
        self, matrices: Sequence[ShardedMatrix], owner_ranks: Sequence[int], shard_group: ShardGroup, dtype: torch.dtype
    ) -> None:
        self.matrices, self.owner_ranks, self.shard_group, self.dtype = (
            list(matrices),
            list(owner_ranks),
            shard_group,
            dtype,
        )
        rank = self.rank = shard_group.group.rank()
        size = len(shard_group.ranks)
        self.owned = [index for index, owner in enumerate(owner_ranks) if owner == rank]
        owned = [[index for index, owner in enumerate(owner_ranks) if owner == other] for other in range(size)]
        self._shard_slots, self._sizes_to_owners = {}, []
        start = 0
        for indices in owned:
            slots, end = self._message(indices, rank, start)
            self._shard_slots.update(slots)
            self._sizes_to_owners.append(end - start)
            start = end
        self._owned_slots, self._sizes_from_ranks = {index: [] for index in self.owned}, []
        start = 0
        for other in range(size):
            slots, end = self._message(self.owned, other, start)
            for index in self.owned:
                self._owned_slots[index].append(slots[index])
            self._sizes_from_ranks.append(end - start)
            start = end
        flags = [slot.flag for slot in self._shard_slots.values()]
        self._flags_to_owners = torch.tensor(flags, dtype=torch.int64, device=shard_group.device)
        flags = [slot.flag for slots_ in self._owned_slots.values() for slot in slots_]
        self._flags_from_ranks = torch.tensor(flags, dtype=torch.int64, device=shard_group.device)

    def _message(self, indices: Sequence[int], holder: int, start: int) -> tuple[dict[int, _MessageSlot], int]:
        """Return the slots of rank ``holder`` in a message about ``indices`` that begins at ``start``, and its end."""
        numels = [self.matrices[index].shard_numel(holder) for index in indices]
        starts = list(itertools.accumulate(numels, initial=start))
        flags = starts[-1]
        slots = {
            index: _MessageSlot(starts[i], self.matrices[index].shard_shape(holder), flags + i)
            for i, index in enumerate(indices)
        }
        return slots, flags + len(indices)

    def traffic(self, rank: int) -> MatrixTraffic:
        """Return the bytes that a rank of the group sends, flags included."""
        out = back = 0
        for matrix, owner in zip(self.matrices, self.owner_ranks, strict=True):
            if owner == rank:
                back += matrix.numel - matrix.shard_numel(rank) + len(matrix.shards) - 1
            else:
                out += matrix.shard_numel(rank) + 1
        return MatrixTraffic(out * self.dtype.itemsize, back * self.dtype.itemsize)

    def send(self, shards: Sequence[torch.Tensor], missing: Sequence[int]) -> PendingExchange:
        """Start sending this rank's shards to the owner ranks.

        Args:
            shards: This rank's shard of each matrix, of any dtype and device.
            missing: Indices of matrices that this rank has no gradient of.
        """
        message = self._new(self._sizes_to_owners)
        targets = [self._shard_slots[index].on(message) for index in range(len(shards))]
        _copy(targets, shards)
        message.index_fill_(0, self._flags_to_owners, 1.0)
        for index in missing:
            message[self._shard_slots[index].flag] = 0.0
        return self._exchange(message, self._sizes_to_owners, self._sizes_from_ranks)

    def full_matrices(self, received: torch.Tensor, missing: Sequence[int]) -> dict[int, torch.Tensor]:
        """Assemble the matrices that this rank owns, except those that no rank has a gradient of.

        Args:
            received: Messages of all ranks.
            missing: As in :meth:`send`. Flags are read only for these, which waits for the device.
        """
        found: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, slots in self._owned_slots.items():
            if index in missing and not any(received[slot.flag].item() for slot in slots):
                continue
            matrix = self.matrices[index]
            full = found[index] = matrix.empty_full(self.dtype, received.device)
            for other, slot in enumerate(slots):
                targets.append(matrix.shard(full, other))
                sources.append(slot.on(received))
        _copy(targets, sources)
        return found

    def send_back(self, updates: dict[int, torch.Tensor]) -> PendingExchange:
        """Start sending the updates of matrices that this rank owns to the ranks that hold their shards.

        Args:
            updates: Updates by index; matrices without an update are left out.
        """
        message = self._new(self._sizes_from_ranks)
        message.index_fill_(0, self._flags_from_ranks, 1.0)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, slots in self._owned_slots.items():
            if index not in updates:
                for slot in slots:
                    message[slot.flag] = 0.0
                continue
            matrix = self.matrices[index]
            full = matrix.in_memory_order(updates[index])
            for other, slot in enumerate(slots):
                targets.append(slot.on(message))
                sources.append(matrix.shard(full, other))
        _copy(targets, sources)
        return self._exchange(message, self._sizes_from_ranks, self._sizes_to_owners)

    def shard_update(self, received: torch.Tensor, index: int) -> torch.Tensor:
        """Return this rank's shard of the update of a matrix."""
        return self._shard_slots[index].on(received)

    def any_rank_had_gradient(self, received: torch.Tensor, index: int) -> bool:
        """Return True if the owner rank has sent an update of the matrix. Waits for the device."""
        return bool(received[self._shard_slots[index].flag].item())

    def _new(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(sizes), dtype=self.dtype, device=self.shard_group.device)

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


class PendingExchange:
    """An all-to-all in flight.

    Args:
        work: The pending work.
        sent: Kept alive until it is done.
        received: Valid when it is done.
    """

    _work: Work
    _sent: torch.Tensor | None
    _received: torch.Tensor | None

    def __init__(self, work: Work, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._work, self._sent, self._received = work, sent, received

    def wait(self) -> torch.Tensor:
        """Wait for the all-to-all and return what was received. Can be called once."""
        self._work.wait()
        received, self._sent, self._received = self._received, None, None
        assert received is not None, "wait() was called twice"
        return received


def _copy(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, list(sources))
