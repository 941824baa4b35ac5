"""Back ends that bring good collectives of their own: NCCL, c10d's fake group, and whatever else is registered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceOp,
    ReduceScatterOptions,
    _make_nccl_premul_sum,
)

from fullshard.memory import Work
from fullshard.transport.base import Division, Move, Parcel, Transport, issue_all

__all__ = ["CollectiveTransport", "NcclTransport", "Reduction", "Scaled", "nccl_reduction"]

# What every back end can gather as it is. NCCL knows neither int16 nor uint16, some versions no float8.
_GATHERED_AS_THEY_ARE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8})


class Reduction(NamedTuple):
    """How a division is carried out.

    Args:
        op: What the back end does.
        before: Factor that every rank's region is multiplied by ahead of it; 1.0 for none.
        after: Factor that the result is multiplied by; 1.0 for none.
    """

    op: ReduceOp
    before: float
    after: float


class Scaled:
    """Multiplies results once the work that brings them is done.

    Args:
        work: What is in flight.
        results: Pairs of a tensor and its factor.
    """

    __slots__ = ("_results", "_work")

    def __init__(self, work: Work, results: Iterable[tuple[torch.Tensor, float]]) -> None:
        self._work, self._results = work, list(results)

    def wait(self) -> None:
        """Wait, then multiply (on accelerators: enqueue that on the current stream)."""
        self._work.wait()
        for tensor, factor in self._results:
            tensor.mul_(factor)


def _real(flat: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: sums are the same, and NCCL knows no others."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class CollectiveTransport(Transport):
    """One collective per move, all in flight together. Sums are divided by multiplications ahead and afterwards."""

    direct_bytes: int = 64 * 1024

    _gather_options: AllgatherOptions

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._gather_options = AllgatherOptions()
        self._gather_options.asyncOp = True

    def _gather(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        moves = [move for parcel in parcels for move in parcel.moves if move.region.numel()]
        return self._together(self.group, moves, self._issue_gather)

    def _issue_gather(self, move: Move) -> Work:
        piece, region = move.piece, move.region
        if piece.dtype not in _GATHERED_AS_THEY_ARE:
            piece, region = piece.view(torch.uint8), region.view(torch.uint8)
        # The group's own method: the functions of torch.distributed were renamed between 2.11 and 2.13 and
        # cost twice the host time; this one is the same in all of them.
        return self.group._allgather_base(region, piece, self._gather_options)

    def _reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        def issue(move: Move, op: ReduceOp) -> Work:
            options = ReduceScatterOptions()
            options.reduceOp, options.asyncOp = op, True
            return self.reduce_group._reduce_scatter_base(_real(move.piece), _real(move.region), options)

        return self._summed(self.reduce_group, parcels, issue)

    def _all_reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        def issue(move: Move, op: ReduceOp) -> Work:
            options = AllreduceOptions()
            options.reduceOp, options.asyncOp = op, True
            return self.group.allreduce([_real(move.region)], options)

        return self._summed(self.group, parcels, issue)

    def _summed(
        self, group: dist.ProcessGroup, parcels: Sequence[Parcel], issue: Callable[[Move, ReduceOp], Work]
    ) -> Sequence[Work]:
        reductions = [
            (move, self._reduction(move.piece.dtype, parcel.division))
            for parcel in parcels
            for move in parcel.moves
            if move.region.numel()
        ]
        # Ahead of the launch: nothing but collectives may come inside a group call.
        for move, reduction in reductions:
            if reduction.before != 1:
                move.region.mul_(reduction.before)
        ops = iter([reduction.op for _, reduction in reductions])
        works = self._together(group, [move for move, _ in reductions], lambda move: issue(move, next(ops)))
        scaled = [(move.piece, reduction.after) for move, reduction in reductions if reduction.after != 1]
        if not scaled:
            return works
        if len(works) == 1:
            return [Scaled(works[0], scaled)]
        return [
            work if reduction.after == 1 else Scaled(work, [(move.piece, reduction.after)])
            for work, (move, reduction) in zip(works, reductions, strict=True)
        ]

    def _reduction(self, dtype: torch.dtype, division: Division) -> Reduction:
        """How to carry out ``division`` for sums of ``dtype``."""
        return _plain_sum(division)

    def _together(
        self, group: dist.ProcessGroup, moves: Sequence[Move], issue: Callable[[Move], Work]
    ) -> Sequence[Work]:
        """Call ``issue``, which issues a collective on ``group``, for every move: one work each, or one for all."""
        return issue_all(partial(_issue_one, issue, move) for move in moves)


def _issue_one(issue: Callable[[Move], Work], move: Move) -> list[Work]:
    return [issue(move)]


class NcclTransport(CollectiveTransport):
    """NVIDIA (and AMD) devices: one group call, that is one kernel, for all the moves of a launch.

    NCCL divides by itself where it can, see :func:`nccl_reduction`.

    Args:
        group: The ranks, and the communicator of gathers and all-reduces.
        reduce_group: The same ranks with a communicator for reductions; None: they share that of ``group``.
    """

    # From about 1 MB per rank NCCL reaches its bandwidth inside a group call; smaller pieces are cheaper to
    # pack than to launch. Not measured on our own hardware yet (docs/performance.md says so).
    direct_bytes: int = 1024 * 1024
    tiny_bytes: int = 1024 * 1024

    _own_reduce_group: dist.ProcessGroup | None

    def __init__(self, group: dist.ProcessGroup, reduce_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._own_reduce_group = reduce_group
        self.separate_reduce_group(True)

    def separate_reduce_group(self, enable: bool) -> None:
        """Switch between the communicator made for reductions (as at first) and the one shared with gathers."""
        self.reduce_group = self._own_reduce_group if enable and self._own_reduce_group is not None else self.group

    def _reduction(self, dtype: torch.dtype, division: Division) -> Reduction:
        return nccl_reduction(dtype, division, self.world_size)

    def _together(
        self, group: dist.ProcessGroup, moves: Sequence[Move], issue: Callable[[Move], Work]
    ) -> Sequence[Work]:
        if len(moves) < 2:
            return super()._together(group, moves, issue)
        device = moves[0].piece.device
        group._start_coalescing(device)
        try:
            for move in moves:
                issue(move)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                work = group._end_coalescing(device)
                if work is not None:  # what was begun uses memory that the caller is about to free
                    work.wait()
            raise
        return [group._end_coalescing(device)]


_PREMULTIPLIED = frozenset({torch.float32, torch.bfloat16})


def nccl_reduction(dtype: torch.dtype, division: Division, world_size: int) -> Reduction:
    """How NCCL carries out ``division`` over ``world_size`` ranks: AVG or PREMUL_SUM where allowed, else SUM.

    A premultiplied sum is left to fp32 and bf16, whose range leaves it room; inputs that are divided beforehand
    (fp16) are multiplied explicitly on both sides.
    """
    if division.after == 1 or division.before != 1 or not division.native:
        return _plain_sum(division)
    if division.after == world_size:
        return Reduction(ReduceOp(ReduceOp.AVG), 1.0, 1.0)
    if dtype in _PREMULTIPLIED:
        return Reduction(_make_nccl_premul_sum(1 / division.after), 1.0, 1.0)
    return _plain_sum(division)


def _plain_sum(division: Division) -> Reduction:
    return Reduction(ReduceOp(ReduceOp.SUM), 1 / division.before, 1 / division.after)
