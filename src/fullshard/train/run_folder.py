"""The folder that a run writes to, and who may."""

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
PATIENCE = 150.0  # seconds to wait for another process to leave a folder: orphaned workers save and end before that
POLL = 0.1  # seconds between attempts
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # environment of a worker: how often torch elastic started all of them anew
RUN_MARK = ".torchelastic"  # in the folder of a run without a name: which torchrun it belongs to


@dataclass(frozen=True)
class Place:
    """Where a run goes on, as the user says it.

    Attributes:
        out: folder of runs.
        name: the run's name; None takes the next free number.
        resume: another run, or a checkpoint, to start from; None for none.
        fresh: whether to start from the beginning although the run has a checkpoint.
    """

    out: Path
    name: str | None = None
    resume: Path | None = None
    fresh: bool = False

    @property
    def taken(self) -> Path | None:
        """The run's folder, if it is there and the run shall go on in it."""
        if self.name is None or self.fresh:
            return None
        folder = self.out / self.name
        return folder if folder.is_dir() else None

    @property
    def own_checkpoint(self) -> Path | None:
        """The newest checkpoint of the run itself."""
        return CheckpointFolder(self.taken / CHECKPOINTS).newest() if self.taken else None

    def checkpoint(self) -> Path | None:
        """The checkpoint that the run goes on from: its own newest, else that of `resume`; None if there is none.

        Raises:
            ConfigError: `resume` names no checkpoint.
        """
        return self.own_checkpoint or (checkpoint_folder.find(self.resume) if self.resume else None)

    def settings(self) -> TrainConfig | None:
        """The settings of the run that goes on: options that the user leaves out are as they were."""
        checkpoint = self.checkpoint()
        run = checkpoint_folder.run_of(checkpoint) if checkpoint else None
        return TrainConfig.from_toml(run / CONFIG) if run and (run / CONFIG).is_file() else None

    def is_finished(self, steps: int) -> bool:
        """Whether the run that is here has done that many steps, and has its results."""
        checkpoint = self.own_checkpoint
        if self.taken is None or checkpoint is None or checkpoint_folder.step_of(checkpoint) != steps:
            return False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            summary = json.loads((self.taken / SUMMARY).read_text(encoding="utf-8"))
            return summary.get("bits_per_byte") is not None and summary.get("steps") == steps
        return False

    def check(self, config: TrainConfig) -> None:
        """Make sure that a run of these settings may write here.

        Raises:
            ConfigError: the folder holds results that the run does not go on from.
        """
        folder = self.taken
        if folder is None or self.own_checkpoint is not None or not (folder / METRICS).exists():
            return
        if not (folder / SUMMARY).exists() and (folder / CONFIG).is_file():
            before = TrainConfig.from_toml(folder / CONFIG)
            same = ("model", "training", "seed", "data")
            if all(getattr(before, name) == getattr(config, name) for name in same):
                return  # stopped before its first checkpoint: the same steps will be done again
        raise ConfigError(
            f"{folder} holds results already, and no checkpoint to go on from: choose another --name, or --fresh, "
            f"which moves them aside"
        )


@dataclass(frozen=True)
class Start:
    """What a run begins with, the same on every rank.

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
        """Whether the checkpoint is the run's own, not another's."""
        return self.checkpoint is not None and self.checkpoint.parent == self.folder / CHECKPOINTS


def enter(place: Place, say: Callable[[str], None]) -> Path:
    """The folder of a run, made if it is not there; with `fresh`, what it holds is moved aside.

    Call it once: by the launcher, or by rank 0 under torchrun, whose restarts go on in the folder of the first start.

    Args:
        place: what the user says.
        say: told what was moved.

    Raises:
        OSError: the folder cannot be made.
    """
    place.out.mkdir(parents=True, exist_ok=True)
    restarted = os.environ.get(RESTARTS, "0") != "0"
    if place.name is None:
        return (_marked(place.out) if restarted else None) or _numbered(place.out)
    folder = place.out / place.name
    if place.fresh and not restarted and folder.is_dir() and any(folder.iterdir()):
        say(f"--fresh: what {folder} held is now in {_set_aside(folder)}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def begin(folder: Path, resume: Path | None) -> Start:
    """Take hold of a run's folder for as long as this process lives, and decide what the run goes on from.

    Args:
        folder: from `enter`.
        resume: another run, or a checkpoint, to start from if the run has none.

    Raises:
        ConfigError: another process keeps writing to the folder, or `resume` names no checkpoint.
    """
    folder = folder.resolve()
    if resume is not None and resume.resolve() == folder:
        resume = None
    _hold(folder)
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
            (folder / RUN_MARK).write_text(_torchrun(), encoding="utf-8")
        return folder


def _marked(out: Path) -> Path | None:
    """The newest folder that this torchrun's first start made."""
    for folder in sorted(out.iterdir(), reverse=True):
        with contextlib.suppress(OSError):
            if (folder / RUN_MARK).read_text(encoding="utf-8") == _torchrun():
                return folder
    return None


def _torchrun() -> str:
    """What tells this worker's torchrun from others: its run id, or where there is none its process."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"process {os.getppid()} on {os.uname().nodename}"


def _set_aside(folder: Path) -> Path:
    held = _hold(folder)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)
    if held is not None:
        os.close(held)
    return aside


def _hold(folder: Path) -> int | None:
    """Lock a folder until the process ends, however it ends.

    After a launcher was killed, its orphaned workers may still be saving a checkpoint when the next one starts.

    Returns:
        The open folder that carries the lock; None where the file system or the platform has no locks.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    held = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another process still writes to {folder}: stop it, or choose another --name"
                ) from None
            time.sleep(POLL)
        except OSError:
            return None
        else:
            return held
