"""Back ends that bring good collectives of their own: NCCL, c10d's fake group, and whatever else is registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceOp, ReduceScatterOptions

from fullshard.memory import Work
from fullshard.transport.base import Move, Transport

__all__ = ["CollectiveTransport", "NcclTransport"]

_Launch = Callable[[Sequence[Move]], Sequence[Work]]


class _Scale:
    """Divides sums by the number of ranks where the back end cannot average."""

    __slots__ = ("_move", "_work", "_world_size")

    def __init__(self, work: Work, move: Move, world_size: int) -> None:
        self._work, self._move, self._world_size = work, move, world_size

    def wait(self) -> None:
        self._work.wait()
        self._move.piece.mul_(1 / self._world_size)


class CollectiveTransport(Transport):
    """One all-gather or reduce-scatter per move, all in flight together."""

    direct_bytes: ClassVar[int] = 64 * 1024

    _gather_options: AllgatherOptions
    _reduce_options: ReduceScatterOptions

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._gather_options = AllgatherOptions()
        self._gather_options.asyncOp = True
        self._reduce_options = ReduceScatterOptions()
        self._reduce_options.asyncOp = True
        self._reduce_options.reduceOp = ReduceOp(ReduceOp.SUM)

    def _gather(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        # The group's own method: the functions of torch.distributed were renamed between 2.11 and 2.13 and
        # cost twice the host time; this one is the same in all of them.
        return [self.group._allgather_base(m.region, m.piece, self._gather_options) for m in moves]

    def _reduce(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        options = self._reduce_options
        return [_Scale(self.group._reduce_scatter_base(m.piece, m.region, options), m, self.world_size) for m in moves]


class NcclTransport(CollectiveTransport):
    """NVIDIA (and AMD) devices: one group call, that is one kernel, for all the moves of a bucket."""

    # From about 1 MB per rank NCCL reaches its bandwidth inside a group call; smaller pieces are cheaper to
    # pack than to launch. Not measured on our own hardware yet (docs/performance.md says so).
    direct_bytes: ClassVar[int] = 1024 * 1024

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._reduce_options.reduceOp = ReduceOp(ReduceOp.AVG)

    def _gather(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        return self._grouped(moves, partial(super()._gather, unit=unit))

    def _reduce(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        def scatter(moves: Sequence[Move]) -> Sequence[Work]:
            return [self.group._reduce_scatter_base(m.piece, m.region, self._reduce_options) for m in moves]

        return self._grouped(moves, scatter)

    def _grouped(self, moves: Sequence[Move], launch: _Launch) -> Sequence[Work]:
        if len(moves) < 2:
            return launch(moves)
        device = moves[0].piece.device
        self.group._start_coalescing(device)
        try:
            launch(moves)
        finally:
            work = self.group._end_coalescing(device)
        return [work]
