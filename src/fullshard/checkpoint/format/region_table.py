"""Regions of many tensors as columns of numbers: small to send and to store, and checked all at once.

[Note: Region table]
A checkpoint of 16,384 ranks and 80 tensors has a million shards. With an object for each, reading and checking the
index takes ten seconds, and planning a save twenty. Here a shard is one row of a few integer columns. Consecutive rows
mostly differ by a constant, so the differences compress to almost nothing, and a check is a few operations on columns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fullshard.layout import Region

__all__ = ["Flags", "Numbers", "RegionTable", "pack_columns", "shape_columns", "unpack_columns"]

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_FAST = 1  # of zlib: differences are mostly zeros, and any level finds them
_LARGEST = 1 << 33  # bytes of columns that are unpacked


def pack_columns(columns: Sequence[Numbers]) -> bytes:
    """Serialize columns of equal length: their number as one byte, then the compressed differences of rows."""
    differences = [np.diff(column, prepend=0) for column in columns]
    rows = np.concatenate(differences).astype("<i8", copy=False)
    return bytes([len(columns)]) + zlib.compress(rows.tobytes(), _FAST)


def unpack_columns(data: bytes, most: int = _LARGEST) -> Numbers:
    """Deserialize columns; one row of the result per column.

    Args:
        data: The columns, of which a few bytes may unpack to a thousand times as many.
        most: The number of bytes that are unpacked at most.

    Raises:
        ValueError: If these are no columns.
    """
    if not data or not data[0]:
        raise ValueError("no columns")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data[1:], most)
    except zlib.error as error:
        raise ValueError(f"columns that cannot be decompressed ({error})") from error
    if not stream.eof or len(plain) % (8 * data[0]):
        raise ValueError(f"columns that are incomplete, or larger than {most} bytes ({len(plain)} bytes)")
    differences = np.frombuffer(plain, dtype="<i8").astype(np.int64, copy=False).reshape(data[0], -1)
    return differences.cumsum(axis=1, dtype=np.int64)


def shape_columns(shapes: Sequence[tuple[int, ...]], dims: int = 0) -> Numbers:
    """Return one row per shape, of at least ``dims`` numbers; dims that a shape does not have are 1."""
    columns = np.ones((len(shapes), max(dims, *map(len, shapes), 0)), dtype=np.int64)
    for row, shape in zip(columns, shapes, strict=True):
        row[: len(shape)] = shape
    return columns


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions of tensors, one per row. See [Note: Region table].

    Args:
        tensor: Number of the tensor, shape ``(rows,)``.
        offsets: Offsets of the region, shape ``(rows, dims)``; 0 in dims that the tensor does not have.
        sizes: Its sizes; 1 in dims that the tensor does not have.
    """

    tensor: Numbers
    offsets: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, regions: Sequence[tuple[int, Region]], dims: int | None = None) -> RegionTable:
        """Return a table of regions, each with the number of its tensor.

        Args:
            regions: The regions.
            dims: Columns for offsets and sizes; None: as many as the regions need.
        """
        if dims is None:
            dims = max((len(region.sizes) for _, region in regions), default=0)
        tensor = np.fromiter((number for number, _ in regions), dtype=np.int64, count=len(regions))
        offsets = np.zeros((len(regions), dims), dtype=np.int64)
        sizes = np.ones((len(regions), dims), dtype=np.int64)
        for row, (_, region) in enumerate(regions):
            offsets[row, : len(region.offsets)] = region.offsets
            sizes[row, : len(region.sizes)] = region.sizes
        return cls(tensor, offsets, sizes)

    @classmethod
    def from_columns(cls, columns: Numbers) -> RegionTable:
        """Return the table of ``columns``.

        Raises:
            ValueError: If there is an even number of columns.
        """
        if len(columns) % 2 == 0:
            raise ValueError(f"{len(columns)} columns; expected one for tensors, and as many for offsets as for sizes")
        dims = len(columns) // 2
        return cls(columns[0], columns[1 : 1 + dims].T, columns[1 + dims :].T)

    @classmethod
    def concatenated(cls, tables: Sequence[RegionTable]) -> RegionTable:
        """Return the rows of all tables, in order."""
        dims = max((table.dims for table in tables), default=0)
        wide = [table.padded(dims) for table in tables] or [cls.of([])]
        return cls(
            np.concatenate([table.tensor for table in wide]),
            np.concatenate([table.offsets for table in wide]),
            np.concatenate([table.sizes for table in wide]),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dims(self) -> int:
        """Largest number of dims."""
        return int(self.offsets.shape[1])

    @property
    def columns(self) -> list[Numbers]:
        """Columns to be packed: tensors, offsets of each dim, sizes of each dim."""
        return [self.tensor, *self.offsets.T, *self.sizes.T]

    @cached_property
    def numel(self) -> Numbers:
        """Number of elements of each region."""
        numel: Numbers = self.sizes.prod(axis=1, dtype=np.int64)
        return numel

    def take(self, rows: Numbers | Flags | slice) -> RegionTable:
        """Return some of the rows."""
        return RegionTable(self.tensor[rows], self.offsets[rows], self.sizes[rows])

    def region(self, row: int, dims: int) -> Region:
        """Return the region of one row, of a tensor with ``dims`` dims."""
        return Region(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))

    def first(self, shapes: Numbers) -> Numbers:
        """Return the index of the first element of each region in its tensor, counted row by row.

        Args:
            shapes: ``shape_columns`` of the tensors.
        """
        strides = np.ones_like(shapes)
        for dim in range(self.dims - 2, -1, -1):
            strides[:, dim] = strides[:, dim + 1] * np.maximum(shapes[:, dim + 1], 1)
        index: Numbers = (self.offsets * strides[self.tensor]).sum(axis=1, dtype=np.int64)
        return index

    def padded(self, dims: int) -> RegionTable:
        """Return the table with at least ``dims`` columns for offsets and for sizes."""
        more = dims - self.dims
        if more <= 0:
            return self
        wide = ((0, 0), (0, more))
        offsets, sizes = np.pad(self.offsets, wide), np.pad(self.sizes, wide, constant_values=1)
        return RegionTable(self.tensor, offsets, sizes)

    # ---------------------------------------------------------------- checks

    def find_problem(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, str] | None:
        """Return the number of a tensor that its regions do not make up, and why not; None if they do for all.

        Each region has to lie in its tensor and to have elements; together they have to cover it, without overlaps.
        """
        columns = shape_columns(shapes)
        table = self.padded(columns.shape[1])
        outside = table._outside(columns)
        if outside is not None:
            number = int(table.tensor[outside])
            return number, f"shard {table._text(outside, len(shapes[number]))} of a tensor of shape {shapes[number]}"
        both = table._overlap(columns)
        if both is not None:
            number = int(table.tensor[both[0]])
            one, other = (table._text(row, len(shapes[number])) for row in both)
            return number, f"overlapping shards {one} and {other}"
        missing = columns.prod(axis=1, dtype=np.int64)
        np.subtract.at(missing, table.tensor, table.numel)
        if not missing.any():
            return None
        number = int(missing.argmax())
        shape = shapes[number]
        return number, f"shards that lack {missing[number]} of the {math.prod(shape)} elements of shape {shape}"

    def _text(self, row: int, dims: int) -> str:
        """Return the region of one row as text, also if it is none, with negative numbers."""
        offsets, sizes = self.offsets[row, :dims].tolist(), self.sizes[row, :dims].tolist()
        return "[" + ", ".join(f"{a}:{a + size}" for a, size in zip(offsets, sizes, strict=True)) + "]"

    def _outside(self, shapes: Numbers) -> int | None:
        """Return a row whose region is empty or not within its tensor; None if there is none."""
        wrong = ((self.offsets < 0) | (self.sizes < 1) | (self.sizes > shapes[self.tensor] - self.offsets)).any(axis=1)
        return int(wrong.argmax()) if wrong.any() else None

    def _overlap(self, shapes: Numbers) -> tuple[int, int] | None:
        """Return two rows with an element in common; None if there are none. No region is empty or outside.

        If regions cover separate spans of elements, with any dim as the outermost, they do not overlap: shards of one
        dim and ranges of a flat buffer do. Other regions are compared pair by pair.
        """
        unclear = np.bincount(self.tensor, minlength=len(shapes)) > 1
        for lead in range(self.dims):
            order = [lead, *(dim for dim in range(self.dims) if dim != lead)]
            turned = RegionTable(self.tensor, self.offsets[:, order], self.sizes[:, order])
            first, last = (each.first(shapes[:, order]) for each in (turned, turned._last))
            rows = np.lexsort((first, self.tensor))
            tensor, first, last = self.tensor[rows], first[rows], last[rows]
            meet = (tensor[1:] == tensor[:-1]) & (last[:-1] >= first[1:])
            unclear &= np.bincount(tensor[1:][meet], minlength=len(shapes)) > 0
            if not unclear.any():
                return None
        for number in np.flatnonzero(unclear).tolist():
            rows = np.flatnonzero(self.tensor == number)
            offsets, ends = self.offsets[rows], self.offsets[rows] + self.sizes[rows]
            for at, row in enumerate(rows.tolist()):
                meets = ((offsets[at] < ends[at + 1 :]) & (ends[at] > offsets[at + 1 :])).all(axis=1)
                if meets.any():
                    return row, int(rows[at + 1 + meets.argmax()])
        return None

    @property
    def _last(self) -> RegionTable:
        """The last element of each region, as a region."""
        return RegionTable(self.tensor, self.offsets + self.sizes - 1, np.ones_like(self.sizes))
