"""What the training thread of a rank did between the events of a trace: segments without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fullshard.progress import Event

__all__ = ["COLLECTIVES", "Launched", "Segment", "launches", "memory", "segments"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_OF_OTHER_STREAMS = (*COLLECTIVES, "arrived", "memory")  # on accelerators, or at no time of their own
_NO_PHASE = (*_OF_OTHER_STREAMS, "begin", "end", "wait", "waited", "raised")


class Segment(NamedTuple):
    """A span of time in which a rank did one thing.

    Attributes:
        begin: Seconds since 1970.
        end: Likewise.
        step: Optimizer steps before it.
        microbatch: Number of the forward in that step.
        activity: ``"compute"``, ``"wait"`` for collectives, or ``"engine"``: the host's work for them.
        phase: ``"forward"``, ``"backward"``, ``"optimizer step"``, or other words.
        units: Names of units, ``""`` for the root.
        group: Of a wait: number of the process group.
        number: Of a wait: number of the last launch that it waits for.
    """

    begin: float
    end: float
    step: int
    microbatch: int
    activity: str
    phase: str
    units: str
    group: int = -1
    number: int = -1

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end - self.begin


class Launched(NamedTuple):
    """Collectives that a rank has issued together.

    Attributes:
        time: When it began to issue them (on an accelerator: when their stream got to them), in seconds since 1970.
        end: When they were through; on CPUs, when the rank had waited for them. None if it did not.
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        units: Names of units.
        after: Phase and units of what the rank computed before.
    """

    time: float
    kind: str
    units: str
    after: tuple[str, str]
    end: float | None = None


def segments(events: Sequence[Event]) -> list[Segment]:
    """Return what the rank did from the first event to the last. Segments follow each other without gaps."""
    found: list[Segment] = []
    phase, unit = "before the trace", ""
    operations: list[str] = []  # of the engine, that have begun and not ended
    waits: tuple[int, int] | None = None
    own, now = [event for event in events if event.kind not in _OF_OTHER_STREAMS], 0.0
    for event, after in zip(own, [*own[1:], None], strict=True):
        now = max(now, event.time)  # streams of a user's, each with its own time
        if event.kind == "begin":
            operations.append(event.what)
        elif event.kind == "end":
            if operations:
                operations.pop()
        elif event.kind == "wait":
            waits = event.group, event.number
        elif event.kind == "waited":
            waits = None
        elif event.kind not in _NO_PHASE:
            phase, unit = event.kind, event.what
        if after is None or after.time <= now:
            continue
        activity = "wait" if waits is not None else "engine" if operations else "compute"
        units = operations[-1].partition(" ")[2] if operations else unit
        span = now, after.time, event.step, event.microbatch
        found.append(Segment(*span, activity, phase, units, *(waits or (-1, -1))))
    return found


def launches(events: Sequence[Event]) -> dict[tuple[int, int], Launched]:
    """Return the launches of a rank by group and number."""
    found: dict[tuple[int, int], Launched] = {}
    phase, unit = "before the trace", ""
    for event in events:
        if event.kind in COLLECTIVES:
            found[event.group, event.number] = Launched(event.time, event.kind, event.what, (phase, unit))
        elif event.kind in ("arrived", "waited"):
            launched = found.get((event.group, event.number))
            if launched is not None and launched.end is None:
                found[event.group, event.number] = launched._replace(end=event.time)
        elif event.kind not in _NO_PHASE:
            phase, unit = event.kind, event.what
    return found


def memory(events: Sequence[Event]) -> list[tuple[float, int]]:
    """Return the bytes of the engine's buffers over time, beyond the least that they had."""
    found, total = [], 0
    for event in events:
        if event.kind == "memory":
            total += int(event.what)
            found.append((event.time, total))
    least = min([0, *(each for _, each in found)])
    return sorted(((moment, each - least) for moment, each in found), key=lambda each: each[0])
