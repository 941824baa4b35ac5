"""Timelines of a rank: segments without gaps between the events of a trace, collectives, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fullshard.progress import Event

__all__ = ["COLLECTIVES", "Launched", "RankGroup", "Segment", "launches", "memory", "segments", "short_units"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_OF_OTHER_STREAMS = (*COLLECTIVES, "arrived", "memory")  # on accelerators, or at no time of their own
_NO_PHASE = (*_OF_OTHER_STREAMS, "begin", "end", "wait", "waited", "raised")


class RankGroup(NamedTuple):
    """A process group, as all its ranks know it."""

    name: str
    ranks: tuple[int, ...]


_NO_GROUP = RankGroup("", ())


class Segment(NamedTuple):
    """A span of time in which a rank did one thing.

    Attributes:
        begin: Seconds since 1970.
        end: Likewise.
        step: Optimizer steps before it.
        microbatch: Number of the forward in that step.
        activity: ``"compute"``, ``"wait"`` for collectives, or ``"overhead"``: packing and issuing them.
        phase: ``"forward"``, ``"backward"``, ``"optimizer step"``, or other words.
        units: Names of units, ``""`` for the root.
        group: Of a wait: the process group; without ranks of a wait for copies.
        number: Of a wait: number of the last launch that it waits for.
    """

    begin: float
    end: float
    step: int
    microbatch: int
    activity: str
    phase: str
    units: str
    group: RankGroup = _NO_GROUP
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
    """

    time: float
    kind: str
    units: str
    end: float | None = None


def segments(events: Sequence[Event], groups: Mapping[int, RankGroup]) -> list[Segment]:
    """Return what the rank did from the first event to the last. Segments follow each other without gaps.

    Args:
        events: Of the rank, in their order.
        groups: By the numbers that the rank has for them.
    """
    found: list[Segment] = []
    phase, unit = "before the trace", ""
    operations: list[str] = []  # of the engine, that have begun and not ended
    waits: tuple[RankGroup, int] | None = None
    own, now = [event for event in events if event.kind not in _OF_OTHER_STREAMS], 0.0
    for event, after in zip(own, [*own[1:], None], strict=True):
        now = max(now, event.time)  # streams of a user's, each with its own time
        if event.kind == "begin":
            operations.append(event.what)
        elif event.kind == "end":
            if operations:
                operations.pop()
        elif event.kind == "wait":
            waits = groups.get(event.group, _NO_GROUP), event.number
        elif event.kind == "waited":
            waits = None
        elif event.kind not in _NO_PHASE:
            phase, unit = event.kind, event.what
        if after is None or after.time <= now:
            continue
        working = operations and not operations[-1].startswith("optimizer")  # which computes
        activity = "wait" if waits is not None else "overhead" if working else "compute"
        units = operations[-1].partition(" ")[2] if working else unit
        span = now, after.time, event.step, event.microbatch
        found.append(Segment(*span, activity, phase, units, *(waits or ())))
    return found


def launches(events: Sequence[Event], groups: Mapping[int, RankGroup]) -> dict[tuple[RankGroup, int], Launched]:
    """Return the launches of a rank by group and number."""
    found: dict[tuple[RankGroup, int], Launched] = {}
    for event in events:
        key = groups.get(event.group, _NO_GROUP), event.number
        if event.kind in COLLECTIVES:
            found[key] = Launched(event.time, event.kind, event.what)
        elif event.kind in ("arrived", "waited"):
            launched = found.get(key)
            if launched is not None and launched.end is None:
                found[key] = launched._replace(end=event.time)
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


def short_units(units: str) -> str:
    """Return the first of some names of units, for people."""
    names = [name or "the root" for name in units.split(", ")]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
