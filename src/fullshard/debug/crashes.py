"""Read what ranks have written about the end of a run, and summarize it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.messages import clipped
from fullshard.progress import Event
from fullshard.ranks.agreement import list_ranks, list_values
from fullshard.ranks.crash import FORMAT
from fullshard.ranks.verdict import Report, judge

__all__ = ["Crash", "read_crashes", "summarize"]

_EVENTS_SHOWN = 8


@dataclass(frozen=True)
class Crash:
    """The file of one rank about the end of a run.

    Args:
        rank: Its global rank.
        world_size: Ranks of the job.
        host: Name of its machine.
        time: When it was written, in seconds since 1970.
        failure: What the watchdog has found; None: it had found nothing.
        report: What it was doing.
        events: The last ones.
    """

    rank: int
    world_size: int
    host: str
    time: float
    failure: str | None
    report: Report
    events: list[Event]


def read_crashes(folder: Path) -> dict[int, Crash]:
    """Return what the ranks have written into a folder, by rank; empty if there are no such files.

    Raises:
        ValueError: If a file is damaged, or of another version.
    """
    crashes = {}
    for path in sorted(folder.glob("rank*.json")):
        try:
            if not path.is_file():  # a pipe would block
                raise ValueError("it is no regular file")
            value: dict[str, Any] = json.loads(path.read_text())
            if value.pop("format") != FORMAT:
                raise ValueError("its format is not known")
            report = Report.from_json(value.pop("report"))
            events = [Event(*each) for each in value.pop("events")]
            crash = Crash(report=report, events=events, **value)
            crashes[crash.rank] = crash
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}: expected what a rank writes after a crash, found something else: {clipped(error)}"
            ) from None
    return crashes


def summarize(crashes: Mapping[int, Crash]) -> str:
    """Say in a paragraph what happened first, and list the last events of the rank that it happened to."""
    world_size = max(crash.world_size for crash in crashes.values())
    missing = sorted(set(range(world_size)) - crashes.keys())
    raised = [(event.time, rank, event) for rank, c in crashes.items() for event in c.events if event.kind == "raised"]
    reports = {rank: crash.report for rank, crash in crashes.items()}
    verdict = judge(reports, dict.fromkeys(missing, ""))
    failure = next((crash.failure for crash in crashes.values() if crash.failure is not None), None)
    if raised:
        moment, first, event = min(raised)
        beginning = f"First, at {_clock(moment)}, rank {first} raised an exception in the {event.what}"
        beginning += f" (step {event.step}, microbatch {event.microbatch})."
    else:
        culprits = () if verdict is None else verdict.culprits
        first = next((rank for rank in culprits if rank in crashes), _stopped_first(crashes))
        beginning = "" if missing else f"No exception was raised in a forward or backward; rank {first} stopped first."
    if missing:
        beginning += f"{' ' * bool(beginning)}There is no file of {list_ranks(missing)}: it ended normally, was killed "
        beginning += "(by the launcher after another rank had failed, or for its memory), or wrote to another machine."
    doing = f"The ranks were doing this: {list_values({rank: each.doing for rank, each in sorted(reports.items())})}."
    reason = failure or (doing if verdict is None else f"{verdict.message}.")
    reason = f"{reason[0].upper()}{reason[1:]}".partition("\n`fullshard inspect ")[0].rstrip(".") + "."
    crash = crashes[first]
    end = len(crash.events)
    if raised:  # what came before it, and a little of what came after
        end = min(end, 3 + next(at for at, each in enumerate(crash.events) if each.kind == "raised"))
    lines = [
        f"  {_clock(each.time)}  step {each.step}, microbatch {each.microbatch}  {each.kind} {each.what or 'the root'}"
        for each in crash.events[max(0, end - _EVENTS_SHOWN) : end]
    ]
    which = "Events" if end < len(crash.events) else "The last events"
    return "\n".join([f"{beginning} {reason}", "", f"{which} of rank {first} ({crash.host}):", *lines])


def _stopped_first(crashes: Mapping[int, Crash]) -> int:
    """Return the rank whose last event is the oldest."""
    return min(crashes, key=lambda rank: crashes[rank].events[-1].time if crashes[rank].events else 0.0)


def _clock(seconds: float) -> str:
    moment = time.localtime(seconds)
    return f"{time.strftime('%H:%M:%S', moment)}.{int(seconds % 1 * 1000):03d}"
