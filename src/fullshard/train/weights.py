"""Weights of a run: one safetensors file each, with the model's size in its metadata."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullshard import export_safetensors
from fullshard.train.model import GPT, METADATA_KEY

SCRATCH = ".export"  # how the name of the folder ends in which a file is written
LONGEST_HEADER = 100 << 20  # bytes; the format's own limit
NOTE = "fullshard.train."  # before the names of the fields of `BestValidation` in metadata


@dataclass(frozen=True)
class BestValidation:
    """The best validation so far; it is kept in the metadata of its weights, and nowhere else.

    Attributes:
        step: optimizer step of the validation.
        validation_loss: nats per byte, on the part of the held-out bytes that validations during the run use.
        bytes: number of these bytes.
        data_sha256: digest of the text and its split.
    """

    step: int
    validation_loss: float
    bytes: int
    data_sha256: str

    def notes(self) -> dict[str, str]:
        """Return the metadata of the weights."""
        return {NOTE + name: str(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def read(cls, path: Path) -> BestValidation | None:
        """Return the validation of the weights in a file; None if there is none."""
        notes = _read_notes(path)
        try:
            step, loss, count, digest = (notes[NOTE + field.name] for field in dataclasses.fields(cls))
            return cls(int(step), float(loss), int(count), digest)
        except (KeyError, ValueError):
            return None

    def is_comparable(self, other: BestValidation) -> bool:
        """Return True if both losses are on the same bytes."""
        return (self.bytes, self.data_sha256) == (other.bytes, other.data_sha256)


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


def _read_notes(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= LONGEST_HEADER else {}
    except (OSError, ValueError):
        return {}
    found = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(name): str(value) for name, value in found.items()}
