"""The index of a checkpoint: which tensors and values it has and where. ``docs/checkpoint_format.md`` has its JSON
form.

[Note: Index]
The index is the only file of a checkpoint that says where data are, so it is untrusted input until checked: file names
must be ones that the writer makes (none leaves the folder), every shard must lie in its tensor and in its file, and
shards must neither overlap nor leave holes. An :class:`Index` is valid once it exists. The writer checks its own index
before it commits.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = [
    "BLOCK",
    "CHECKSUM",
    "DATA_FILE",
    "ITEM_SIZES",
    "FileEntry",
    "Index",
    "ShardEntry",
    "TensorEntry",
    "ValueEntry",
    "data_file",
]

# Bytes per checksum. A rank that needs a part of a shard reads and checks the blocks that contain it:
# smaller blocks would make indexes larger (8 bytes each), larger ones would make ranks read what they do not need.
BLOCK = 1 << 22
CHECKSUM = 8  # bytes of one checksum: XXH3, 64 bits
DATA_FILE = re.compile(r"data-[0-9a-f]{12}-[0-9]{1,7}\.safetensors")
_LARGEST = 1 << 62  # number of bytes or elements; sums of two still fit 64 bits
_DAMAGED = "the index is corrupted, or was not written by fullshard: use another checkpoint"

# Element size of each torch dtype that can be stored. By name, so that an index can be read without torch.
ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def data_file(save: str, rank: int) -> str:
    """Return the name of the file that a rank writes in a save."""
    return f"data-{save}-{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file.

    Args:
        length: Size in bytes.
        header: Bytes before the first tensor's.
        checksum: Checksum of the header; empty if the format has none.
    """

    length: int
    header: int = 0
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """Location of one region of a tensor.

    Args:
        region: Region of the tensor.
        file: Name of the data file.
        start: First byte in it.
        length: Number of bytes: of the elements row by row, or in torch's own format.
        checksums: A checksum for every ``block`` bytes; empty if the format has none.
    """

    region: Region
    file: str
    start: int
    length: int
    checksums: bytes = b""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: dtype by name, shape, and its shards. ``path`` is its path in nested dicts."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]
    path: tuple[str | int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """Location of a value that is not a tensor; fields as in :class:`ShardEntry`."""

    file: str
    start: int
    length: int
    checksums: bytes = b""
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint, by key. See [Note: Index].

    Args:
        where: Path of the index, for errors.
        tensors: Tensors by key.
        values: Values that are not tensors, by key.
        files: Data files by name.
        aliases: Other keys of tied tensors, each with the key that has the data.
        about: Description of the save: versions, time, ranks, model.
        save: Name of the save; part of the names of its files.
        block: Bytes per checksum.
        raw: True if shards are elements row by row in fullshard's own files; otherwise each is a file of
            ``torch.save``.

    Raises:
        CheckpointError: If it is inconsistent.
    """

    where: str
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, ValueEntry]
    files: Mapping[str, FileEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    save: str = ""
    block: int = BLOCK
    raw: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.block <= 1 << 28 and self.block % 64 == 0):
            raise self._wrong("block", f"block size {self.block}")
        self._check_files()
        for key, tensor in self.tensors.items():
            self._check_tensor(key, tensor)
        for key, value in self.values.items():
            if key in self.tensors:
                raise self._wrong(key, "a tensor and a value under one key")
            self._check_stored(key, value)
        self._check_aliases(self.tensors, self.values)

    def _check_files(self) -> None:
        for name, file in self.files.items():
            if self.raw and not DATA_FILE.fullmatch(name):
                raise self._wrong("files", f"file name {name!r}, which is not one of a data file")
            if not _is_within(0, file.header, file.length):
                raise self._wrong(name, f"a header of {file.header} bytes in a file of {file.length}")

    def _check_aliases(self, tensors: Collection[str], values: Collection[str]) -> None:
        for key, first in self.aliases.items():
            if key in tensors or key in values or first not in tensors:
                raise self._wrong(
                    key, f"an alias of {first!r}; an alias must have no data and must name a tensor that has"
                )

    def _wrong(self, key: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: found {found}; {_DAMAGED}")

    def _check_stored(self, key: str, stored: ShardEntry | ValueEntry) -> None:
        """Raise unless the bytes lie in their file and have a checksum for every block."""
        file = self.files.get(stored.file)
        if file is None:
            raise self._wrong(key, f"data in file {stored.file!r}, which is not in the list of files")
        if stored.length < 0 or not _is_within(file.header, stored.start, file.length - stored.length):
            end = stored.start + stored.length
            raise self._wrong(key, f"bytes {stored.start} to {end} of {stored.file}, which has {file.length} bytes")
        checksums = -(-stored.length // self.block)
        if self.raw and len(stored.checksums) != CHECKSUM * checksums:
            raise self._wrong(key, f"{len(stored.checksums)} bytes of checksums, not {checksums} times {CHECKSUM}")

    def _check_tensor(self, key: str, tensor: TensorEntry) -> None:
        """Raise unless the shards lie in the tensor, cover it, do not overlap, and have the expected sizes."""
        if tensor.dtype not in ITEM_SIZES:
            raise self._wrong(key, f"dtype {tensor.dtype!r}")
        if len(tensor.shape) > 64 or any(not 0 <= n < _LARGEST for n in tensor.shape) or tensor.nbytes >= _LARGEST:
            raise self._wrong(key, f"shape {tensor.shape}")
        covered = 0
        for shard in tensor.shards:
            region = shard.region
            if len(region.sizes) != len(tensor.shape) or any(map(operator.gt, region.ends, tensor.shape)):
                raise self._wrong(key, f"shard {region} of a tensor of shape {tensor.shape}")
            if self.raw and shard.length != region.numel * ITEM_SIZES[tensor.dtype]:
                raise self._wrong(key, f"{shard.length} bytes for shard {region} of dtype {tensor.dtype}")
            self._check_stored(key, shard)
            covered += region.numel
        both = first_overlap([shard.region for shard in tensor.shards])
        if both is not None:
            raise self._wrong(key, f"overlapping shards {both[0]} and {both[1]}")
        if covered != tensor.numel:
            missing = tensor.numel - covered
            raise self._wrong(key, f"shards that lack {missing} of the {tensor.numel} elements of shape {tensor.shape}")

    def tensor(self, key: str) -> TensorEntry:
        """Return the entry of the tensor with that key or alias.

        Raises:
            KeyError: If there is no such tensor.
        """
        return self.tensors[self.aliases.get(key, key)]


def first_overlap(regions: Iterable[Region]) -> tuple[Region, Region] | None:
    """Return two regions that have an element in common; None if no two have.

    Sweeps over the dim with the most distinct offsets, so that each region is compared with few others.
    """
    left = [region for region in regions if region.numel]
    if len(left) < 2:
        return None
    if not left[0].sizes:
        return left[0], left[1]
    dims = range(len(left[0].sizes))
    dim = max(dims, key=lambda dim: len({region.offsets[dim] for region in left}))
    left.sort(key=lambda region: region.offsets[dim])
    open_ends: list[tuple[int, int]] = []  # (end in the dim, number) of the regions at the current position
    for number, region in enumerate(left):
        del open_ends[: bisect_right(open_ends, (region.offsets[dim], len(left)))]
        for _, other in open_ends:
            if region.overlap(left[other]) is not None:
                return left[other], region
        insort(open_ends, (region.ends[dim], number))
    return None


def _is_within(low: int, value: int, high: int) -> bool:
    return 0 <= low <= value <= high < _LARGEST
