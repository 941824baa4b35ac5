"""The index of a checkpoint: which tensors and values it has and where. ``docs/checkpoint_format.md`` has its JSON
form.

[Note: Index]
The index says which regions of which tensors are in which file, so it is untrusted input until checked: file names must
be ones that the writer makes (none leaves the folder), every shard must lie in its tensor, and shards must neither
overlap nor leave holes. An :class:`Index` is valid once it exists. The writer checks its own index before it commits.

Where in its file a shard lies is in the file's own header, which only the ranks that need the file read; see
[Note: Directory]. Checkpoints of format 1 and of torch.distributed.checkpoint have these places in the index: their
shards are :class:`ShardEntry` objects.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np

from fullshard.checkpoint.format.region_table import Numbers, RegionTable, shape_columns
from fullshard.errors import CheckpointError
from fullshard.layout import Region

__all__ = [
    "BLOCK",
    "CHECKSUM",
    "DATA_FILE",
    "ITEM_SIZES",
    "FileEntry",
    "Index",
    "Shard",
    "ShardEntry",
    "Shards",
    "TensorEntry",
    "Value",
    "ValueEntry",
    "data_file",
    "split_by_tensor",
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
        checksum: Checksum of the header, followed in format 2 by that of the checksums of all blocks; empty if the
            format has none.
    """

    length: int
    header: int = 0
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Shard:
    """A region of a tensor, and the name of the data file that has its elements."""

    region: Region
    file: str


@dataclass(frozen=True, slots=True)
class ShardEntry(Shard):
    """A shard and its place in the file.

    Args:
        start: First byte.
        length: Number of bytes: of the elements row by row, or in torch's own format.
        checksums: A checksum for every ``block`` bytes; empty if the format has none.
    """

    start: int
    length: int
    checksums: bytes = b""


class Shards(Sequence[Shard]):
    """The shards of one tensor, by their first element. Objects of them are made when they are asked for.

    Args:
        shape: Shape of the tensor.
        regions: Regions, in order.
        files: Number of the file of each region.
        names: Names of files.
        entries: The shards themselves, if they exist as objects.
    """

    _shape: tuple[int, ...]
    regions: RegionTable
    files: Numbers
    names: Sequence[str]
    _entries: Sequence[Shard] | None

    def __init__(
        self,
        shape: tuple[int, ...],
        regions: RegionTable,
        files: Numbers,
        names: Sequence[str],
        entries: Sequence[Shard] | None = None,
    ) -> None:
        self._shape, self.regions, self.files, self.names, self._entries = shape, regions, files, names, entries

    @classmethod
    def of(cls, shape: tuple[int, ...], shards: Iterable[Shard]) -> Shards:
        """Return the shards of a tensor of that shape, given in any order.

        Raises:
            ValueError: If an offset or size is too large for any tensor.
        """
        entries = list(shards)
        if any(number >= _LARGEST for entry in entries for number in (*entry.region.offsets, *entry.region.sizes)):
            raise ValueError("a shard with more than 2**62 elements")
        table = RegionTable.of([(0, shard.region) for shard in entries], None if entries else len(shape))
        if table.dims == len(shape):  # otherwise the index refuses them
            order = np.argsort(table.first(shape_columns([shape])), kind="stable")
            entries = [entries[at] for at in order.tolist()]
            table = table.take(order)
        names = list(dict.fromkeys(shard.file for shard in entries))
        numbers = {name: number for number, name in enumerate(names)}
        files = np.array([numbers[shard.file] for shard in entries], dtype=np.int64)
        return cls(shape, table, files, names, entries)

    @property
    def entries(self) -> list[ShardEntry]:
        """The shards whose place in the file is known."""
        return [entry for entry in self._entries or () if isinstance(entry, ShardEntry)]

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if self._entries is not None:
            return self._entries[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return Shard(self.regions.region(index, len(self._shape)), self.names[int(self.files[index])])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def overlapping(self, region: Region) -> Iterator[Shard]:
        """Yield the shards that have elements of a region."""
        dims = len(self._shape)
        offsets, ends = self.regions.offsets[:, :dims], self.regions.offsets[:, :dims] + self.regions.sizes[:, :dims]
        found = ((offsets < np.array(region.ends)) & (ends > np.array(region.offsets))).all(axis=1)
        for at in np.flatnonzero(found).tolist():
            yield self[at]

    def at(self, offsets: tuple[int, ...]) -> Shard:
        """Return the shard that begins at ``offsets``.

        Raises:
            KeyError: If there is none.
        """
        first = 0
        for size, offset in zip(self._shape, offsets, strict=True):
            first = first * size + offset
        at = int(np.searchsorted(self._first, first))
        if at == len(self) or self[at].region.offsets != offsets:
            raise KeyError(f"no shard begins at {offsets}")
        return self[at]

    @cached_property
    def _first(self) -> Numbers:
        return self.regions.renumbered(np.zeros(len(self), dtype=np.int64)).first(
            shape_columns([self._shape], self.regions.dims)
        )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: dtype by name, shape, and its shards. ``path`` is its path in nested dicts."""

    dtype: str
    shape: tuple[int, ...]
    shards: Shards
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
class Value:
    """A value that is not a tensor: the name of the data file that has it, and its path in nested dicts."""

    file: str
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A value and its place in the file; fields as in :class:`Value` and :class:`ShardEntry`."""

    file: str
    start: int
    length: int
    checksums: bytes = b""
    path: tuple[str | int, ...] = ()


def split_by_tensor(
    shapes: Sequence[tuple[int, ...]], regions: RegionTable, files: Numbers, names: Sequence[str]
) -> list[Shards]:
    """Return the shards of each tensor.

    Args:
        shapes: Shapes of the tensors.
        regions: Regions of all tensors, by tensor and then by their first element.
        files: Number of the file of each region.
        names: Names of files.
    """
    ends = np.searchsorted(regions.tensor, np.arange(len(shapes) + 1)).tolist()
    parts = [slice(start, end) for start, end in itertools.pairwise(ends)]
    return [Shards(shape, regions.take(part), files[part], names) for shape, part in zip(shapes, parts, strict=True)]


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
    values: Mapping[str, Value | ValueEntry]
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
        names: Sequence[str] = ()
        for key, tensor in self.tensors.items():
            if tensor.shards.names is not names:  # of many tensors, they are one list of thousands
                names = tensor.shards.names
                self._check_names(key, names)
            self._check_tensor(key, tensor)
        self._check_regions()
        for key, value in self.values.items():
            if key in self.tensors:
                raise self._wrong(key, "a tensor and a value under one key")
            self._check_stored(key, value)
        for key, first in self.aliases.items():
            if key in self.tensors or key in self.values or first not in self.tensors:
                raise self._wrong(
                    key, f"an alias of {first!r}; an alias must have no data and must name a tensor that has"
                )

    def _wrong(self, key: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: found {found}; {_DAMAGED}")

    def _check_files(self) -> None:
        for name, file in self.files.items():
            if self.raw and not DATA_FILE.fullmatch(name):
                raise self._wrong("files", f"file name {name!r}, which is not one of a data file")
            if not _is_within(0, file.header, file.length):
                raise self._wrong(name, f"a header of {file.header} bytes in a file of {file.length}")

    def _check_names(self, key: str, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.files:
                raise self._wrong(key, f"data in file {name!r}, which is not in the list of files")

    def _check_tensor(self, key: str, tensor: TensorEntry) -> None:
        """Raise unless dtype and shape are possible and all shards have a place."""
        if tensor.dtype not in ITEM_SIZES:
            raise self._wrong(key, f"dtype {tensor.dtype!r}")
        if len(tensor.shape) > 64 or any(not 0 <= n < _LARGEST for n in tensor.shape) or tensor.nbytes >= _LARGEST:
            raise self._wrong(key, f"shape {tensor.shape}")
        if len(tensor.shards) and tensor.shards.regions.dims < len(tensor.shape):
            raise self._wrong(key, f"shard {tensor.shards[0].region} of a tensor of shape {tensor.shape}")
        for shard in tensor.shards.entries:
            if len(shard.region.sizes) != len(tensor.shape):
                raise self._wrong(key, f"shard {shard.region} of a tensor of shape {tensor.shape}")
            if self.raw and shard.length != shard.region.numel * ITEM_SIZES[tensor.dtype]:
                raise self._wrong(key, f"{shard.length} bytes for shard {shard.region} of dtype {tensor.dtype}")
            self._check_stored(key, shard)

    def _check_stored(self, key: str, stored: ShardEntry | Value | ValueEntry) -> None:
        """Raise unless the bytes lie in their file and have a checksum for every block, if the index has the place."""
        file = self.files.get(stored.file)
        if file is None:
            raise self._wrong(key, f"data in file {stored.file!r}, which is not in the list of files")
        if isinstance(stored, Value):
            return
        if stored.length < 0 or not _is_within(file.header, stored.start, file.length - stored.length):
            end = stored.start + stored.length
            raise self._wrong(key, f"bytes {stored.start} to {end} of {stored.file}, which has {file.length} bytes")
        checksums = -(-stored.length // self.block)
        if self.raw and len(stored.checksums) != CHECKSUM * checksums:
            raise self._wrong(key, f"{len(stored.checksums)} bytes of checksums, not {checksums} times {CHECKSUM}")

    def _check_regions(self) -> None:
        """Raise unless the shards of every tensor lie in it, do not overlap, and cover it."""
        keys, entries = list(self.tensors), list(self.tensors.values())
        shapes = shape_columns([entry.shape for entry in entries])
        counts = np.array([len(entry.shards) for entry in entries], dtype=np.int64)
        numbers = np.repeat(np.arange(len(entries)), counts)
        table = RegionTable.concatenated([entry.shards.regions for entry in entries if len(entry.shards)])
        table = table.renumbered(numbers).padded(shapes.shape[1])
        outside = table.outside(shapes) if table.dims == shapes.shape[1] else 0
        if outside is not None:
            number = int(numbers[outside])
            shard = table.describe(outside, len(entries[number].shape))
            raise self._wrong(keys[number], f"shard {shard} of a tensor of shape {entries[number].shape}")
        both = table.overlap(shapes)
        if both is not None:
            number = int(numbers[both[0]])
            one, other = (table.region(row, len(entries[number].shape)) for row in both)
            raise self._wrong(keys[number], f"overlapping shards {one} and {other}")
        missing = table.missing(shapes)
        if missing.any():
            number = int(missing.argmax())
            entry = entries[number]
            raise self._wrong(
                keys[number],
                f"shards that lack {int(missing[number])} of the {entry.numel} elements of shape {entry.shape}",
            )

    def tensor(self, key: str) -> TensorEntry:
        """Return the entry of the tensor with that key or alias.

        Raises:
            KeyError: If there is no such tensor.
        """
        return self.tensors[self.aliases.get(key, key)]


def _is_within(low: int, value: int, high: int) -> bool:
    return 0 <= low <= value <= high < _LARGEST
