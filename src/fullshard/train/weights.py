"""Weights of a run: one safetensors file each, with the model's size in its metadata."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fullshard import export_safetensors
from fullshard.train.model import GPT, METADATA_KEY

SCRATCH = ".export"  # how the name of the folder ends in which a file is written
LONGEST_HEADER = 100 << 20  # bytes; the format's own limit


def save_full(path: Path, model: GPT, notes: Mapping[str, str] | None = None, *, leads: bool) -> None:
    """Write full weights to one file, atomically. Every rank calls it and writes its own shards.

    Args:
        path: the file, the same on every rank.
        model: sharded or not. Its size is kept as JSON in the metadata; `fullshard.train.model.load` reads it.
        notes: further metadata.
        leads: whether this is rank 0, which gives the file its name.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write.
    """
    texts = {METADATA_KEY: json.dumps(dataclasses.asdict(model.config)), **(notes or {})}
    scratch = path.with_name(f".{path.name}{SCRATCH}")
    try:
        export_safetensors(model, scratch, max_shard_bytes=sys.maxsize, metadata=texts, sync=True)
        if leads:
            os.replace(scratch / "model.safetensors", path)
    finally:
        if leads:
            shutil.rmtree(scratch, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove leftovers of a process that was killed while writing weights. Call it only while no process writes."""
    for scratch in folder.glob(f".*.safetensors{SCRATCH}"):
        shutil.rmtree(scratch, ignore_errors=True)


def read_notes(path: Path) -> dict[str, str]:
    """Return the metadata of a file of weights; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= LONGEST_HEADER else {}
    except (OSError, ValueError):
        return {}
    found = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(name): str(value) for name, value in found.items()}
