"""The checkpoints of a run as folders on disk, one for each saved step.

Nothing here needs torch, so that a wrong `--resume` is found at once.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from fullshard.train.config import ConfigError

INDEX = "fullshard.json"  # of a checkpoint: written last, so that one without it is incomplete
CHECKPOINTS = "checkpoints"  # in a run's folder
STEP = re.compile(r"step-(\d+)")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after optimizer step `step`."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder; 0 if it has another name."""
    match = STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the oldest first."""
    return [path for path in _all(folder) if (path / INDEX).is_file()]


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; None if there is none."""
    return max(complete(folder), key=step_of, default=None)


def before(checkpoint: Path) -> Path | None:
    """Return the complete checkpoint before this one; None if it is the oldest."""
    earlier = [path for path in complete(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    return earlier[-1] if earlier else None


def keep(folder: Path, count: int) -> None:
    """Remove complete checkpoints except the newest `count`."""
    for path in complete(folder)[:-count]:
        (path / INDEX).unlink(missing_ok=True)  # first: what is half removed must not count as complete
        shutil.rmtree(path, ignore_errors=True)


def remove_incomplete(folder: Path) -> None:
    """Remove incomplete checkpoints. Call it only while no process writes one."""
    for path in _all(folder):
        if not (path / INDEX).is_file():
            shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename a corrupted checkpoint, so that it is ignored, and return where it is now."""
    number, aside = 1, checkpoint.with_name(f"{checkpoint.name}.damaged")
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
    return checkpoint.rename(aside)


def run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run that contains a checkpoint; None if it is elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def find(folder: Path) -> Path:
    """Return the checkpoint that a user names: a checkpoint itself, or the newest complete one of a run.

    Raises:
        ConfigError: there is none.
    """
    if (folder / INDEX).is_file():
        return folder
    found = newest(folder / CHECKPOINTS) or newest(folder)
    if found is None:
        reason = "holds no complete checkpoint" if folder.is_dir() else "is no folder"
        raise ConfigError(f"cannot resume: {folder} {reason}; name the folder of a run, or one in its {CHECKPOINTS}/")
    return found


def _all(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((entry for entry in folder.iterdir() if STEP.fullmatch(entry.name) and entry.is_dir()), key=step_of)
