"""Files about the end of a run: one of each rank, and what they say together.

A file is JSON: what the rank was doing (a ``Report``), its last events of three steps, and the error. Each rank writes
its own, without communication, so that nothing is lost if ranks or the store are gone.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.messages import clipped
from fullshard.progress import PROGRESS, Event
from fullshard.ranks.agreement import list_ranks, list_values
from fullshard.ranks.verdict import Report, judge

__all__ = ["FOLDER_VARIABLE", "Crash", "crash_folder", "forget_crash", "read_crashes", "summarize", "write_crash"]

FOLDER_VARIABLE = "FULLSHARD_CRASH_DIR"
STEPS = 3  # of which events are written
_FORMAT = "fullshard crash 1"
_EVENTS_SHOWN = 8


@dataclass(frozen=True)
class Crash:
    """What one rank has written.

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


def crash_folder() -> Path:
    """Return the folder for the files of this job: that of ``FULLSHARD_CRASH_DIR``, or one in the temporary folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = str(os.getppid()) if job == "none" else job  # the name of jobs that torchrun was given no name for
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"fullshard-crash-{os.getuid()}-{job}"


def write_crash(rank: int, world_size: int, report: Report, failure: str | None) -> None:
    """Write this rank's file. Nothing that another user has prepared in the temporary folder is written to.

    Raises:
        OSError: If it cannot be written, or the folder in the temporary folder is another user's, or a link.
    """
    events = [Event(*each) for each in list(PROGRESS.events)]
    last = events[-1].step if events else 0
    value = {
        "format": _FORMAT,
        "rank": rank,
        "world_size": world_size,
        "host": platform.node(),
        "time": time.time(),
        "failure": failure,
        "report": report.to_json(),
        "events": [event for event in events if event.step > last - STEPS],
    }
    folder = crash_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.environ.get(FOLDER_VARIABLE):
        _own(folder)
    path = folder / f"rank{rank}.json"
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # follows no link
        file.write(json.dumps(value))
    partial.replace(path)


def forget_crash(rank: int) -> None:
    """Remove the file of a rank of an earlier run.

    Raises:
        OSError: As ``write_crash``, or if there is none.
    """
    folder = crash_folder()
    if not os.environ.get(FOLDER_VARIABLE):
        _own(folder)
    (folder / f"rank{rank}.json").unlink()


def _own(folder: Path) -> None:
    """Keep other users out of a folder whose name they can guess, or raise if it is theirs, or leads elsewhere."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise OSError(
            f"{folder} is a link, or belongs to another user: expected a folder of this user; set {FOLDER_VARIABLE} to "
            "another folder"
        )
    folder.chmod(0o700)


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
            if value.pop("format") != _FORMAT:
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
    """Say what happened first, in a paragraph, and list the last events of the rank that it happened to."""
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
