"""The output folder of a run, and its lock."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fullshard.train import checkpoint_folder
from fullshard.train.checkpoint_folder import CHECKPOINTS, CheckpointFolder
from fullshard.train.config import ConfigError, TrainConfig

METRICS = "metrics.jsonl"
PLOT = "loss.png"
CONFIG = "config.toml"
MODEL = "model.safetensors"
BEST = "best.safetensors"
SUMMARY = "summary.json"
ERROR = "error.txt"
LOCK_TIMEOUT_S = 150.0  # seconds to wait for a lock: orphaned workers save and end before that
POLL = 0.1  # seconds between attempts
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # environment of a worker: number of restarts by torch elastic
RUN_MARK = ".torchelastic"  # in the folder of a run without a name: identifies its torchrun


@dataclass(frozen=True)
class RunLocation:
    """Folder and resume options of a run, as given by the user.

    Attributes:
        out: folder of runs.
        name: the run's name, one folder in `out`; None takes the next free number.
        resume: another run, or a checkpoint, to start from; None for none.
        fresh: start from the beginning although the run has a checkpoint.
    """

    out: Path
    name: str | None = None
    resume: Path | None = None
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.name is not None and (self.name in ("", ".", "..") or Path(self.name).name != self.name):
            raise ConfigError(f"--name must be the name of one folder in {self.out}, found {self.name!r}; see --out")

    @property
    def existing_folder(self) -> Path | None:
        """The run's folder, if it exists and the run resumes in it."""
        if self.name is None or self.fresh:
            return None
        folder = self.out / self.name
        return folder if folder.is_dir() else None

    @property
    def own_checkpoint(self) -> Path | None:
        """The newest checkpoint of the run itself."""
        return CheckpointFolder(self.existing_folder / CHECKPOINTS).newest() if self.existing_folder else None

    def checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from: the run's newest, else that of `resume`; None if there is none.

        Raises:
            ConfigError: `resume` names no checkpoint.
        """
        return self.own_checkpoint or (checkpoint_folder.find(self.resume) if self.resume else None)

    def settings(self) -> TrainConfig | None:
        """Return the settings of the run to resume; they replace the defaults of options."""
        checkpoint = self.checkpoint()
        run = checkpoint_folder.run_of(checkpoint) if checkpoint else None
        return TrainConfig.from_toml(run / CONFIG) if run and (run / CONFIG).is_file() else None

    def is_finished(self, steps: int) -> bool:
        """Return True if the run has done that many steps, and has its results."""
        checkpoint = self.own_checkpoint
        if self.existing_folder is None or checkpoint is None or checkpoint_folder.step_of(checkpoint) != steps:
            return False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            summary = json.loads((self.existing_folder / SUMMARY).read_text(encoding="utf-8"))
            return summary.get("bits_per_byte") is not None and summary.get("steps") == steps
        return False

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


@dataclass(frozen=True)
class Start:
    """The initial state of a run, the same on every rank.

    Attributes:
        folder: the run's folder, absolute.
        checkpoint: the checkpoint to load; None starts from the beginning.
        origin: the folder named by `--resume`, absolute; empty for none.
    """

    folder: Path
    checkpoint: Path | None
    origin: str

    @property
    def is_own(self) -> bool:
        """True if the checkpoint is the run's own, not another's."""
        return self.checkpoint is not None and self.checkpoint.parent == self.folder / CHECKPOINTS


def enter(location: RunLocation, say: Callable[[str], None]) -> Path:
    """Return the folder of a run, created if missing; with `fresh`, existing contents are moved aside.

    Call it once: by the launcher, or by rank 0 under torchrun, whose restarts resume in the folder of the first start.

    Args:
        location: folder and options given by the user.
        say: called with a message about moved files.

    Raises:
        OSError: the folder cannot be made.
    """
    location.out.mkdir(parents=True, exist_ok=True)
    restarted = os.environ.get(RESTARTS, "0") != "0"
    if location.name is None:
        return (_folder_of_torchrun(location.out) if restarted else None) or _numbered(location.out)
    folder = location.out / location.name
    if location.fresh and not restarted and folder.is_dir() and any(folder.iterdir()):
        say(f"--fresh: the contents of {folder} were moved to {_set_aside(folder)}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def begin(folder: Path, resume: Path | None) -> Start:
    """Lock a run's folder for the lifetime of this process, and choose the checkpoint to resume from.

    Args:
        folder: from `enter`.
        resume: another run, or a checkpoint, to start from if the run has none.

    Raises:
        ConfigError: another process has locked the folder, or `resume` names no checkpoint.
    """
    folder = folder.resolve()
    if resume is not None and resume.resolve() == folder:
        resume = None
    _lock(folder)
    checkpoint = CheckpointFolder(folder / CHECKPOINTS).newest()
    if checkpoint is None and resume is not None:
        checkpoint = checkpoint_folder.find(resume).resolve()
    return Start(folder, checkpoint, str(resume.resolve()) if resume else "")


def _numbered(out: Path) -> Path:
    number = max((int(entry.name) for entry in out.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        number += 1
        folder = out / f"{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run was faster
            continue
        if RESTARTS in os.environ:
            (folder / RUN_MARK).write_text(_torchrun_id(), encoding="utf-8")
        return folder


def _folder_of_torchrun(out: Path) -> Path | None:
    """Return the newest folder that the first start of this torchrun created."""
    for folder in sorted(out.iterdir(), reverse=True):
        with contextlib.suppress(OSError):
            if (folder / RUN_MARK).read_text(encoding="utf-8") == _torchrun_id():
                return folder
    return None


def _torchrun_id() -> str:
    """Return an identifier of this worker's torchrun: its run id, or its process."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"process {os.getppid()} on {os.uname().nodename}"


def _set_aside(folder: Path) -> Path:
    descriptor = _lock(folder)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)
    if descriptor is not None:
        os.close(descriptor)
    return aside


def _lock(folder: Path) -> int | None:
    """Lock a folder until the process ends, however it ends.

    After a launcher was killed, its orphaned workers may still be saving a checkpoint when the next one starts.

    Returns:
        The open folder that carries the lock; None where the file system or the platform has no locks.
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
