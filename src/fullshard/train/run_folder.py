"""The folder that a run writes to."""

from __future__ import annotations

from pathlib import Path

METRICS = "metrics.jsonl"
PLOT = "loss.png"
CONFIG = "config.toml"
MODEL = "model.safetensors"
SUMMARY = "summary.json"
ERROR = "error.txt"


def create(out: Path, name: str | None) -> Path:
    """Make a new folder for a run.

    Args:
        out: folder of runs; made if missing.
        name: the run's name; None takes the next free number.

    Raises:
        FileExistsError: a run of that name has results already.
        OSError: the folder cannot be made.
    """
    out.mkdir(parents=True, exist_ok=True)
    if name is not None:
        folder = out / name
        if (folder / METRICS).exists():
            raise FileExistsError(f"{folder} holds results already: choose another --name, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    number = max((int(entry.name) for entry in out.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        number += 1
        folder = out / f"{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run was faster
            continue
        return folder
