"""Assign matrices to owner ranks and rounds: a pure value, the same on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Assignment"]


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
