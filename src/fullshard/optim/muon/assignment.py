"""Assign matrices to owner ranks and rounds: a pure value, the same on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Assignment", "MatrixTraffic"]


@dataclass(frozen=True)
class MatrixTraffic:
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


@dataclass(frozen=True)
class Assignment:
    """Owner ranks of matrices, and the rounds in which they are exchanged. Build with :meth:`build`.

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
        heaviest_first = sorted(range(len(work)), key=lambda index: (-work[index], index))
        owner_ranks = [0] * len(work)
        queues: list[list[int]] = [[] for _ in range(ranks)]
        loads = [(0.0, rank) for rank in range(ranks)]
        for index in heaviest_first:
            load, rank = heapq.heappop(loads)
            owner_ranks[index] = rank
            queues[rank].append(index)
            heapq.heappush(loads, (load + work[index], rank))
        rounds: list[tuple[int, ...]] = []
        taken = [0] * ranks
        while sum(taken) < len(work):
            current: list[int] = []
            for rank, queue in enumerate(queues):
                held = 0
                while taken[rank] < len(queue):
                    index = queue[taken[rank]]
                    if held and held + nbytes[index] > round_bytes:
                        break
                    held += nbytes[index]
                    current.append(index)
                    taken[rank] += 1
            rounds.append(tuple(current))
        return cls(tuple(owner_ranks), tuple(rounds))

    def loads(self, work: Sequence[float], ranks: int) -> list[float]:
        """Return the work of each rank."""
        loads = [0.0] * ranks
        for owner, amount in zip(self.owner_ranks, work, strict=True):
            loads[owner] += amount
        return loads
