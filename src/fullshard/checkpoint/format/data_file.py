"""Write a data file, a valid .safetensors file with one entry per shard, and read its directory.

safetensors' own writer requires whole tensors in host memory; here tensors of any device are written block by block,
and each block's checksum is computed while the block is in the processor's cache.

[Note: Directory]
A data file is the index of its own shards: its header has the name and place of each, and its last entry the checksums
of all blocks of all entries before it, in order. So the index of the checkpoint needs to say only which regions are in
which file, with a checksum of the header and of that last entry. A rank reads the directories of the files that it
needs; if as many ranks load as have saved, that is the one file that it wrote itself, and those of replicated tensors.
The checksums come last because they are known last, and not every storage can go back in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO

import torch

from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.format.index import BLOCK, CHECKSUM, ITEM_SIZES, FileEntry, FilePlace
from fullshard.checkpoint.format.index_json import checksum
from fullshard.errors import CheckpointError
from fullshard.layout import Region
from fullshard.messages import clipped

__all__ = [
    "CHECKSUMS",
    "DataEntry",
    "Directory",
    "dtype_name",
    "dtype_of",
    "header_of",
    "read_directory",
    "write_entries",
]

CHECKSUMS = "__checksums__"  # name of the last entry

_ALIGNMENT = 64  # of the first tensor's bytes, so that the file can be mapped to memory and used as it is
_NOTE = "a part of a checkpoint; fullshard.json says of what"
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

    @classmethod
    def of_shard(cls, key: str, dtype: str, shape: tuple[int, ...], region: Region) -> DataEntry:
        """Return the entry of a shard. Its name is the tensor's key, followed by the region unless that is the whole
        tensor.
        """
        return cls(key if region == Region.whole(shape) else f"{key}{region}", dtype, region.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the entry in the file."""
        return Region.whole(self.shape).numel * ITEM_SIZES[self.dtype]

    @property
    def described(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape as safetensors knows them."""
        known = _SAFETENSORS.get(self.dtype)
        return (known, self.shape) if known else ("U8", (self.nbytes,))


def dtype_name(key: str, dtype: torch.dtype) -> str:
    """Return the name of the dtype of a tensor in an index: ``float32`` for ``torch.float32``.

    Raises:
        TypeError: If tensors of this dtype cannot be stored.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_SIZES:
        raise TypeError(f"{key}: tensors of {dtype} cannot be stored in a checkpoint; convert them before saving")
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for a name in an index.

    Raises:
        TypeError: If this torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if name not in ITEM_SIZES or not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) has no dtype {name}; install a newer torch")
    return dtype


def write_entries(stream: IO[bytes], entries: Iterable[tuple[DataEntry, torch.Tensor]]) -> FileEntry:
    """Write a whole data file.

    Args:
        stream: The file, empty.
        entries: Entries in the order to be written, each with its tensor, on any device.

    Raises:
        OSError: If it cannot be written.
        TypeError: If an entry has the name that is reserved for checksums, or a tensor has no dense memory.
    """
    pairs = list(entries)
    if any(entry.name == CHECKSUMS for entry, _ in pairs):
        raise TypeError(
            f"the key {CHECKSUMS!r} is reserved for the checksums of data files; rename the tensor or value"
        )
    blocks = sum(-(-entry.nbytes // BLOCK) for entry, _ in pairs)
    listed = [*(entry for entry, _ in pairs), DataEntry(CHECKSUMS, "uint8", (CHECKSUM * blocks,))]
    described = ((entry.name, *entry.described, entry.nbytes) for entry in listed)
    header = header_of(described, {"format": "pt", "fullshard": _NOTE}, _ALIGNMENT)
    stream.write(header)
    digests = []
    buffer = HostBlocks(BLOCK)
    for entry, tensor in pairs:
        assert tuple(tensor.shape) == entry.shape and tensor.numel() * tensor.element_size() == entry.nbytes, entry
        for block in buffer.of(tensor):
            stream.write(block)
            digests.append(checksum(block))
    table = b"".join(digests)
    stream.write(table)
    length = len(header) + sum(entry.nbytes for entry, _ in pairs) + len(table)
    return FileEntry(length, len(header), checksum(header) + checksum(table))


def header_of(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], alignment: int
) -> bytes:
    """Return the first bytes of a safetensors file: a length, and JSON that describes the tensors.

    Args:
        entries: Name, dtype, shape and bytes of each tensor, in the order in which they lie in the file without gaps.
        metadata: Strings by name.
        alignment: The first tensor begins at a multiple of it.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, nbytes in entries:
        start, end = end, end + nbytes
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    return len(text).to_bytes(8, "little") + text


# By name: the place of an entry, and its dtype and shape as safetensors knows them. See [Note: Directory].
Directory = dict[str, tuple[FilePlace, tuple[str, tuple[int, ...]]]]


def read_directory(stream: IO[bytes], where: str, name: str, file: FileEntry, block: int) -> Directory:
    """Read where the entries of a data file are.

    Args:
        stream: The file, as long as ``file`` says.
        where: Its path, for errors.
        name: Its name.
        file: The file as the index describes it.
        block: Bytes per checksum.

    Raises:
        CheckpointError: If it is corrupted.
    """
    stream.seek(0)
    header = stream.read(file.header)
    if checksum(header) != file.checksum[:CHECKSUM]:
        raise _corrupted(where, "checksum mismatch in the header")
    try:
        entries = _parsed_header(header, file.length)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _corrupted(where, f"invalid header ({clipped(error)})") from None
    _, table = entries.pop(CHECKSUMS, (None, None))
    if table is None or table[1] != file.length:
        raise _corrupted(where, f"the header does not end with {CHECKSUMS}")
    stream.seek(table[0])
    checksums = stream.read(table[1] - table[0])
    if checksum(checksums) != file.checksum[CHECKSUM:]:
        raise _corrupted(where, "checksum mismatch in the checksums")
    found: Directory = {}
    at = 0
    for entry, (described, (start, end)) in entries.items():
        count = CHECKSUM * -(-(end - start) // block)
        found[entry] = FilePlace(name, start, end - start, checksums[at : at + count]), described
        at += count
    if at != len(checksums):
        raise _corrupted(where, f"{len(checksums)} bytes of checksums, expected {at}")
    return found


def _corrupted(where: str, found: str) -> CheckpointError:
    return CheckpointError(f"{where}: {found}; copy the file again, or use another checkpoint")


def _parsed_header(header: bytes, length: int) -> dict[str, tuple[tuple[str, tuple[int, ...]], tuple[int, int]]]:
    """Return dtype, shape, first byte and end of each entry, in the order in which they lie in the file without gaps.

    Raises:
        ValueError: If they do not.
    """
    if int.from_bytes(header[:8], "little") != len(header) - 8:
        raise ValueError("its length is not the one that it states")
    content = json.loads(header[8:])
    content.pop("__metadata__", None)
    entries, end = {}, len(header)
    for name, entry in content.items():
        start, stop = (len(header) + int(offset) for offset in entry["data_offsets"])
        if start != end or stop < start:
            raise ValueError(f"the entry {name} does not begin where the previous one ends")
        entries[name] = (str(entry["dtype"]), tuple(map(int, entry["shape"]))), (start, stop)
        end = stop
    if end != length:
        raise ValueError(f"its entries end at byte {end} of {length}")
    return entries
