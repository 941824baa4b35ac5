"""Regions of many tensors as columns of numbers: small to send and to store, and checked all at once.

[Note: Region table]
A checkpoint of 16,384 ranks and 80 tensors has a million shards. With an object for each, reading and checking the
index takes ten seconds, and planning a save twenty. Here a shard is one row of a few integer columns. Consecutive rows
mostly differ by a constant, so the differences compress to almost nothing, and a check is a few operations on columns.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fullshard.layout import Region

__all__ = ["Flags", "Numbers", "RegionTable", "first_overlap", "pack_columns", "shape_columns", "unpack_columns"]

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_FAST = 1  # of zlib: differences are mostly zeros, and any level finds them
_LARGEST = 1 << 33  # bytes of columns that are unpacked: a damaged index must not fill the memory


def pack_columns(columns: Sequence[Numbers]) -> bytes:
    """Serialize columns of equal length: their number as one byte, then the compressed differences of rows."""
    differences = [np.diff(column, prepend=0) for column in columns]
    rows = np.concatenate(differences).astype("<i8", copy=False)
    return bytes([len(columns)]) + zlib.compress(rows.tobytes(), _FAST)


def unpack_columns(data: bytes) -> Numbers:
    """Deserialize columns; one row of the result per column.

    Raises:
        ValueError: If these are no columns.
    """
    if not data or not data[0]:
        raise ValueError("no columns")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data[1:], _LARGEST)
    except zlib.error as error:
        raise ValueError(f"columns that cannot be decompressed ({error})") from error
    if not stream.eof or len(plain) % (8 * data[0]):
        raise ValueError(f"columns that are incomplete or too large ({len(plain)} bytes)")
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
        """Return the table of :attr:`columns`.

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

    def renumbered(self, tensor: Numbers) -> RegionTable:
        """Return the same regions with other numbers of tensors."""
        return RegionTable(tensor, self.offsets, self.sizes)

    def region(self, row: int, dims: int) -> Region:
        """Return the region of one row, of a tensor with ``dims`` dims."""
        return Region(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))

    def describe(self, row: int, dims: int) -> str:
        """Return the region of one row as text, also if it is none, with negative numbers."""
        offsets, sizes = self.offsets[row, :dims].tolist(), self.sizes[row, :dims].tolist()
        return "[" + ", ".join(f"{a}:{a + size}" for a, size in zip(offsets, sizes, strict=True)) + "]"

    def first(self, shapes: Numbers) -> Numbers:
        """Return the index of the first element of each region in its tensor, counted row by row.

        Args:
            shapes: :func:`shape_columns` of the tensors.
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

    def outside(self, shapes: Numbers) -> int | None:
        """Return a row whose region is empty or not within its tensor; None if there is none."""
        wrong = ((self.offsets < 0) | (self.sizes < 1) | (self.sizes > shapes[self.tensor] - self.offsets)).any(axis=1)
        return int(wrong.argmax()) if wrong.any() else None

    def missing(self, shapes: Numbers) -> Numbers:
        """Return how many elements of each tensor are in no region; regions do not overlap."""
        covered = np.zeros(len(shapes), dtype=np.int64)
        np.add.at(covered, self.tensor, self.numel)
        numel: Numbers = shapes.prod(axis=1, dtype=np.int64)
        return numel - covered

    def overlap(self, shapes: Numbers) -> tuple[int, int] | None:
        """Return two rows with an element in common; None if there are none. No region is empty or outside."""
        first = self.first(shapes)
        begin, length, unclear = self._ranges(first, shapes)
        order = np.lexsort((begin, self.tensor))
        tensor, begin, length = self.tensor[order], begin[order], length[order]
        over = (tensor[1:] == tensor[:-1]) & (begin[:-1] + length[:-1] > begin[1:]) & ~unclear[tensor[1:]]
        if over.any():
            at = int(over.argmax())
            return int(order[at]), int(order[at + 1])
        for number in np.flatnonzero(unclear).tolist():
            rows = np.flatnonzero(self.tensor == number)
            both = first_overlap([self.region(row, self.dims) for row in rows.tolist()])
            if both is not None:
                return int(rows[both[0]]), int(rows[both[1]])
        return None

    def _ranges(self, first: Numbers, shapes: Numbers) -> tuple[Numbers, Numbers, Flags]:
        """Return begin and length of each region on a line on which regions overlap if and only if they do in their
        tensor, and the tensors for which there is no such line.

        The line is a dim if the tensor is sharded in no other dim; else all elements, row by row, if every region is a
        range.
        """
        partial = self.sizes < shapes[self.tensor]
        cut = np.zeros(shapes.shape, dtype=bool)
        for dim in range(self.dims):
            cut[self.tensor[partial[:, dim]], dim] = True
        one = cut.sum(axis=1) <= 1
        begin, length = first.copy(), self.numel.copy()
        if not self.dims:
            return begin, length, np.zeros(len(shapes), dtype=bool)
        by_dim = np.flatnonzero(one[self.tensor])
        dim = cut.argmax(axis=1)[self.tensor[by_dim]]
        begin[by_dim], length[by_dim] = self.offsets[by_dim, dim], self.sizes[by_dim, dim]
        ragged = np.zeros(len(shapes), dtype=bool)
        rest = np.flatnonzero(~one[self.tensor])
        inner = np.cumsum(self.sizes[rest] > 1, axis=1) - (self.sizes[rest] > 1) > 0  # after the first dim of size > 1
        ragged[self.tensor[rest[(partial[rest] & inner).any(axis=1)]]] = True
        return begin, length, ragged


def first_overlap(regions: Iterable[Region]) -> tuple[int, int] | None:
    """Return the numbers of two regions that have an element in common; None if no two have.

    Sweeps over the dim with the most distinct offsets, so that each region is compared with few others.
    """
    left = [(number, region) for number, region in enumerate(regions) if region.numel]
    if len(left) < 2:
        return None
    if not left[0][1].sizes:
        return left[0][0], left[1][0]
    dims = range(len(left[0][1].sizes))
    dim = max(dims, key=lambda dim: len({region.offsets[dim] for _, region in left}))
    left.sort(key=lambda pair: pair[1].offsets[dim])
    open_ends: list[tuple[int, int]] = []  # (end in the dim, position) of the regions at the current position
    for position, (number, region) in enumerate(left):
        del open_ends[: bisect_right(open_ends, (region.offsets[dim], len(left)))]
        for _, other in open_ends:
            if region.overlap(left[other][1]) is not None:
                return left[other][0], number
        insort(open_ends, (region.ends[dim], position))
    return None
