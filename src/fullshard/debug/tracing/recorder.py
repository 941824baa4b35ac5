"""Record a trace: ``fullshard.trace``."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from fullshard.debug.tracing.exposed import Exposed, exposed_waits, last_arrivals, late_ranks
from fullshard.debug.tracing.perfetto import chrome_trace
from fullshard.debug.tracing.plot import draw_step
from fullshard.debug.tracing.timeline import Launched, Segment, launches, memory, segments
from fullshard.errors import FullshardError
from fullshard.memory import DeviceClock, HostClock, uses_accelerator
from fullshard.progress import PROGRESS, Event
from fullshard.ranks.agreement import gather, raise_on_all

__all__ = ["Clock", "Trace", "recorded", "trace"]

_SHOWN = 12


class Trace:
    """What a trace has recorded, on all ranks; complete when its context has ended.

    Attributes:
        segments: By rank: what its training thread (on an accelerator, its current stream) did, from the first event to
            the last, without gaps.
        launches: By rank: its collectives, by number of their process group and number in that.
        memory: By rank: bytes of the engine's buffers over time, beyond the least that they had.
    """

    segments: dict[int, list[Segment]]
    launches: dict[int, dict[tuple[int, int], Launched]]
    memory: dict[int, list[tuple[float, int]]]

    def __init__(self) -> None:
        self.segments, self.launches, self.memory = {}, {}, {}

    def add(self, rank: int, events: Sequence[Event]) -> None:
        """Add what a rank has recorded."""
        self.segments[rank], self.launches[rank] = segments(events), launches(events)
        self.memory[rank] = memory(events)

    def exposed(self, rank: int) -> list[Exposed]:
        """Return the waits of a rank for collectives, by kind and units, the longest first."""
        return exposed_waits(rank, self.segments[rank], self.launches)

    def table(self) -> str:
        """Return exposed communication by unit and reason, how ranks arrive, and ranks that are late, as text."""
        return "\n".join([*self._activities(), "", *self._exposed(), "", *self._arrivals()])

    def _activities(self) -> Iterator[str]:
        yield f"{'rank':>5} {'ms':>9} {'compute':>9} {'wait':>9} {'engine':>9}"
        for rank, own in self.segments.items():
            parts = {name: sum(s.seconds for s in own if s.activity == name) for name in ("compute", "wait", "engine")}
            whole = own[-1].end - own[0].begin if own else 0.0
            yield f"{rank:>5} " + " ".join(f"{1e3 * seconds:>9.1f}" for seconds in (whole, *parts.values()))

    def _exposed(self) -> Iterator[str]:
        rank = next(iter(self.segments))
        yield f"Exposed communication of rank {rank}, ms: it waits, and computes nothing"
        yield f"{'':>9} {'waits':>6} {'issued late':>12} {'slow link':>10} {'slow peer':>10}  collective"
        for each in self.exposed(rank)[:_SHOWN]:
            peer = max(each.peers, key=lambda r: each.peers[r]) if each.peers else None
            waited_for = f", mostly for rank {peer}" if peer is not None and each.slow_peer > each.seconds / 2 else ""
            parts = f"{1e3 * each.late_issue:>12.2f} {1e3 * each.slow_link:>10.2f} {1e3 * each.slow_peer:>10.2f}"
            name = f"{each.kind.replace('_', '-')} of {_short(each.units)}{waited_for}"
            yield f"{1e3 * each.seconds:>9.2f} {each.count:>6} {parts}  {name}"

    def _arrivals(self) -> Iterator[str]:
        last = last_arrivals(self.launches)
        total = max(sum(last.values()), 1)
        shares = ", ".join(f"rank {rank} {100 * count / total:.0f} %" for rank, count in last.items())
        yield f"The last to issue a collective: {shares}"
        late = late_ranks(self.segments)
        for each in late[:_SHOWN]:
            where = f"{each.phase} of {_short(each.units)}"
            yield f"Late: rank {each.rank} in the {where}, by {1e3 * each.seconds:.1f} ms (median over steps)"
        if not late:
            yield "No rank is late for any unit"


class Clock(Protocol):
    """Where times of events are taken: on the host, or on an accelerator's streams."""

    def mark(self) -> Any:
        """Mark the present; None if that is not possible now."""

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark, when it is over, in seconds since 1970."""


@contextlib.contextmanager
def recorded(clock: Clock) -> Iterator[list[Event]]:
    """Record the events of this rank. The list has them when the context ends."""
    found: list[Event] = []
    marked: list[tuple[Any, tuple[float, int, int, str, str, int, int]]] = []
    PROGRESS.traced = lambda event: marked.append((clock.mark(), event))
    PROGRESS.enter("user code", None)
    try:
        yield found
    finally:
        PROGRESS.enter("the end of the trace", None)
        PROGRESS.traced = None
    found += [Event(*event)._replace(time=clock.seconds(mark)) for mark, event in marked if mark is not None]


@contextlib.contextmanager
def trace(folder: str | Path) -> Iterator[Trace]:
    """Record what each rank does while the context is open, and write what came of it to a folder.

    Written are ``trace.json``, for ui.perfetto.dev or chrome://tracing, with all ranks on one clock; ``table.txt``,
    communication that nothing hides, by unit and reason, and ranks that are late; and ``step.png``, compute,
    communication and memory of one step (with matplotlib). The table is also what ``print(trace.table())`` shows.

    On CPUs times are those of the host, which also computes and waits; the end of a collective is only seen when it is
    waited for. On accelerators they are those of events on the streams, for which the host does not wait before the
    context ends. All ranks open and close the context together, between steps: both are collectives.

    Args:
        folder: Is made if it does not exist. Rank 0 writes.

    Yields:
        The trace, which is empty until the context ends.

    Raises:
        FullshardError: If a trace runs already, the first forward on an accelerator was inside the context, or the
            files cannot be written.

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
    if PROGRESS.traced is not None:
        raise FullshardError("a trace runs already; end its context first")
    found, on_accelerator = Trace(), uses_accelerator()
    clock: Clock = DeviceClock() if on_accelerator else HostClock()
    shift = _clock_shift()
    with recorded(clock) as events:
        yield found
    failure: Exception | None = None
    if uses_accelerator() and not on_accelerator:
        failure = FullshardError("trace: expected the first forward on an accelerator before the trace, not inside")
    for rank, of_rank in gather([event._replace(time=event.time - shift) for event in events], None).items():
        found.add(rank, of_rank)
    if failure is None and (not dist.is_initialized() or dist.get_rank() == 0):
        try:
            _write(found, Path(folder))
        except OSError as error:
            failure = FullshardError(f"cannot write the trace to {folder}: {error}")
    raise_on_all(failure, [dist.group.WORLD] if dist.is_initialized() else [])


def _clock_shift() -> float:
    """Return by how many seconds this rank's clock is ahead of rank 0's. A collective.

    Ranks leave an exchange at nearly the same time: the median of a few is taken.
    """
    differences = []
    for _ in range(5):
        gather(None, None)
        clocks = gather(time.time(), None)
        differences.append(clocks[dist.get_rank() if dist.is_initialized() else 0] - clocks[min(clocks)])
    shift = statistics.median(differences)
    return shift if abs(shift) > _SAME_CLOCK_S else 0.0


_SAME_CLOCK_S = 0.005  # differences below are those of leaving the exchange, as on one machine


def _write(found: Trace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.json").write_text(json.dumps(chrome_trace(found.segments, found.launches, found.memory)))
    (folder / "table.txt").write_text(found.table() + "\n")
    draw_step(found.segments, found.launches, found.memory, folder / "step.png")


def _short(units: str) -> str:
    names = [name or "the root" for name in units.split(", ")]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
