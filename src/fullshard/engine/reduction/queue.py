"""The reductions of one root that are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fullshard.engine.reduction.grad_reduction import GradReduction, issue_all_reduces, issue_reduce_scatters
from fullshard.engine.settings import CommStreams
from fullshard.profiling import profiled

__all__ = ["ReductionQueue"]

_Batch = list[tuple[str, GradReduction]]  # issued together, with the names of their units


class ReductionQueue:
    """Takes reductions through their stages, see [Note: Stages of a reduction], a bounded number at a time.

    Only those in their first stage hold unsharded gradients, and so many batches of them are bounded by
    ``max_in_flight``; one more may be in its second stage, so that the all-reduce of one unit overlaps with the
    reduce-scatter of the next.
    """

    max_in_flight: int
    _reduce_scatters: deque[_Batch]  # in their first stage
    _last: _Batch  # in their second stage, or through
    _read_by_host: list[GradReduction]  # whose results the host reads, for which it waits once, at the end

    def __init__(self) -> None:
        self.max_in_flight = 1
        self._reduce_scatters, self._last, self._read_by_host = deque(), [], []

    @property
    def in_flight(self) -> bool:
        """True if reductions were issued that are not through."""
        return bool(self._reduce_scatters or self._last or self._read_by_host)

    def make_room(self, comm_streams: CommStreams) -> None:
        """Finish the oldest reductions until one more may be in flight."""
        while self._reduce_scatters and len(self._reduce_scatters) >= self.max_in_flight:
            self._advance(comm_streams)

    def launch(self, unit: str, reductions: list[GradReduction], comm_streams: CommStreams) -> None:
        """Issue the reductions of one unit together."""
        if not reductions:
            return
        batch = [(unit, each) for each in reductions]
        scatters = any(reduction.transport.world_size > 1 for reduction in reductions)
        operation = "reduce_scatter" if scatters else "pack_gradients"
        try:
            with profiled(operation, (unit,)):
                issue_reduce_scatters(batch, comm_streams.reduce_scatter)
        except BaseException:  # also outside of a backward, which would recover
            _abandon(batch)
            self.abandon()
            raise
        self._reduce_scatters.append(batch)

    def finish(self, comm_streams: CommStreams) -> None:
        """Take all that were issued through to the end."""
        while self._reduce_scatters:
            self._advance(comm_streams)
        self._accumulate_last()
        self.accumulate_read_by_host()

    def accumulate_read_by_host(self) -> None:
        """Wait on the host for offloaded gradients and presence numbers, and accumulate the gradients."""
        read, self._read_by_host = self._read_by_host, []
        for reduction in read:
            reduction.accumulate()

    def abandon(self) -> None:
        """Drop them all, after a failure; in the order in which they were issued, as on other ranks."""
        in_flight = [*self._last, *(named for batch in self._reduce_scatters for named in batch)]
        self._last = []
        self._reduce_scatters.clear()
        self._read_by_host.clear()
        _abandon(in_flight)

    def _advance(self, comm_streams: CommStreams) -> None:
        """End the oldest reduce-scatters, and issue the all-reduces that follow them."""
        self._accumulate_last()
        batch = self._reduce_scatters.popleft()
        try:
            with profiled("wait_for_reduce_scatter", _units(batch)):
                to_all_reduce = [named for named in batch if named[1].end_reduce_scatter()]
            if to_all_reduce:
                with profiled("all_reduce", _units(to_all_reduce)):
                    issue_all_reduces(to_all_reduce, comm_streams.all_reduce)
        except BaseException:
            _abandon(batch)
            self.abandon()
            raise
        self._last = batch
        if not to_all_reduce:
            self._accumulate_last()

    def _accumulate_last(self) -> None:
        batch, self._last = self._last, []
        if not batch:
            return
        with profiled("wait_for_gradients", _units(batch)):
            for _, reduction in batch:
                reduction.release()
                # In the order in which they were issued, too: sums of floating-point numbers depend on it.
                follows = self._read_by_host and any(each.is_of_same_bucket(reduction) for each in self._read_by_host)
                if follows or reduction.is_read_by_host:
                    self._read_by_host.append(reduction)
                else:
                    reduction.accumulate()


def _abandon(batch: _Batch) -> None:
    for _, reduction in batch:
        reduction.abandon()


def _units(batch: _Batch) -> Iterator[str]:
    return (unit for unit, _ in batch)
