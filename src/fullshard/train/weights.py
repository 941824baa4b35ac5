"""Writing a sharded model's full weights to one safetensors file.

Tensors are gathered one at a time and streamed to disk, so that no rank ever holds more than one full tensor
beside its shards: the file's header needs only names, shapes and dtypes, which are known before anything is
gathered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.train.atomic_file import replacing
from fullshard.train.config import GPTConfig
from fullshard.train.model import METADATA_KEY

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
LONGEST_HEADER = 100 << 20  # bytes; the format's own limit


def save_full(
    path: Path | None, config: GPTConfig, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None
) -> None:
    """Gather full weights tensor by tensor and write them in the format of safetensors.

    A collective: every rank calls it with the same names in the same order.

    Args:
        path: file to write on this rank, whole or not at all; None on the ranks that only take part in gathering.
        config: the model's size, kept as JSON in the file's metadata; `fullshard.train.model.load` reads it.
        tensors: parameters by name, sharded or not.
        notes: further metadata.
    """
    with replacing(path) if path else contextlib.nullcontext() as file:
        if file:
            file.write(_header(config, tensors, notes or {}))
        for tensor in tensors.values():
            full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            if file:
                file.write(full.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def read_notes(path: Path) -> dict[str, str]:
    """The metadata of a file of weights; empty if it is not there, or no such file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= LONGEST_HEADER else {}
    except (OSError, ValueError):
        return {}
    found = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(name): str(value) for name, value in found.items()}


def _header(config: GPTConfig, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> bytes:
    """Length (8 bytes, little-endian) and JSON: metadata, then dtype, shape and place of every tensor."""
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt", METADATA_KEY: json.dumps(dataclasses.asdict(config)), **notes}
    }
    place = 0
    for name, tensor in tensors.items():
        end = place + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
