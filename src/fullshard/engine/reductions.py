"""The reductions of one schedule that are not through yet."""

from __future__ import annotations

from collections import deque

from fullshard.engine.reduction import PendingReduction, issue_reductions, issue_second_stage
from fullshard.engine.settings import Lanes

__all__ = ["Reductions"]

_Batch = list[tuple[str, PendingReduction]]  # issued together, with the names of their units


class Reductions:
    """Takes reductions through their stages, see [Note: Stages of a reduction], a bounded number at a time.

    Only those in their first stage hold full gradients, and so many batches of them are bounded by
    :attr:`max_in_flight`; one more may be in its second stage, so that the all-reduce of one unit overlaps with the
    reduce-scatter of the next.
    """

    max_in_flight: int
    _added: _Batch  # not issued yet
    _first: deque[_Batch]  # in their first stage
    _second: _Batch  # in their second, or through
    _landing: list[PendingReduction]  # on their way to the host, which waits for them all at the end

    def __init__(self) -> None:
        self.max_in_flight = 1
        self._added, self._first, self._second, self._landing = [], deque(), [], []

    def add(self, unit: str, reductions: list[PendingReduction]) -> int:
        """These are to go with the next launch. Returns how many will."""
        self._added += [(unit, reduction) for reduction in reductions]
        return len(self._added)

    def make_room(self, lanes: Lanes) -> None:
        """Take earlier ones so far that one more may be in flight."""
        while self._first and len(self._first) >= self.max_in_flight:
            self._advance(lanes)

    def launch(self, lanes: Lanes) -> None:
        """Issue all that were added, together, once few enough others are in flight."""
        added, self._added = self._added, []
        while added:
            batch: _Batch = []
            later: _Batch = []
            reducers: set[int] = set()
            for named in added:  # a reducer has one message: it cannot be under way twice
                (later if id(named[1].reducer) in reducers else batch).append(named)
                reducers.add(id(named[1].reducer))
            self.make_room(lanes)
            while any(id(reduction.reducer) in reducers for issued in self._first for _, reduction in issued):
                self._advance(lanes)
            issue_reductions(batch, lanes.reduce)
            self._first.append(batch)
            added = later

    def finish(self, lanes: Lanes) -> None:
        """Take all that were issued through to the end."""
        while self._first:
            self._advance(lanes)
        self._release()
        self.land()

    def leave(self, lanes: Lanes) -> list[PendingReduction]:
        """Issue all that is left to be issued, and return what is under way then. :meth:`finish` ends it."""
        while any(named[1].reducer.mesh.replica_transport is not None for batch in self._first for named in batch):
            self._advance(lanes)
        self.land()
        return [named[1] for batch in (self._second, *self._first) for named in batch]

    def land(self) -> None:
        """Have the host wait for what is on its way to it, so that it need not be kept beside the gradients."""
        landing, self._landing = self._landing, []
        for reduction in landing:
            reduction.accumulate()

    def abandon(self) -> None:
        """Drop them all, after a failure; in the order in which they were issued, as on other ranks."""
        under_way = [*self._second, *(named for batch in self._first for named in batch), *self._added]
        self._added, self._second = [], []
        self._first.clear()
        self._landing.clear()
        for _, reduction in under_way:
            reduction.abandon()

    def _advance(self, lanes: Lanes) -> None:
        self._release()
        batch = self._first.popleft()
        going_on = [named for named in batch if named[1].end_first_stage()]
        if going_on:
            issue_second_stage(going_on, lanes.all_reduce)
        self._second = batch
        if not going_on:
            self._release()

    def _release(self) -> None:
        batch, self._second = self._second, []
        for _, reduction in batch:
            reduction.release()
            if reduction.lands_on_host:
                self._landing.append(reduction)
            else:
                reduction.accumulate()
