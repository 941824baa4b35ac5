"""Record a trace: ``fullshard.trace``."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from fullshard.debug.tracing.exposed import Exposed, exposed_waits, late_ranks
from fullshard.debug.tracing.perfetto import chrome_trace
from fullshard.debug.tracing.timeline import Launched, RankGroup, Segment, launches, memory, segments, short_units
from fullshard.errors import FullshardError
from fullshard.memory import DeviceClock, HostClock, uses_accelerator
from fullshard.progress import PROGRESS, Event
from fullshard.ranks.agreement import gather, own_rank, raise_on_all

__all__ = ["Clock", "Trace", "own_groups", "recorded", "trace"]

_SHOWN = 12


@dataclass(eq=False)
class Trace:
    """Timelines of all ranks, complete when the context of ``fullshard.trace`` has ended.

    Attributes:
        segments: By rank: what its training thread (on an accelerator, its current stream) did, from the first event to
            the last, without gaps.
        launches: By rank: its collectives, by their process group and their number in that.
        memory: By rank: bytes of the engine's buffers over time, beyond the least that they had.
    """

    segments: dict[int, list[Segment]] = field(default_factory=dict)
    launches: dict[int, dict[tuple[RankGroup, int], Launched]] = field(default_factory=dict)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, rank: int, events: Sequence[Event], groups: Mapping[int, RankGroup]) -> None:
        """Add what a rank has recorded, and the process groups by the numbers that it has for them."""
        self.segments[rank], self.launches[rank] = segments(events, groups), launches(events, groups)
        self.memory[rank] = memory(events)

    def exposed(self, rank: int) -> list[Exposed]:
        """Return the waits of a rank for collectives, by kind and units, the longest first."""
        return exposed_waits(rank, self.segments[rank], self.launches)

    def table(self) -> str:
        """Return exposed communication by unit and reason, and ranks that are late, as text."""
        return "\n".join([*self._activities(), "", *self._exposed(), "", *self._late()])

    def _activities(self) -> Iterator[str]:
        activities = ("compute", "wait", "overhead")
        yield f"{'rank':>5} {'steps':>6} {'ms per step':>12} " + " ".join(f"{name:>9}" for name in activities)
        for rank, own in self.segments.items():
            steps = self._steps(rank)
            parts = [sum(s.seconds for s in own if s.activity == name) / steps for name in activities]
            whole = (own[-1].end - own[0].begin) / steps if own else 0.0
            yield f"{rank:>5} {steps:>6} {1e3 * whole:>12.1f} " + " ".join(f"{1e3 * each:>9.1f}" for each in parts)

    def _steps(self, rank: int) -> int:
        """Return the number of optimizer steps in the trace, at least 1; what comes after the last one is no step."""
        return max(1, len({segment.step for segment in self.segments[rank] if segment.phase == "forward"}))

    def _exposed(self) -> Iterator[str]:
        waited = {rank: sum(s.seconds for s in own if s.activity == "wait") for rank, own in self.segments.items()}
        rank = max(waited, key=lambda each: waited[each])
        steps, every = self._steps(rank), self.exposed(rank)
        yield f"Exposed communication of rank {rank}, which waits longest: ms per step in which it computes nothing"
        yield f"{'ms':>9} {'waits':>6} {'issued late':>12} {'slow link':>10} {'slow peer':>10}  collective"
        for each in every[:_SHOWN]:
            peer = max(each.peers, key=lambda r: each.peers[r]) if each.peers else None
            waited_for = f", mostly for rank {peer}" if peer is not None and each.slow_peer > each.seconds / 2 else ""
            reasons = (each.late_issue / steps, each.slow_link / steps, each.slow_peer / steps)
            parts = f"{1e3 * reasons[0]:>12.2f} {1e3 * reasons[1]:>10.2f} {1e3 * reasons[2]:>10.2f}"
            name = f"{each.kind.replace('_', '-')} of {short_units(each.units)}{waited_for}"
            yield f"{1e3 * each.seconds / steps:>9.2f} {each.count:>6} {parts}  {name}"
        if len(every) > _SHOWN:
            left = sum(each.seconds for each in every[_SHOWN:]) / steps
            yield f"{1e3 * left:>9.2f} {'':>6} {'':>12} {'':>10} {'':>10}  {len(every) - _SHOWN} more"

    def _late(self) -> Iterator[str]:
        late = late_ranks(self.segments)
        for each in late[:_SHOWN]:
            phase = each.phase.removeprefix("the ")
            yield f"Late: rank {each.rank} in the {phase} of {short_units(each.units)}, by {1e3 * each.seconds:.1f} ms"
        yield "Late: it takes longer than on the other ranks, in the median over steps" if late else "No rank is late"


class Clock(Protocol):
    """Source of the times of events: the host, or an accelerator's streams."""

    def mark(self) -> Any:
        """Mark the present; None if that is not possible now."""

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark, when it is over, in seconds since 1970."""


@contextlib.contextmanager
def recorded(clock: Clock) -> Iterator[list[Event]]:
    """Record the events of this rank. The list has them when the context ends."""
    found: list[Event] = []
    marked: list[tuple[Any, Event]] = []
    with PROGRESS.observed(lambda event, _: marked.append((clock.mark(), event))):
        PROGRESS.enter("user code", None)
        try:
            yield found
        finally:
            PROGRESS.enter("the end of the trace", None)
    found += [event._replace(time=clock.seconds(mark)) for mark, event in marked if mark is not None]


@contextlib.contextmanager
def trace(folder: str | Path) -> Iterator[Trace]:
    """Record what each rank does while the context is open, and write what came of it to a folder.

    Written are ``trace.json``, for ui.perfetto.dev or chrome://tracing, with all ranks on one clock, and ``table.txt``:
    communication that nothing hides, by unit and reason, and ranks that are late. ``print(trace.table())`` shows the
    table, too.

    On CPUs times are those of the host, which also computes and waits; the end of a collective is only seen when it is
    waited for. On accelerators they are those of events on the streams, for which the host does not wait before the
    context ends. All ranks open and close the context together, between steps: both are collectives.

    Args:
        folder: Is made if it does not exist. Rank 0 writes.

    Yields:
        The trace, which is empty until the context ends.

    Raises:
        FullshardError: If the first forward on an accelerator was inside the context, or the files cannot be written.

    Example:
        ```python
        import torch
        from torch import nn

        import fullshard

        model = fullshard.fully_shard(nn.Linear(8, 8))
        with fullshard.trace("runs/trace") as trace:
            for _ in range(3):
                model(torch.randn(4, 8)).sum().backward()
        print(trace.table())
        ```
    """
    found, on_accelerator, folder = Trace(), uses_accelerator(), Path(folder)
    clock: Clock = DeviceClock() if on_accelerator else HostClock()
    shift = _clock_shift()
    with recorded(clock) as events:
        yield found
    failure: Exception | None = None
    if uses_accelerator() and not on_accelerator:
        failure = FullshardError("trace: expected the first forward on an accelerator before the trace, not inside")
    own = [event._replace(time=event.time - shift) for event in events]
    for rank, (of_rank, groups) in gather((own, own_groups()), None).items():
        found.add(rank, of_rank, groups)
    if failure is None and (not dist.is_initialized() or dist.get_rank() == 0):
        try:
            _write(found, folder)
        except OSError as error:  # the other ranks wait for the result
            failure = FullshardError(f"cannot write the trace to {folder}: {type(error).__name__}: {error}")
    raise_on_all(failure, [dist.group.WORLD] if dist.is_initialized() else [])


def own_groups() -> dict[int, RankGroup]:
    """Return the process groups of this rank by their numbers in events."""
    known = ((log.index, log.group()) for log in PROGRESS.logs())
    return {
        index: RankGroup(str(group.group_name), tuple(dist.get_process_group_ranks(group)))
        for index, group in known
        if group is not None and group in dist.distributed_c10d._world.pg_map  # else it was destroyed
    }


def _clock_shift() -> float:
    """Return by how many seconds this rank's clock is ahead of rank 0's. A collective.

    Ranks leave an exchange at nearly the same time: the median of a few is taken.
    """
    differences = []
    for _ in range(5):
        gather(None, None)
        clocks = gather(time.time(), None)
        differences.append(clocks[own_rank()] - clocks[min(clocks)])
    shift = statistics.median(differences)
    return shift if abs(shift) > _SAME_CLOCK_S else 0.0


_SAME_CLOCK_S = 0.005  # differences below are those of leaving the exchange, as on one machine


def _write(found: Trace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.json").write_text(json.dumps(chrome_trace(found.segments, found.launches, found.memory)))
    (folder / "table.txt").write_text(found.table() + "\n")
