"""The output folder of a run: its name, its lock, and which checkpoint the run resumes from."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from fullshard.train import checkpoint_folder
from fullshard.train.checkpoint_folder import CHECKPOINTS
from fullshard.train.config import ConfigError, TrainConfig, option
from fullshard.train.stop import GRACE

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PLOT = "loss.png"
CONFIG = "config.toml"
MODEL = "model.safetensors"
BEST = "best.safetensors"
SUMMARY = "summary.json"
ERROR = "error.txt"
LOCK_TIMEOUT_S = GRACE + 30.0  # seconds to wait for a lock: orphaned workers save and end before that
POLL = 0.1  # seconds between attempts


@dataclass(frozen=True)
class RunLocation:
    """Folder of a run, and what it starts from, as given by the user. Its fields are options of the command line."""

    PANEL: ClassVar[str] = "Run"
    out: Path = option(Path("runs"), "Folder of runs.")
    name: str | None = option(None, "The run's folder in it; an existing run is resumed.", default="next free number")
    resume: Path | None = option(
        None,
        "Start from another run's newest checkpoint, or from this one. A run that has checkpoints of its own "
        "resumes from those instead, if its --name is given.",
        metavar="FOLDER",
        default="none",
    )
    fresh: bool = option(False, "Start from the beginning; the contents of the run's folder are moved aside.")

    def __post_init__(self) -> None:
        if self.name is not None and (self.name in ("", ".", "..") or Path(self.name).name != self.name):
            raise ConfigError(f"--name must be the name of one folder in {self.out}, found {self.name!r}; see --out")

    @property
    def folder(self) -> Path:
        """The run's folder; the name must be settled."""
        assert self.name is not None
        return self.out.resolve() / self.name

    @property
    def existing_folder(self) -> Path | None:
        """The run's folder, if it exists and the run resumes in it."""
        return self.folder if self.name is not None and not self.fresh and self.folder.is_dir() else None

    @property
    def own_checkpoint(self) -> Path | None:
        """The newest checkpoint of the run itself."""
        return checkpoint_folder.newest(self.existing_folder / CHECKPOINTS) if self.existing_folder else None

    def checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from: the run's newest, else that of `resume`; None if there is none.

        Raises:
            ConfigError: `resume` names no checkpoint.
        """
        return self.own_checkpoint or (checkpoint_folder.find(self.resume).resolve() if self.resume else None)

    def settings(self) -> TrainConfig | None:
        """Return the settings of the run to resume; they replace the defaults of options."""
        checkpoint = self.checkpoint()
        run = checkpoint_folder.run_of(checkpoint) if checkpoint else None
        return TrainConfig.from_toml(run / CONFIG) if run and (run / CONFIG).is_file() else None

    def words(self) -> list[str]:
        """Return the options of the command line that stand for this location; not `--fresh`, which is done once."""
        words = ["--out", str(self.out), *(["--name", self.name] if self.name is not None else [])]
        return [*words, *(["--resume", str(self.resume)] if self.resume else [])]

    def check(self, config: TrainConfig) -> None:
        """Raise if a run with these settings may not write to the folder.

        Raises:
            ConfigError: the folder has results that the run does not resume from.
        """
        folder = self.existing_folder
        if folder is None or self.own_checkpoint is not None or not (folder / METRICS).exists():
            return
        if not (folder / SUMMARY).exists() and (folder / CONFIG).is_file():
            before = TrainConfig.from_toml(folder / CONFIG)
            same = ("model", "training", "seed", "data")
            if all(getattr(before, name) == getattr(config, name) for name in same):
                return  # stopped before its first checkpoint: the same steps will be repeated
        raise ConfigError(
            f"{folder} already has results, but no checkpoint to resume from: choose another --name, or --fresh, "
            f"which moves them aside"
        )

    def claim(self, say: Callable[[str], None]) -> RunLocation:
        """Create the run's folder and return its location, with its name settled; `fresh` moves old contents aside.

        Args:
            say: called with a message about moved files.

        Raises:
            OSError: the folder cannot be made.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        if self.name is None:
            return replace(self, name=_next_number(self.out), fresh=False)
        if self.fresh and self.folder.is_dir() and any(self.folder.iterdir()):
            say(f"--fresh: the contents of {self.out / self.name} were moved to {_set_aside(self.out / self.name)}")
        self.folder.mkdir(exist_ok=True)
        return replace(self, fresh=False)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in UTF-8, atomically, whenever the process is killed."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def lock(folder: Path) -> int | None:
    """Lock a run's folder until the process ends, however it ends.

    After a launcher was killed, its orphaned workers may still be saving a checkpoint when the next one starts: the
    lock is waited for.

    Returns:
        The open folder that carries the lock; None where the file system or the platform has no locks.

    Raises:
        ConfigError: another process has locked the folder.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another process is writing to {folder}: stop it, or choose another --name"
                ) from None
            time.sleep(POLL)
        except OSError:
            return None
        else:
            return descriptor


def _next_number(out: Path) -> str:
    number = max((int(entry.name) for entry in out.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another run was faster
            (out / f"{number:03d}").mkdir()
            return f"{number:03d}"


def _set_aside(folder: Path) -> Path:
    descriptor = lock(folder)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)
    if descriptor is not None:
        os.close(descriptor)
    return aside
