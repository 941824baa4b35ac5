"""Write checkpoints of any tensors and values, and read them, without a model."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.index import INDEX_FILE
from fullshard.checkpoint.format.reader import CheckpointReader
from fullshard.checkpoint.format.values import to_bytes
from fullshard.checkpoint.format.writer import write_checkpoint
from fullshard.checkpoint.saving_ranks import SavingRanks
from fullshard.engine.parameters.tensor_shards import TensorShards


def write(path: str | Path, contents: Mapping[str, Any], **options: Any) -> str:
    """Write a checkpoint as all ranks do, and return its path. Values must be serializable."""
    entries = {
        key: TensorShards.of(value)
        if isinstance(value, torch.Tensor)
        else value
        if isinstance(value, (TensorShards, bytes))
        else to_bytes(key, value)
        for key, value in contents.items()
    }
    group = dist.group.WORLD if dist.is_initialized() else None
    write_checkpoint(Folder(path), entries, SavingRanks(group, f"cannot save {path}"), **options)
    return str(path)


def fill(reader: CheckpointReader, contents: dict[str, Any]) -> dict[str, Any]:
    """Check everything, then fill tensors in place, and replace other values."""
    tensors = {key: TensorShards.of(v).shards for key, v in contents.items() if isinstance(v, torch.Tensor)}
    values = {key: reader.value(key) for key in contents if key not in tensors}
    reads = reader.check(tensors)
    reader.fill(reads)
    contents.update(values)
    return contents


def read(path: str | Path, contents: dict[str, Any]) -> dict[str, Any]:
    """Return ``contents`` with what the checkpoint has."""
    return fill(CheckpointReader.open(path), contents)


def index_of(path: Path) -> dict[str, Any]:
    """The index as JSON."""
    parsed: dict[str, Any] = json.loads((path / INDEX_FILE).read_bytes())
    return parsed


def place_of(path: Path, key: str) -> int:
    """The first byte of the first shard of a tensor, or of a value, in its file."""
    reader = CheckpointReader.open(path)
    if key in reader.index.values:
        return reader._place(key, None, reader.index.values[key]).start
    return reader._place(key, *next(iter(reader.index.shards(key)))).start


def flip(file: Path, position: int, bit: int = 0) -> None:
    """Flip a bit of a file."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def torch_saved(value: Any) -> bytes:
    """A file of ``torch.save``, of anything."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
