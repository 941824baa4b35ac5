"""The folder of a run: its files, its checkpoints, its lock, and which checkpoint the run resumes from.

Nothing here needs torch, so that a wrong `--name` or `--resume` is found at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fullshard.messages import clipped
from fullshard.train.config import ConfigError, TrainConfig, option

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PLOT = "loss.png"
CONFIG = "config.toml"
MODEL = "model.safetensors"
SUMMARY = "summary.json"
ERROR = "error.txt"
CHECKPOINTS = "checkpoints"
INDEX = "fullshard.json"  # of a checkpoint: written last, so that one without it is incomplete
MOST_BYTES = 255  # of a name on most file systems
STEP = re.compile(r"step-(\d+)")
LOCK_TIMEOUT = 150.0  # seconds to wait for a lock: orphaned workers have ended before that


@dataclass(frozen=True)
class RunLocation:
    """Folder of a run, and what it starts from, as given by the user. Its fields are options of the command line."""

    PANEL: ClassVar[str] = "Run"
    out: Path = option(Path("runs"), "Folder for all runs.")
    name: str | None = option(
        None, "Name of the run, a folder in --out. An existing run is resumed.", default="next free number"
    )
    resume: Path | None = option(
        None,
        "Start from this checkpoint, or from the newest checkpoint of this run. If --name is a run that has "
        "checkpoints, it resumes from those instead.",
        metavar="FOLDER",
        default="none",
    )

    def __post_init__(self) -> None:
        if self.name is None:
            return
        is_one = self.name not in ("", ".", "..") and Path(self.name).name == self.name and "\0" not in self.name
        if not is_one or len(os.fsencode(self.name)) > MOST_BYTES:
            raise ConfigError(
                f"--name must be the name of one folder in {self.out}, of at most {MOST_BYTES} bytes, found "
                f"{clipped(repr(self.name))}; see --out"
            )

    @property
    def folder(self) -> Path:
        """The run's folder; the name must be settled."""
        assert self.name is not None
        return self.out.resolve() / self.name

    def checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from: the run's newest, else that of `resume`; None if there is none.

        Raises:
            ConfigError: `resume` names no checkpoint.
        """
        own = complete_checkpoints(self.folder / CHECKPOINTS) if self.name is not None else []
        if own or self.resume is None:
            return own[-1] if own else None
        return find_checkpoint(self.resume).resolve()

    def settings(self) -> TrainConfig | None:
        """Return the settings of the run to resume, which replace the defaults of options; None if there is none.

        Raises:
            ConfigError: they cannot be read.
        """
        checkpoint = self.checkpoint()
        return TrainConfig.from_toml(run_of(checkpoint) / CONFIG) if checkpoint else None

    def check(self, config: TrainConfig) -> None:
        """Raise if a run with these settings cannot resume here, or would replace the results of another.

        Raises:
            ConfigError: it does not fit the checkpoint; or the run's folder has none, but results that are complete or
                of other settings.
        """
        before = self.settings()
        if before is not None:
            check_resumable(before, config, self.checkpoint())
        if self.name is None or complete_checkpoints(self.folder / CHECKPOINTS):
            return
        metrics, wrong = self.folder / METRICS, ""
        if metrics.exists() and metrics.stat().st_size > 0:
            was, now = (
                {"data": each.data, "seed": each.seed, **vars(each.model), **vars(each.training)}
                for each in (TrainConfig.from_toml(self.folder / CONFIG), config)
            )
            wrong = "".join(f" of {name} {was[name]}, not {now[name]}," for name in was if was[name] != now[name])
        if wrong or (self.folder / SUMMARY).exists():
            raise ConfigError(
                f"{self.folder} already has results{wrong or ','} but no checkpoint to resume from: choose another "
                f"--name"
            )

    def claim(self) -> RunLocation:
        """Create the run's folder and return its location, with its name settled.

        Raises:
            OSError: the folder cannot be made.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        if self.name is not None:
            self.folder.mkdir(exist_ok=True)
            return self
        number = max((int(entry.name) for entry in self.out.iterdir() if entry.name.isdecimal()), default=0)
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):  # another run was faster
                (self.out / f"{number:03d}").mkdir()
                return dataclasses.replace(self, name=f"{number:03d}")


def lock(folder: Path, say: Callable[[str], None]) -> None:
    """Lock a run's folder until the process ends, however it ends.

    After a launcher was killed, its orphaned workers may still be saving a checkpoint when the next one starts: the
    lock is waited for. A file system without locks locks nothing.

    Raises:
        ConfigError: another process keeps it.
    """
    import fcntl  # not on every platform

    descriptor, deadline = os.open(folder, os.O_RDONLY), 0.0
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not deadline:
                say(f"waiting for another process that is writing to {folder}")
                deadline = time.monotonic() + LOCK_TIMEOUT
            elif time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"another process is writing to {folder}: stop it, or choose another --name"
                ) from None
            time.sleep(0.1)
        except OSError:
            return os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in UTF-8, atomically, whenever the process is killed."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after optimizer step `step` in a folder of checkpoints."""
    return folder / f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, the oldest first; none if there is no such folder."""
    return [path for path in _all_checkpoints(folder) if (path / INDEX).is_file()]


def keep_newest(folder: Path, count: int) -> None:
    """Remove complete checkpoints except the newest `count`."""
    for path in complete_checkpoints(folder)[:-count]:
        (path / INDEX).unlink(missing_ok=True)  # first: what is half removed must not count as complete
        shutil.rmtree(path, ignore_errors=True)


def remove_incomplete(folder: Path) -> None:
    """Remove incomplete checkpoints. Call it only while no process writes one."""
    for path in _all_checkpoints(folder):
        if not (path / INDEX).is_file():
            shutil.rmtree(path, ignore_errors=True)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return checkpoint.parent.parent


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that a user names: a checkpoint itself, or the newest complete one of a run.

    Raises:
        ConfigError: there is none.
    """
    if (folder / INDEX).is_file():
        return folder
    found = complete_checkpoints(folder / CHECKPOINTS) or complete_checkpoints(folder)
    if not found:
        reason = "has no complete checkpoint" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"cannot resume: {folder} {reason}; pass the folder of a run, or a checkpoint in its {CHECKPOINTS}/"
        )
    return found[-1]


def check_resumable(before: TrainConfig, config: TrainConfig, checkpoint: Path | None) -> None:
    """Raise if a run with the settings `before`, which has saved the checkpoint, cannot resume with `config`.

    Raises:
        ConfigError: the model has another size, or optimizer or seed differ.
    """
    was, now = dataclasses.asdict(before.model), dataclasses.asdict(config.model)
    wrong = [f"--{name} {was[name]}, not {now[name]}" for name in was if was[name] != now[name]]
    if wrong:
        raise ConfigError(
            f"{checkpoint} has a model of {', '.join(wrong)}: leave these options out to resume, or choose another "
            f"--name for a new run"
        )
    if before.training.optimizer != config.training.optimizer:
        raise ConfigError(
            f"{checkpoint} was trained with --optimizer {before.training.optimizer}, not {config.training.optimizer}, "
            f"whose state it does not have: leave out --optimizer to resume"
        )
    if before.seed != config.seed:
        raise ConfigError(
            f"{checkpoint} was trained with --seed {before.seed}, not {config.seed}: another seed holds out other "
            f"files, so that validation would use bytes that the model was trained on. Leave out --seed to resume"
        )


def _all_checkpoints(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]
