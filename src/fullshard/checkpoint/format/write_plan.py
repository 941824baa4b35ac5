"""The write plan of a save: one rank decides, from arrays of numbers, which rank writes which shards.

[Note: Write plan]
Most tensors of a checkpoint are sharded, and some shards are replicated. One rank has to know all shards, so that each
is written once, and to check that together they cover every tensor. As one object per shard, as in the plans of
torch.distributed.checkpoint, that takes rank 0 some 150 microseconds per shard (128 ranks with 1,000 tensors: 20 s).
Here a rank sends its regions as one array of numbers, and the names of tensors only if they differ from the first
rank's; the plan is computed on columns of numbers, and is a bit per shard. A shard costs rank 0 a microsecond or two. A
cost per shard is inherent in one index for all ranks.
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

from fullshard.checkpoint.format.index import first_overlap
from fullshard.errors import CheckpointError
from fullshard.layout import Region

if TYPE_CHECKING:
    from fullshard.checkpoint.state.tensor_shards import TensorShards

__all__ = ["RankInventory", "TensorTable", "WritePlan", "plan_writes"]

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_FAST = 1  # of zlib: offsets are mostly zeros, and any level finds them


@dataclass(frozen=True)
class TensorTable:
    """Keys, dtypes and shapes of all tensors; every field has one element per tensor.

    Args:
        keys: Keys of the tensors.
        dtypes: Names of their torch dtypes.
        shapes: Shapes of the unsharded tensors.
        equal: True if ranks that hold the same region are known to hold the same values.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    equal: tuple[bool, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorShards]) -> TensorTable:
        """Return the table of this rank's tensors, in their order, including those of which it holds no shard."""
        return cls(
            tuple(tensors),
            tuple(str(shards.dtype).removeprefix("torch.") for shards in tensors.values()),
            tuple(tuple(shards.shape) for shards in tensors.values()),
            tuple(shards.equal for shards in tensors.values()),
        )

    @cached_property
    def packed(self) -> bytes:
        """Serialized table; equal tables have equal bytes."""
        rows = [self.keys, self.dtypes, self.shapes, self.equal]
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), _FAST)

    @property
    def digest(self) -> str:
        """Hash of the table."""
        return hashlib.sha256(self.packed).hexdigest()

    @classmethod
    def unpacked(cls, data: bytes) -> TensorTable:
        """Deserialize a table."""
        keys, dtypes, shapes, equal = json.loads(zlib.decompress(data))
        return cls(tuple(keys), tuple(dtypes), tuple(map(tuple, shapes)), tuple(equal))


@dataclass(frozen=True)
class RankInventory:
    """The shards and values that one rank holds, as it sends them to the coordinator.

    Args:
        table: A :attr:`TensorTable.packed`; None: the same as the first rank's.
        numbers: Result of :meth:`packed`.
        values: Keys of values.
    """

    table: bytes | None
    numbers: bytes
    values: tuple[str, ...]

    @staticmethod
    def packed(regions: Sequence[tuple[int, Region]]) -> bytes:
        """Serialize regions, each with the index of its tensor in the table."""
        numbers = [len(regions), *(number for number, _ in regions)]
        for _, region in regions:
            numbers += region.offsets
        for _, region in regions:
            numbers += region.sizes
        return zlib.compress(np.array(numbers, dtype="<i8").tobytes(), _FAST)

    def unpacked(self, dims: Numbers) -> _PackedRegions:
        """Return tensor indices, offsets and sizes of all regions.

        Args:
            dims: Number of dims of each tensor of the table.
        """
        numbers = np.frombuffer(zlib.decompress(self.numbers), dtype="<i8").astype(np.int64, copy=False)
        count = int(numbers[0])
        tensor = numbers[1 : 1 + count]
        end = 1 + count + int(dims[tensor].sum())
        return _PackedRegions(tensor, numbers[1 + count : end], numbers[end:])


@dataclass(frozen=True)
class _PackedRegions:
    tensor: Numbers  # index in the table
    offsets: Numbers  # one region after another
    sizes: Numbers


@dataclass(frozen=True)
class WritePlan:
    """Assignment of shards, values and files to the ranks that write them.

    Args:
        table: Table of all tensors.
        writes: Per rank, a flag for each region that it has sent: True if it writes the region.
        tensors: Per rank, the tensor index of each region that it writes and that has elements.
        values: Per rank, the keys of the values that it writes.
        files: Per rank, the number of its file; -1: it writes none.
    """

    table: TensorTable
    writes: tuple[Flags, ...]
    tensors: tuple[Numbers, ...]
    values: tuple[tuple[str, ...], ...]
    files: tuple[int, ...]


def plan_writes(held: Sequence[RankInventory]) -> WritePlan:
    """Assign each region to one rank: if replicas are known to be equal, to the holder with the least to write so far;
    otherwise to the first holder, so that the checkpoint is consistent with a single rank.

    Args:
        held: Inventories by rank. The first one has the table of those that send none.

    Raises:
        CheckpointError: If regions are outside of their tensors, overlap, or do not cover every tensor.
    """
    table, regions = _merge_tables(held)
    columns = _RegionColumns.of(table, regions)
    ranks = np.repeat(np.arange(len(held)), [len(each.tensor) for each in regions])
    chosen = _choose_writers(columns, ranks, np.array(table.equal, dtype=bool), len(held))
    _check(table, columns, chosen)
    ends = np.cumsum([len(each.tensor) for each in regions])[:-1]
    writes = np.split(chosen, ends)
    writes_elements = np.split(chosen & (columns.numel > 0), ends)
    tensors = [own[kept] for own, kept in zip(np.split(columns.tensor, ends), writes_elements, strict=True)]
    values = _first_holders([each.values for each in held])
    has_file = [bool(len(tensors[rank]) or values[rank]) for rank in range(len(held))]
    numbers = np.cumsum(has_file) - 1
    files = tuple(int(number) if writing else -1 for number, writing in zip(numbers, has_file, strict=True))
    return WritePlan(table, tuple(writes), tuple(tensors), tuple(values), files)


def _merge_tables(held: Sequence[RankInventory]) -> tuple[TensorTable, list[_PackedRegions]]:
    """Merge the tables of all ranks, and renumber every rank's regions to the merged table."""
    known: dict[bytes, tuple[Numbers, Numbers]] = {}  # by table: index in the merged table, dims
    first = held[0].table
    assert first is not None, "the first rank has to send its table"
    rows: dict[str, tuple[str, tuple[int, ...], bool]] = {}
    numbers: dict[str, int] = {}
    regions = []
    for each in held:
        packed = first if each.table is None else each.table
        if packed not in known:
            own = TensorTable.unpacked(packed)
            for key, dtype, shape, equal in zip(own.keys, own.dtypes, own.shapes, own.equal, strict=True):
                if key not in rows:  # the first rank that has it
                    rows[key], numbers[key] = (dtype, shape, equal), len(numbers)
            known[packed] = _int64(numbers[key] for key in own.keys), _int64(len(shape) for shape in own.shapes)
        common, dims = known[packed]
        found = each.unpacked(dims)
        regions.append(_PackedRegions(common[found.tensor], found.offsets, found.sizes))
    of_all = rows.values()
    dtypes, shapes = tuple(row[0] for row in of_all), tuple(row[1] for row in of_all)
    return TensorTable(tuple(rows), dtypes, shapes, tuple(row[2] for row in of_all)), regions


def _int64(numbers: Any) -> Numbers:
    return np.fromiter(numbers, dtype=np.int64)


@dataclass(frozen=True)
class _RegionColumns:
    """All regions of all ranks, one per row, padded to the largest number of dims."""

    tensor: Numbers
    offsets: Numbers
    sizes: Numbers
    shapes: Numbers  # of the unsharded tensor; 1 beyond its dims
    first: Numbers  # index of its first element in the tensor, counted row by row
    numel: Numbers

    @classmethod
    def of(cls, table: TensorTable, regions: Sequence[_PackedRegions]) -> _RegionColumns:
        most = max((len(shape) for shape in table.shapes), default=0)
        dims = _int64(len(shape) for shape in table.shapes)
        shapes = np.ones((len(table.keys), most), dtype=np.int64)
        for row, shape in zip(shapes, table.shapes, strict=True):
            row[: len(shape)] = shape
        strides = np.ones_like(shapes)
        for dim in range(most - 2, -1, -1):
            strides[:, dim] = strides[:, dim + 1] * np.maximum(shapes[:, dim + 1], 1)
        tensor = np.concatenate([each.tensor for each in regions]) if regions else np.zeros(0, dtype=np.int64)
        there = np.arange(most) < dims[tensor][:, None]
        offsets, sizes = np.zeros((len(tensor), most), dtype=np.int64), np.ones((len(tensor), most), dtype=np.int64)
        flat_offsets = np.concatenate([each.offsets for each in regions])
        flat_sizes = np.concatenate([each.sizes for each in regions])
        if len(flat_offsets) != there.sum() or len(flat_sizes) != there.sum():
            raise CheckpointError("ranks hold tensors of the same name with different numbers of dims")
        offsets[there], sizes[there] = flat_offsets, flat_sizes
        first = (offsets * strides[tensor]).sum(axis=1, dtype=np.int64)
        return cls(tensor, offsets, sizes, shapes[tensor], first, sizes.prod(axis=1, dtype=np.int64))


def _choose_writers(columns: _RegionColumns, ranks: Numbers, equal: Flags, size: int) -> Flags:
    """Return for each region whether the rank that holds it writes it."""
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


def _check(table: TensorTable, columns: _RegionColumns, chosen: Flags) -> None:
    """Raise unless the regions to be written lie in their tensors, do not overlap, and cover every tensor.

    Raises:
        CheckpointError: If one of these does not hold.
    """
    rows = np.flatnonzero(chosen & (columns.numel > 0))
    tensor, offsets, sizes = columns.tensor[rows], columns.offsets[rows], columns.sizes[rows]
    outside = ((offsets < 0) | (offsets + sizes > columns.shapes[rows])).any(axis=1)
    if outside.any():
        key = table.keys[int(tensor[int(outside.argmax())])]
        raise CheckpointError(f"{key}: a rank holds a shard outside of the shape on the first rank")
    covered = np.zeros(len(table.keys), dtype=np.int64)
    np.add.at(covered, tensor, columns.numel[rows])
    for number, shape in enumerate(table.shapes):
        missing = math.prod(shape) - int(covered[number])
        if missing > 0:
            raise CheckpointError(
                f"{table.keys[number]}: no rank that saves holds {missing} of the {math.prod(shape)} elements of shape "
                f"{shape}; save with the process_group of all ranks that the model is sharded over"
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
        both = first_overlap([Region(tuple(o[:dims]), tuple(s[:dims])) for o, s in pairs])
        if both is not None:
            raise CheckpointError(
                f"{table.keys[number]}: ranks hold shards {both[0]} and {both[1]}, which overlap without being equal"
            )


def _ranges(columns: _RegionColumns, rows: Numbers, count: int) -> tuple[Numbers, Numbers, Flags]:
    """Return begin and length of each region on a line on which regions overlap if and only if they do in their tensor,
    and the tensors for which there is no such line.

    The line is a dim if the tensor is sharded in no other dim; else all elements, row by row, if every region is a
    range.
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


def _first_holders(values: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return for each rank the keys that no rank before it has."""
    seen: set[str] = set()
    found = []
    for keys in values:
        own = tuple(key for key in keys if key not in seen)
        seen.update(own)
        found.append(own)
    return found
