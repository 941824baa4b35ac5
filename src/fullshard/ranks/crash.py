"""Files about the end of a run, one of each rank; ``fullshard.debug.crashes`` reads them.

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
from pathlib import Path

from fullshard.progress import PROGRESS, Event
from fullshard.ranks.verdict import Report

__all__ = ["FOLDER_VARIABLE", "FORMAT", "crash_folder", "forget_crash", "write_crash"]

FOLDER_VARIABLE = "FULLSHARD_CRASH_DIR"
STEPS = 3  # of which events are written
FORMAT = "fullshard crash 2"


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
        "format": FORMAT,
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
