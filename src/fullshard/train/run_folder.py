"""The folder of a run: its files, its checkpoints, its lock, its settings, and which checkpoint the run resumes from.

Nothing here needs torch, so that a wrong `--name` is an error at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fullshard.messages import clipped
from fullshard.train.config import ConfigError, GPTConfig, TrainConfig

METRICS = "metrics.jsonl"
CONFIG = "config.toml"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
INDEX = "fullshard.json"  # of a checkpoint: written last, so that one without it is incomplete


def folder_of(out: Path, name: str) -> Path:
    """Return the folder of the run `name`.

    Raises:
        ConfigError: no folder in `out` can have this name.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise ConfigError(f"--name must be the name of one folder in {out}, found {clipped(repr(name))}; see --out")
    return out.resolve() / name


def make_numbered(out: Path) -> Path:
    """Make a folder for a run without a name, with the next free number."""
    out.mkdir(parents=True, exist_ok=True)
    number = max((int(entry.name) for entry in out.iterdir() if entry.name.isdecimal()), default=0) + 1
    folder = out.resolve() / f"{number:03d}"
    folder.mkdir()
    return folder


def settle(folder: Path | None, config_file: Path | None, given: Mapping[str, Any]) -> tuple[TrainConfig, Path | None]:
    """Return the settings of a run, and the checkpoint that it resumes from; None if there is none.

    Settings that are not given are those of the config file, else those of the run itself.

    Args:
        folder: of the run; None if it will be a new one.
        config_file: of another run.
        given: settings by name.

    Raises:
        ConfigError: a setting is wrong or does not fit the checkpoint, a file cannot be read, or the folder has no
            checkpoint, but complete results.
    """
    complete = complete_checkpoints(folder / CHECKPOINTS) if folder else []
    if folder and not complete and (folder / SUMMARY).exists():
        raise ConfigError(f"{folder} already has results, but no checkpoint to resume from: choose another --name")
    before = TrainConfig.from_toml(folder / CONFIG) if folder and complete else None
    base = TrainConfig.from_toml(config_file) if config_file else before or TrainConfig()
    config = dataclasses.replace(base, **given)
    names = [*(item.name for item in dataclasses.fields(GPTConfig)), "optimizer", "seed"]
    if before and any(getattr(before, name) != getattr(config, name) for name in names):
        values = [(name.replace("_", "-"), getattr(before, name), getattr(config, name)) for name in names]
        wrong = ", ".join(f"--{name} {was}, not {now}" for name, was, now in values if was != now)
        raise ConfigError(
            f"{complete[-1]} was trained with {wrong}: leave these options out to resume, or choose another --name for "
            f"a new run. Another model or optimizer has other state, and another seed holds out other files, so that "
            f"validation would use bytes that the model was trained on"
        )
    return config, complete[-1] if complete else None


def lock(folder: Path, say: Callable[[str], None]) -> None:
    """Lock a run's folder until the process ends, however it ends.

    Waits for another process that holds the lock: after a launcher was killed, its orphaned workers may still be saving
    a checkpoint when the next one starts. A file system without locks locks nothing.
    """
    import fcntl  # not on every platform

    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is writing to {folder}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)


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


def _all_checkpoints(folder: Path) -> list[Path]:
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))
