"""Write a data file: a valid .safetensors file with one entry per shard, streamed with its checksums.

safetensors' own writer requires whole tensors in host memory; here tensors of any device are written block by block,
and each block's checksum is computed while the block is in the processor's cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import torch

from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.format.index import BLOCK, ITEM_SIZES, FileEntry
from fullshard.checkpoint.format.index_json import checksum
from fullshard.layout import Region

__all__ = ["DataEntry", "WrittenEntry", "dtype_name", "dtype_of", "entry_name", "write_entries"]

_ALIGNMENT = 64  # of the first tensor's bytes, so that the file can be mapped to memory and used as it is
# Names of dtypes in safetensors. Tensors of other dtypes are stored as U8; the index has their dtype.
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}


@dataclass(frozen=True)
class DataEntry:
    """An entry of a data file: a tensor, or a value's bytes as a 1-D uint8 tensor.

    Args:
        name: Name in the file's header.
        dtype: Name of the torch dtype.
        shape: Shape of the shard.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the entry in the file."""
        return Region.whole(self.shape).numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class WrittenEntry:
    """Location and checksums of an entry that was written.

    Args:
        name: Name of the file.
        file: The file.
        start: First byte.
        length: Number of bytes.
        checksums: A checksum for every ``BLOCK`` bytes.
    """

    name: str
    file: FileEntry
    start: int
    length: int
    checksums: bytes


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in an index: ``float32`` for ``torch.float32``.

    Raises:
        TypeError: If tensors of this dtype cannot be stored.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_SIZES:
        raise TypeError(f"tensors of {dtype} cannot be stored in a checkpoint; convert them before saving")
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for a name in an index.

    Raises:
        TypeError: If this torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if name not in ITEM_SIZES or not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) has no dtype {name}")
    return dtype


def entry_name(key: str, region: Region, shape: tuple[int, ...]) -> str:
    """Return the name of a shard in its file: the tensor's key, followed by the region unless it is the whole
    tensor.
    """
    return key if region == Region.whole(shape) else f"{key}{region}"


def write_entries(
    stream: IO[bytes], name: str, entries: list[DataEntry], tensors: Iterator[torch.Tensor], *, note: str
) -> list[WrittenEntry]:
    """Write a whole data file.

    Args:
        stream: The file, empty.
        name: Its name, for the result.
        entries: Entries in the order to be written.
        tensors: Tensor of each entry, on any device; consumed one by one.
        note: Text for the header.

    Returns:
        Location of each entry, in the same order.

    Raises:
        OSError: If it cannot be written.
    """
    header = _header(entries, note)
    stream.write(header)
    start, places = len(header), []
    blocks = HostBlocks(BLOCK)
    for entry, tensor in zip(entries, tensors, strict=True):
        assert tuple(tensor.shape) == entry.shape and tensor.numel() * tensor.element_size() == entry.nbytes, entry
        digests = []
        for block in blocks.of(tensor):
            stream.write(block)
            digests.append(checksum(block))
        places.append((start, entry.nbytes, b"".join(digests)))
        start += entry.nbytes
    file = FileEntry(start, len(header), checksum(header))
    return [WrittenEntry(name, file, *place) for place in places]


def _header(entries: list[DataEntry], note: str) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt", "fullshard": note}}
    start = 0
    for entry in entries:
        known = _SAFETENSORS.get(entry.dtype)
        described[entry.name] = {
            "dtype": known or "U8",
            "shape": list(entry.shape) if known else [entry.nbytes],
            "data_offsets": [start, start + entry.nbytes],
        }
        start += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
