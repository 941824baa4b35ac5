"""Who writes what in a save: one rank decides it for all, from numbers.

[Note: Division]
Most tensors of a checkpoint are held in parts, some by several ranks. One rank has to know all parts, so as to have
each written once, and to be sure that together they are all of every tensor. Sent as one object per part, as
torch.distributed.checkpoint's plans have them, that takes rank 0 some 150 microseconds per part (128 ranks with 1,000
tensors: 20 s). Here a rank sends the boxes that it holds as one array of numbers, and the names of tensors only if they
are not those of the first rank; the decision is made on columns of numbers, and is a bit per part. A part costs rank 0
a microsecond or two. That it costs anything is inherent in one index for all ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fullshard.checkpoint.index import first_overlap
from fullshard.errors import CheckpointError
from fullshard.layout import Box

if TYPE_CHECKING:
    from fullshard.checkpoint.pieces import Pieces

__all__ = ["Division", "Held", "TensorTable", "divide"]

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_FAST = 1  # of zlib: offsets are mostly zeros, and any level finds them


@dataclass(frozen=True)
class TensorTable:
    """What tensors there are. All fields are of the same length.

    Args:
        keys: Of the tensors.
        dtypes: Names of their torch dtypes.
        shapes: Of the whole tensors.
        equal: Whether ranks that hold the same box are known to have the same values in it.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    equal: tuple[bool, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Pieces]) -> TensorTable:
        """Of what this rank has, in that order, whether it holds a part of it or not."""
        return cls(
            tuple(tensors),
            tuple(str(pieces.dtype).removeprefix("torch.") for pieces in tensors.values()),
            tuple(tuple(pieces.shape) for pieces in tensors.values()),
            tuple(pieces.equal for pieces in tensors.values()),
        )

    @cached_property
    def packed(self) -> bytes:
        """As bytes, which are the same where the table is."""
        rows = [self.keys, self.dtypes, self.shapes, self.equal]
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), _FAST)

    @property
    def digest(self) -> str:
        """The same where the table is, in a few bytes."""
        return hashlib.sha256(self.packed).hexdigest()

    @classmethod
    def unpacked(cls, data: bytes) -> TensorTable:
        """From these bytes."""
        keys, dtypes, shapes, equal = json.loads(zlib.decompress(data))
        return cls(tuple(keys), tuple(dtypes), tuple(map(tuple, shapes)), tuple(equal))


@dataclass(frozen=True)
class Held:
    """What one rank holds, as it is sent.

    Args:
        table: A :attr:`TensorTable.packed`; None: that of the first rank.
        numbers: Of :meth:`packed`.
        values: Keys of what is no tensor.
    """

    table: bytes | None
    numbers: bytes
    values: tuple[str, ...]

    @staticmethod
    def packed(boxes: Sequence[tuple[int, Box]]) -> bytes:
        """Boxes, each with the number of its tensor in the table."""
        numbers = [len(boxes), *(number for number, _ in boxes)]
        for _, box in boxes:
            numbers += box.offsets
        for _, box in boxes:
            numbers += box.sizes
        return zlib.compress(np.array(numbers, dtype="<i8").tobytes(), _FAST)

    def unpacked(self, dims: Numbers) -> _Boxes:
        """Tensor numbers, offsets and sizes.

        Args:
            dims: How many each tensor of the table has.
        """
        numbers = np.frombuffer(zlib.decompress(self.numbers), dtype="<i8").astype(np.int64, copy=False)
        count = int(numbers[0])
        tensor = numbers[1 : 1 + count]
        end = 1 + count + int(dims[tensor].sum())
        return _Boxes(tensor, numbers[1 + count : end], numbers[end:])


@dataclass(frozen=True)
class _Boxes:
    tensor: Numbers  # its number
    offsets: Numbers  # of one box after another
    sizes: Numbers


@dataclass(frozen=True)
class Division:
    """Who writes what.

    Args:
        table: Of all tensors.
        parts: Per rank, for each of the boxes that it has sent, whether it writes it.
        tensors: Per rank, the tensor number of each box that it writes and that has elements.
        values: Per rank, the keys of what it writes that is no tensor.
        files: Per rank, the number of its file; -1: it writes none.
    """

    table: TensorTable
    parts: tuple[Flags, ...]
    tensors: tuple[Numbers, ...]
    values: tuple[tuple[str, ...], ...]
    files: tuple[int, ...]


def divide(held: Sequence[Held]) -> Division:
    """Decide who writes what. Each box is written by one rank: where ranks are known to have the same, by the one that
    has least to write so far; elsewhere by the first, so that a checkpoint is of one rank and not of several.

    Args:
        held: By rank. What the first holds describes those that send no table.

    Raises:
        CheckpointError: If the boxes are not in their tensors, overlap, or are not all of every tensor.
    """
    table, boxes = _gathered(held)
    columns = _Columns.of(table, boxes)
    ranks = np.repeat(np.arange(len(held)), [len(each.tensor) for each in boxes])
    chosen = _chosen(columns, ranks, np.array(table.equal, dtype=bool), len(held))
    _check(table, columns, chosen)
    ends = np.cumsum([len(each.tensor) for each in boxes])[:-1]
    parts = np.split(chosen, ends)
    writes_elements = np.split(chosen & (columns.numel > 0), ends)
    tensors = [own[kept] for own, kept in zip(np.split(columns.tensor, ends), writes_elements, strict=True)]
    values = _first_with_each([each.values for each in held])
    writes = [bool(len(tensors[rank]) or values[rank]) for rank in range(len(held))]
    numbers = np.cumsum(writes) - 1
    files = tuple(int(number) if writing else -1 for number, writing in zip(numbers, writes, strict=True))
    return Division(table, tuple(parts), tuple(tensors), tuple(values), files)


def _gathered(held: Sequence[Held]) -> tuple[TensorTable, list[_Boxes]]:
    """One table for all, and every rank's boxes with tensor numbers in it."""
    known: dict[bytes, tuple[Numbers, Numbers]] = {}  # by table: number in the common one, dims
    first = held[0].table
    assert first is not None, "the first rank has to send its table"
    rows: dict[str, tuple[str, tuple[int, ...], bool]] = {}
    numbers: dict[str, int] = {}
    boxes = []
    for each in held:
        packed = first if each.table is None else each.table
        if packed not in known:
            own = TensorTable.unpacked(packed)
            for key, dtype, shape, equal in zip(own.keys, own.dtypes, own.shapes, own.equal, strict=True):
                if key not in rows:  # the first that has it counts
                    rows[key], numbers[key] = (dtype, shape, equal), len(numbers)
            known[packed] = _int64(numbers[key] for key in own.keys), _int64(len(shape) for shape in own.shapes)
        common, dims = known[packed]
        found = each.unpacked(dims)
        boxes.append(_Boxes(common[found.tensor], found.offsets, found.sizes))
    of_all = rows.values()
    dtypes, shapes = tuple(row[0] for row in of_all), tuple(row[1] for row in of_all)
    return TensorTable(tuple(rows), dtypes, shapes, tuple(row[2] for row in of_all)), boxes


def _int64(numbers: Any) -> Numbers:
    return np.fromiter(numbers, dtype=np.int64)


@dataclass(frozen=True)
class _Columns:
    """All boxes of all ranks, one per row, with as many dims as the tensor with most has."""

    tensor: Numbers
    offsets: Numbers
    sizes: Numbers
    shapes: Numbers  # of the whole tensor; 1 beyond its dims
    first: Numbers  # number of its first element in the tensor, counted row by row
    numel: Numbers

    @classmethod
    def of(cls, table: TensorTable, boxes: Sequence[_Boxes]) -> _Columns:
        most = max((len(shape) for shape in table.shapes), default=0)
        dims = _int64(len(shape) for shape in table.shapes)
        shapes = np.ones((len(table.keys), most), dtype=np.int64)
        for row, shape in zip(shapes, table.shapes, strict=True):
            row[: len(shape)] = shape
        strides = np.ones_like(shapes)
        for dim in range(most - 2, -1, -1):
            strides[:, dim] = strides[:, dim + 1] * np.maximum(shapes[:, dim + 1], 1)
        tensor = np.concatenate([each.tensor for each in boxes]) if boxes else np.zeros(0, dtype=np.int64)
        there = np.arange(most) < dims[tensor][:, None]
        offsets, sizes = np.zeros((len(tensor), most), dtype=np.int64), np.ones((len(tensor), most), dtype=np.int64)
        flat_offsets = np.concatenate([each.offsets for each in boxes])
        flat_sizes = np.concatenate([each.sizes for each in boxes])
        if len(flat_offsets) != there.sum() or len(flat_sizes) != there.sum():
            raise CheckpointError("ranks hold tensors of the same name with different numbers of dims")
        offsets[there], sizes[there] = flat_offsets, flat_sizes
        first = (offsets * strides[tensor]).sum(axis=1, dtype=np.int64)
        return cls(tensor, offsets, sizes, shapes[tensor], first, sizes.prod(axis=1, dtype=np.int64))


def _chosen(columns: _Columns, ranks: Numbers, equal: Flags, size: int) -> Flags:
    """Whether each box is written by the rank that holds it."""
    order = np.lexsort((ranks, columns.first, columns.tensor))
    tensor, first = columns.tensor[order], columns.first[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (tensor[1:] != tensor[:-1]) | (first[1:] != first[:-1])
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(order))
    spread = (ends - starts > 1) & equal[tensor[starts]]
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[starts[~spread]]] = True
    loads = np.bincount(ranks[chosen], weights=columns.numel[chosen].astype(np.float64), minlength=size)
    for start, end in zip(starts[spread].tolist(), ends[spread].tolist(), strict=True):
        holders = ranks[order[start:end]]
        place = order[start + int(loads[holders].argmin())]
        chosen[place] = True
        loads[ranks[place]] += columns.numel[place]
    return chosen


def _check(table: TensorTable, columns: _Columns, chosen: Flags) -> None:
    """That the boxes to be written are in their tensors, do not overlap, and are all of every tensor.

    Raises:
        CheckpointError: If not.
    """
    rows = np.flatnonzero(chosen & (columns.numel > 0))
    tensor, offsets, sizes = columns.tensor[rows], columns.offsets[rows], columns.sizes[rows]
    outside = ((offsets < 0) | (offsets + sizes > columns.shapes[rows])).any(axis=1)
    if outside.any():
        key = table.keys[int(tensor[int(outside.argmax())])]
        raise CheckpointError(f"{key}: a rank holds a part that is not in the shape that the first rank has")
    covered = np.zeros(len(table.keys), dtype=np.int64)
    np.add.at(covered, tensor, columns.numel[rows])
    for number, shape in enumerate(table.shapes):
        missing = math.prod(shape) - int(covered[number])
        if missing > 0:
            raise CheckpointError(
                f"{table.keys[number]}: no rank that saves holds {missing} of the {math.prod(shape)} elements of shape "
                f"{shape}; save with the process_group of all ranks that hold a part of the model"
            )
    begin, length, unclear = _ranges(columns, rows, len(table.keys))
    order = np.lexsort((begin, tensor))
    same = tensor[order][1:] == tensor[order][:-1]
    over = same & (begin[order][:-1] + length[order][:-1] > begin[order][1:]) & ~unclear[tensor[order][1:]]
    suspects = {int(tensor[order][1:][over][0])} if over.any() else set()
    for number in (*suspects, *np.flatnonzero(unclear).tolist()):
        mine = tensor == number
        dims = len(table.shapes[number])
        pairs = zip(offsets[mine].tolist(), sizes[mine].tolist(), strict=True)
        both = first_overlap([Box(tuple(o[:dims]), tuple(s[:dims])) for o, s in pairs])
        if both is not None:
            raise CheckpointError(
                f"{table.keys[number]}: ranks hold {both[0]} and {both[1]} of it, which overlap without being the same"
            )


def _ranges(columns: _Columns, rows: Numbers, count: int) -> tuple[Numbers, Numbers, Flags]:
    """Where boxes begin and how long they are, on a line on which they overlap exactly if they do in their tensor; and
    for which tensors there is no such line.

    The line is a dim, if tensors are cut in no other; else all elements, row by row, if every box is a range of these.
    """
    sizes, shapes, tensor = columns.sizes[rows], columns.shapes[rows], columns.tensor[rows]
    partial = sizes < shapes
    cut = np.zeros((count, sizes.shape[1]), dtype=bool)
    np.logical_or.at(cut, tensor, partial)
    one = cut.sum(axis=1) <= 1
    inner = np.cumsum(sizes > 1, axis=1) - (sizes > 1) > 0  # dims after the first that has more than one index
    ragged = np.zeros(count, dtype=bool)
    np.logical_or.at(ragged, tensor, (partial & inner).any(axis=1))
    dim = cut.argmax(axis=1)[tensor] if sizes.shape[1] else np.zeros(len(rows), dtype=np.int64)
    at = np.arange(len(rows))
    by_dim = one[tensor] & (sizes.shape[1] > 0)
    begin, length = columns.first[rows].copy(), columns.numel[rows].copy()
    if sizes.shape[1]:
        begin[by_dim] = columns.offsets[rows][at, dim][by_dim]
        length[by_dim] = sizes[at, dim][by_dim]
    return begin, length, ragged & ~one


def _first_with_each(values: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Per rank the keys that no rank before it has."""
    seen: set[str] = set()
    found = []
    for keys in values:
        own = tuple(key for key in keys if key not in seen)
        seen.update(own)
        found.append(own)
    return found
