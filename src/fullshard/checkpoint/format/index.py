"""The index of a checkpoint: which tensors and values it has and where. ``docs/checkpoints/format.md`` has its JSON
form.

[Note: Index]
The index says which regions of which tensors are in which file, so it is untrusted input until checked: file names must
be ones that the writer makes (none leaves the folder), every shard must lie in its tensor, and shards must neither
overlap nor leave holes. An ``Index`` is valid once it exists. The writer checks its own index before it commits.

Where in its file a shard lies is in the file's own header, which only the ranks that need the file read; see
[Note: Directory]. Checkpoints of torch.distributed.checkpoint have these places in the index.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fullshard.checkpoint.format.region_table import Numbers, RegionTable, shape_columns
from fullshard.errors import CheckpointError
from fullshard.layout import Region
from fullshard.messages import clipped

__all__ = [
    "BLOCK",
    "CHECKSUM",
    "DATA_FILE",
    "INDEX_FILE",
    "ITEM_SIZES",
    "FileEntry",
    "FilePlace",
    "FilePlaces",
    "Index",
    "Shard",
    "TensorEntry",
    "data_file",
    "table_of",
]

INDEX_FILE = "fullshard.json"
# Bytes per checksum. A rank that needs a part of a shard reads and checks the blocks that contain it:
# smaller blocks would make indexes larger (8 bytes each), larger ones would make ranks read what they do not need.
BLOCK = 1 << 22
CHECKSUM = 8  # bytes of one checksum: XXH3, 64 bits
DATA_FILE = re.compile(r"data-[0-9a-f]{12}-[0-9]{1,7}\.safetensors")
_LARGEST = 1 << 62  # number of bytes or elements; sums of two still fit 64 bits
MOST_DIMS = 64
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
        checksum: Checksum of the header, followed by that of the checksums of all blocks; empty if the format has none.
    """

    length: int
    header: int = 0
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: dtype by name, and shape.

    Raises:
        ValueError: If no tensor can be like that.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"dtype {self.dtype!r}")
        possible = len(self.shape) <= MOST_DIMS and all(0 <= size < _LARGEST for size in self.shape)
        if not possible or self.nbytes >= _LARGEST:
            raise ValueError(f"shape {self.shape}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * ITEM_SIZES[self.dtype]


class Shard(NamedTuple):
    """A stored region of a tensor, and the name of the data file that has its elements."""

    region: Region
    file: str


class FilePlace(NamedTuple):
    """The bytes of a shard or value in a data file.

    Args:
        file: Name of the file.
        start: First byte.
        length: Number of bytes: of the elements row by row, or in torch's own format.
        checksums: A checksum for every block; empty if the format has none.
    """

    file: str
    start: int
    length: int
    checksums: bytes = b""


FilePlaces = Mapping[tuple[str, Region | None], FilePlace]  # by key and region; None: a value


@dataclass(frozen=True, eq=False)
class Index:
    """The contents of a checkpoint, by key. See [Note: Index].

    Args:
        where: Path of the index, for errors.
        tensors: Tensors by key.
        regions: Regions of all stored shards, by tensor and then by their first element.
        region_files: The file of each region, as its number in ``files``.
        values: File of each value that is not a tensor, by key.
        files: Data files by name.
        aliases: Other keys of tied tensors, each with the key that has the data.
        about: Description of the save: versions, time, ranks, model.
        save: Name of the save; part of the names of its files.
        block: Bytes per checksum.
        places: Places of all shards and values, each a file of ``torch.save``, in a checkpoint of
            torch.distributed.checkpoint. None: shards are elements row by row in fullshard's own files.

    Raises:
        CheckpointError: If it is inconsistent.
    """

    where: str
    tensors: Mapping[str, TensorEntry]
    regions: RegionTable
    region_files: Numbers
    values: Mapping[str, str]
    files: Mapping[str, FileEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    save: str = ""
    block: int = BLOCK
    places: FilePlaces | None = None

    def __post_init__(self) -> None:
        if not (0 < self.block <= 1 << 28 and self.block % 64 == 0):
            raise self._wrong("block", f"block size {self.block}")
        for name, file in self.files.items():
            if self.own_format and not DATA_FILE.fullmatch(name):
                raise self._wrong("files", f"file name {name!r}, which is not one of a data file")
            if not _is_within(0, file.header, file.length):
                raise self._wrong(name, f"a header of {file.header} bytes in a file of {file.length}")
        self._check_regions()
        for key, name in self.values.items():
            if key in self.tensors:
                raise self._wrong(key, "a tensor and a value under one key")
            if name not in self.files:
                raise self._wrong(key, f"data in file {name!r}, which is not in the list of files")
        for key, first in self.aliases.items():
            if key in self.tensors or key in self.values or first not in self.tensors:
                raise self._wrong(
                    key, f"an alias of {first!r}; an alias must have no data and must name a tensor that has"
                )
        for (key, _), place in (self.places or {}).items():
            self._check_place(key, place)

    def _wrong(self, key: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {clipped(key)}: found {clipped(found)}; {_DAMAGED}")

    def _check_regions(self) -> None:
        """Raise unless shards are in order, by which they are found, and make up every tensor."""
        table, numbers = self.regions, self.region_files
        dims, count = max((len(shape) for shape in self._shapes), default=0), len(self._shapes)
        if ((numbers < 0) | (numbers >= len(self.files))).any():
            raise self._wrong("shards", f"file numbers that are not among {len(self.files)} files")
        if ((table.tensor < 0) | (table.tensor >= count)).any():
            raise self._wrong("shards", f"tensor numbers that are not among {count} tensors")
        if table.dims > dims:
            raise self._wrong("shards", f"shards of {table.dims} dims in tensors of at most {dims}")
        first = table.padded(dims).first(shape_columns(self._shapes))
        same = table.tensor[1:] == table.tensor[:-1]
        if not ((table.tensor[1:] > table.tensor[:-1]) | (same & (first[1:] > first[:-1]))).all():
            raise self._wrong("shards", "shards that are not in order, or overlap")
        problem = table.find_problem(self._shapes)
        if problem is not None:
            raise self._wrong(list(self.tensors)[problem[0]], problem[1])

    def _check_place(self, key: str, place: FilePlace) -> None:
        """Raise unless the bytes lie in their file."""
        file = self.files[place.file]
        if place.length < 0 or not _is_within(file.header, place.start, file.length - place.length):
            end = place.start + place.length
            raise self._wrong(key, f"bytes {place.start} to {end} of {place.file}, which has {file.length} bytes")

    @property
    def own_format(self) -> bool:
        """True if fullshard has written the checkpoint."""
        return self.places is None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def tensor(self, key: str) -> TensorEntry:
        """Return the entry of the tensor with that key or alias.

        Raises:
            KeyError: If there is no such tensor.
        """
        return self.tensors[self.aliases.get(key, key)]

    def shards(self, key: str, region: Region | None = None) -> Iterator[Shard]:
        """Yield the stored shards of a tensor, by their first element; with ``region``, those that overlap it."""
        number, dims = self._numbers[self.aliases.get(key, key)], len(self.tensor(key).shape)
        start, end = np.searchsorted(self.regions.tensor, (number, number + 1)).tolist()
        rows = np.arange(start, end)
        if region is not None:
            offsets = self.regions.offsets[start:end, :dims]
            ends = offsets + self.regions.sizes[start:end, :dims]
            rows = rows[((offsets < np.array(region.ends)) & (ends > np.array(region.offsets))).all(axis=1)]
        for row in rows.tolist():
            yield Shard(self.regions.region(row, dims), self._file_names[int(self.region_files[row])])

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [tensor.shape for tensor in self.tensors.values()]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.tensors)}

    @cached_property
    def _file_names(self) -> list[str]:
        return list(self.files)


def table_of(
    tensors: Mapping[str, TensorEntry], files: Sequence[str], places: FilePlaces
) -> tuple[RegionTable, Numbers]:
    """Return the regions of all shards that have a place, and their file numbers, in the order of an ``Index``.

    Raises:
        ValueError: If a shard has other dims than its tensor, or is too large for any tensor.
    """
    numbers = {key: number for number, key in enumerate(tensors)}
    file_numbers = {name: number for number, name in enumerate(files)}
    shards = [(key, region, place.file) for (key, region), place in places.items() if region is not None]
    for key, region, _ in shards:
        if len(region.sizes) != len(tensors[key].shape):
            raise ValueError(f"{key}: found shard {region} of a tensor of shape {tensors[key].shape}")
        if any(number >= _LARGEST for number in (*region.offsets, *region.sizes)):
            raise ValueError(f"{key}: found a shard with more than 2**62 elements")
    table = RegionTable.of([(numbers[key], region) for key, region, _ in shards])
    shapes = shape_columns([tensor.shape for tensor in tensors.values()])
    order = np.lexsort((table.padded(shapes.shape[1]).first(shapes), table.tensor))
    files_of = np.fromiter((file_numbers[name] for _, _, name in shards), dtype=np.int64, count=len(shards))
    return table.take(order), files_of[order]


def _is_within(low: int, value: int, high: int) -> bool:
    return 0 <= low <= value <= high < _LARGEST
