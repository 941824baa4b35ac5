"""Which rank computes which matrix, and in which rounds: a pure value, the same on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Assignment", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends to others per step, and receives as many.

    Args:
        out: Parts of matrices to their owners.
        back: Parts of the updates from the owners.
    """

    out: int
    back: int

    @property
    def total(self) -> int:
        """Both ways."""
        return self.out + self.back


@dataclass(frozen=True)
class Assignment:
    """Owners of matrices, and the rounds in which they are exchanged. Build with :meth:`build`.

    The heaviest matrix goes to the rank with the least work so far, then the next one (LPT): no rank has more than the
    mean and one matrix, and at most 4/3 of the best there is. Every rank takes its heaviest matrices first, so that
    those of one round weigh about the same.

    Args:
        owners: One rank per matrix.
        rounds: Indices of matrices; each rank's are in the order in which it computes them.
    """

    owners: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @classmethod
    def build(cls, work: Sequence[float], nbytes: Sequence[int], ranks: int, round_bytes: int) -> Assignment:
        """Assign matrices to ``ranks`` ranks.

        Args:
            work: Of each matrix, in any unit.
            nbytes: Of each matrix, whole, in the dtype in which it travels.
            ranks: How many may own some.
            round_bytes: No owner has larger matrices in a round, taken together, unless a single one is larger.
        """
        heaviest_first = sorted(range(len(work)), key=lambda index: (-work[index], index))
        owners = [0] * len(work)
        queues: list[list[int]] = [[] for _ in range(ranks)]
        loads = [(0.0, rank) for rank in range(ranks)]
        for index in heaviest_first:
            load, rank = heapq.heappop(loads)
            owners[index] = rank
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
        return cls(tuple(owners), tuple(rounds))

    def loads(self, work: Sequence[float], ranks: int) -> list[float]:
        """The work of each rank."""
        loads = [0.0] * ranks
        for owner, amount in zip(self.owners, work, strict=True):
            loads[owner] += amount
        return loads
