"""Owner ranks of matrices, and the two all-to-alls of a round: shards to the owners, shards of the updates back.

[Note: Owners compute]
Every rank sends its shard of each matrix to the matrix's owner rank, which computes the update and sends each rank its
shard of that: 2 b P (N-1)/N^2 bytes per rank for P elements on N ranks, instead of b P (N-1)/N for all-gathering all
matrices on all ranks, each of which then computes everything.

The message from one rank to another has the sender's shards of the receiver's matrices of the round, one after another.
The message back has the same sizes. The messages depend on the parameters alone: a rank without a gradient of a matrix
sends zeros.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.engine.parameters.tensor_shards import View
from fullshard.memory import Work
from fullshard.optim.muon.sharded_matrix import ShardedMatrix, ShardGroup

__all__ = ["Assignment", "PendingExchange", "Round"]


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


class PendingExchange(NamedTuple):
    """An all-to-all in flight. What is sent is kept alive with it; what is received is valid after ``wait``."""

    work: Work
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Wait for the all-to-all and return what was received."""
        self.work.wait()
        return self.received


class Round:
    """The messages of one round. See [Note: Owners compute].

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
    _by_owner: list[list[int]]  # the matrices of each owner rank

    def __init__(
        self, matrices: Sequence[ShardedMatrix], owner_ranks: Sequence[int], shard_group: ShardGroup, dtype: torch.dtype
    ) -> None:
        self.matrices, self.owner_ranks = list(matrices), list(owner_ranks)
        self.shard_group, self.dtype, self.rank = shard_group, dtype, shard_group.group.rank()
        self._by_owner = [[] for _ in shard_group.ranks]
        for index, owner in enumerate(owner_ranks):
            self._by_owner[owner].append(index)

    def send(self, shards: Sequence[torch.Tensor]) -> PendingExchange:
        """Start sending this rank's shard of each matrix, of any dtype and device, to the owner ranks."""
        parts = [[shards[index] for index in indices] for indices in self._by_owner]
        return self._exchange(parts, self._owned_shards())

    def full_matrices(self, received: torch.Tensor) -> dict[int, torch.Tensor]:
        """Assemble the matrices that this rank owns from the messages of all ranks."""
        owned = self._by_owner[self.rank]
        full = {index: self.matrices[index].empty_full(self.dtype, received.device) for index in owned}
        views = [(index, shard) for shards in self._owned_shards() for index, shard in zip(owned, shards, strict=True)]
        parts = received.split_with_sizes([shard.numel for _, shard in views])
        targets = [shard.on(full[index]) for index, shard in views]
        if targets:
            torch._foreach_copy_(
                targets, [part.view(shard.shape) for part, (_, shard) in zip(parts, views, strict=True)]
            )
        return full

    def send_back(self, updates: Mapping[int, torch.Tensor]) -> PendingExchange:
        """Start sending the updates of the matrices that this rank owns to the ranks that hold their shards."""
        owned = self._by_owner[self.rank]
        full = [self.matrices[index].in_memory_order(updates[index]) for index in owned]
        parts = [
            [shard.on(update) for shard, update in zip(shards, full, strict=True)] for shards in self._owned_shards()
        ]
        return self._exchange(parts, self._own_shards())

    def shard_updates(self, received: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return this rank's shard of the update of each matrix."""
        order = [index for indices in self._by_owner for index in indices]
        shards = [shard for same in self._own_shards() for shard in same]
        parts = received.split_with_sizes([shard.numel for shard in shards])
        return {index: part.view(shard.shape) for index, part, shard in zip(order, parts, shards, strict=True)}

    def _owned_shards(self) -> list[list[View]]:
        """Return for each rank its shards of the matrices that this rank owns."""
        owned = self._by_owner[self.rank]
        return [[self.matrices[index].shards[rank] for index in owned] for rank in range(len(self._by_owner))]

    def _own_shards(self) -> list[list[View]]:
        """Return for each owner rank this rank's shards of its matrices."""
        return [[self.matrices[index].shards[self.rank] for index in indices] for indices in self._by_owner]

    def _exchange(self, parts: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[View]]) -> PendingExchange:
        """Start sending the tensors for each rank, one after another, and receiving such shards from each."""
        device, item = self.shard_group.device, self.dtype.itemsize
        sent_sizes = [sum(part.numel() for part in same) for same in parts]
        received_sizes = [sum(shard.numel for shard in same) for same in expected]
        message = torch.empty(sum(sent_sizes), dtype=self.dtype, device=device)
        flat = [part for same in parts for part in same]
        places = message.split_with_sizes([part.numel() for part in flat])
        if flat:
            torch._foreach_copy_([place.view(part.shape) for place, part in zip(places, flat, strict=True)], flat)
        received = torch.empty(sum(received_sizes), dtype=self.dtype, device=device)
        work = dist.all_to_all_single(
            received.view(torch.uint8),  # bytes: back ends do not support all dtypes
            message.view(torch.uint8),
            [size * item for size in received_sizes],
            [size * item for size in sent_sizes],
            group=self.shard_group.group,
            async_op=True,
        )
        return PendingExchange(work, message, received)
