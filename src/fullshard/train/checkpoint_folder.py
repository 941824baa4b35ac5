"""The checkpoints of a run as folders on disk: complete ones, the newest one, and which to remove.

Nothing here needs torch, so that a wrong `--resume` is found at once.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fullshard.train.config import ConfigError

INDEX = "fullshard.json"  # of a checkpoint: written last, so that one without it is incomplete
CHECKPOINTS = "checkpoints"  # in a run's folder
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, one folder each, named by step.

    Attributes:
        path: the folder; it need not be there.
    """

    path: Path

    def of_step(self, step: int) -> Path:
        """Return the path of the checkpoint after optimizer step `step`."""
        return self.path / f"step-{step:08d}"

    def complete(self) -> list[Path]:
        """Return complete checkpoints, the oldest first."""
        return [path for path in self._all() if (path / INDEX).is_file()]

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; None if there is none."""
        return max(self.complete(), key=step_of, default=None)

    def remove_incomplete(self) -> list[Path]:
        """Remove incomplete checkpoints. Call it only while no process writes one.

        Returns:
            What was removed.
        """
        incomplete = [path for path in self._all() if not (path / INDEX).is_file()]
        for path in incomplete:
            _remove(path)
        return incomplete

    def before(self, checkpoint: Path) -> Path | None:
        """Return the complete checkpoint before this one; None if it is the oldest."""
        earlier = [path for path in self.complete() if step_of(path) < step_of(checkpoint)]
        return earlier[-1] if earlier else None

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a corrupted checkpoint, so that it is ignored.

        Returns:
            Where it is now.
        """
        number, aside = 1, checkpoint.with_name(f"{checkpoint.name}.damaged")
        while aside.exists():
            number += 1
            aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
        return checkpoint.rename(aside)

    def keep(self, count: int) -> None:
        """Remove complete checkpoints except the newest `count`."""
        for path in self.complete()[:-count]:
            _remove(path)

    def _all(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        found = (entry for entry in self.path.iterdir() if STEP.fullmatch(entry.name) and entry.is_dir())
        return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder; 0 if it has another name."""
    match = STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


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
    for place in (folder / CHECKPOINTS, folder):
        newest = CheckpointFolder(place).newest()
        if newest:
            return newest
    reason = "holds no complete checkpoint" if folder.is_dir() else "is no folder"
    raise ConfigError(f"cannot resume: {folder} {reason}; name the folder of a run, or one in its {CHECKPOINTS}/")


def _remove(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink(missing_ok=True)  # first: what is half removed must not count as complete
    shutil.rmtree(checkpoint, ignore_errors=True)
