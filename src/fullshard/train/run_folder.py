"""The folder of a run: its files, its checkpoints, its lock, its settings, and which checkpoint the run resumes from.

Nothing here needs torch, so that a wrong `--name` or `--resume` is found at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.messages import clipped
from fullshard.train.config import TRAINING, ConfigError, GPTConfig, TrainConfig, options

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
_MODEL = [item.name for item in dataclasses.fields(GPTConfig)]
LOCK_TIMEOUT = 150.0  # seconds to wait for a lock: orphaned workers have ended before that


def folder_of(out: Path, name: str) -> Path:
    """Return the folder of the run `name`.

    Raises:
        ConfigError: no folder in `out` can have this name.
    """
    is_one = name not in ("", ".", "..") and Path(name).name == name and "\0" not in name
    if not is_one or len(os.fsencode(name)) > MOST_BYTES:
        raise ConfigError(
            f"--name must be the name of one folder in {out}, of at most {MOST_BYTES} bytes, found "
            f"{clipped(repr(name))}; see --out"
        )
    return out.resolve() / name


def make_numbered(out: Path) -> Path:
    """Make a folder for a run without a name, with the next free number."""
    out.mkdir(parents=True, exist_ok=True)
    number = max((int(entry.name) for entry in out.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another run was faster
            (out / f"{number:03d}").mkdir()
            return out.resolve() / f"{number:03d}"


def settle(
    folder: Path | None, resume: Path | None, config_file: Path | None, given: Mapping[str, Any]
) -> tuple[TrainConfig, Path | None]:
    """Return the settings of a run, and the checkpoint that it resumes from; None if there is none.

    Settings that are not given are those of the config file, else those of the run that has written the checkpoint.

    Args:
        folder: of the run; None if it will be a new one.
        resume: what to start from if the folder has no checkpoint.
        config_file: of another run.
        given: settings by name.

    Raises:
        ConfigError: a setting is wrong or does not fit the checkpoint, a file cannot be read, `resume` names no
            checkpoint, or the folder has none, but results that are complete or of other settings.
    """
    own = complete_checkpoints(folder / CHECKPOINTS) if folder else []
    checkpoint = own[-1] if own else find_checkpoint(resume).resolve() if resume else None
    before = TrainConfig.from_toml(checkpoint.parent.parent / CONFIG) if checkpoint else None
    base = TrainConfig.from_toml(config_file) if config_file else before or TrainConfig()
    config = dataclasses.replace(base, **given)
    wrong = _changes(before, config, [*_MODEL, "optimizer", "seed"]) if before else ""
    if wrong:
        raise ConfigError(
            f"{checkpoint} was trained with {wrong}: leave these options out to resume, or choose another --name for "
            f"a new run. Another model or optimizer has other state, and another seed holds out other files, so that "
            f"validation would use bytes that the model was trained on"
        )
    if folder and not own:
        _check_unused(folder, config)
    return config, checkpoint


def _check_unused(folder: Path, config: TrainConfig) -> None:
    """Raise if a run without checkpoints would replace results here that are complete, or of other settings."""
    metrics, wrong = folder / METRICS, ""
    if metrics.exists() and metrics.stat().st_size > 0:
        names = [name for name, each in options().items() if each.panel == TRAINING]
        wrong = _changes(TrainConfig.from_toml(folder / CONFIG), config, ["data", *_MODEL, *names])
    if wrong or (folder / SUMMARY).exists():
        wrong = f" of {wrong}" if wrong else ""
        raise ConfigError(
            f"{folder} already has results{wrong}, but no checkpoint to resume from: choose another --name"
        )


def _changes(before: TrainConfig, config: TrainConfig, names: Sequence[str]) -> str:
    """Return the settings that differ as text; empty if none does."""
    values = [(name.replace("_", "-"), getattr(before, name), getattr(config, name)) for name in names]
    return ", ".join(f"--{name} {was}, not {now}" for name, was, now in values if was != now)


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


def _all_checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
