"""The write plan of a save: which rank writes which shards, computed by every rank from arrays of numbers.

[Note: Write plan]
Most tensors of a checkpoint are sharded, and some shards are replicated. All shards have to be known, so that each is
written once, and to check that together they cover every tensor. As one object per shard, as in the plans of
torch.distributed.checkpoint, that takes some 150 microseconds per shard (128 ranks with 1,000 tensors: 20 s). Here a
rank sends its regions as columns of numbers ([Note: Region table]); the plan is computed on these columns, and is a
flag per shard. A shard costs about a microsecond. All ranks compute the same plan from the same inventories, so that no
rank has to be told what to write.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fullshard.checkpoint.format.region_table import (
    Flags,
    Numbers,
    RegionTable,
    pack_columns,
    shape_columns,
    unpack_columns,
)
from fullshard.errors import CheckpointError
from fullshard.layout import Region

if TYPE_CHECKING:
    from fullshard.engine.parameters.tensor_shards import TensorShards

__all__ = ["RankInventory", "TensorTable", "WritePlan", "plan_writes"]

_FAST = 1  # of zlib: any level finds what is repeated in names


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

    @property
    def packed(self) -> bytes:
        """Serialized table; equal tables have equal bytes."""
        rows = [self.keys, self.dtypes, self.shapes, self.equal]
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), _FAST)

    @classmethod
    def unpacked(cls, data: bytes) -> TensorTable:
        """Deserialize a table."""
        keys, dtypes, shapes, equal = json.loads(zlib.decompress(data))
        return cls(tuple(keys), tuple(dtypes), tuple(map(tuple, shapes)), tuple(equal))


@dataclass(frozen=True)
class RankInventory:
    """The shards and values that one rank holds, as it sends them to the other ranks.

    Args:
        table: A ``TensorTable.packed``.
        regions: Result of ``packed``.
        values: Keys of values.
    """

    table: bytes
    regions: bytes
    values: tuple[str, ...]

    @classmethod
    def of(cls, entries: Mapping[str, TensorShards | bytes]) -> RankInventory:
        """Return the inventory of what a rank holds: tensors, and serialized values, by key."""
        tensors = {key: entry for key, entry in entries.items() if not isinstance(entry, bytes)}
        regions = [(number, shard.region) for number, held in enumerate(tensors.values()) for shard in held.shards]
        values = tuple(key for key, entry in entries.items() if isinstance(entry, bytes))
        return cls(TensorTable.of(tensors).packed, cls.packed(regions), values)

    @staticmethod
    def packed(regions: Sequence[tuple[int, Region]]) -> bytes:
        """Serialize regions, each with the number of its tensor in the table."""
        return pack_columns(RegionTable.of(regions).columns)


@dataclass(frozen=True)
class WritePlan:
    """Assignment of shards and values to the ranks that write them.

    Args:
        table: Table of all tensors.
        writes: Per rank, a flag for each region that it has sent: True if it writes the region.
        values: Per rank, the keys of the values that it writes.
        regions: The regions with elements that are written, by rank.
        ranks: The rank that writes each of them.
    """

    table: TensorTable
    writes: tuple[Flags, ...]
    values: tuple[tuple[str, ...], ...]
    regions: RegionTable
    ranks: Numbers


def plan_writes(held: Sequence[RankInventory]) -> WritePlan:
    """Assign each region to one rank: if replicas are known to be equal, to the holder with the least to write so far;
    otherwise to the first holder, so that the checkpoint is consistent with a single rank.

    Args:
        held: Inventories by rank.

    Raises:
        CheckpointError: If regions are outside of their tensors, overlap, or do not cover every tensor.
    """
    table, tables = _merge_tables(held)
    shapes = shape_columns(table.shapes)
    regions = RegionTable.concatenated(tables).padded(shapes.shape[1])
    counts = [len(each) for each in tables]
    ranks = np.repeat(np.arange(len(held)), counts)
    chosen = _choose_writers(regions, shapes, ranks, np.array(table.equal, dtype=bool), len(held))
    written = chosen & (regions.numel > 0)
    problem = regions.take(written).find_problem(table.shapes)
    if problem is not None:
        raise CheckpointError(
            f"{table.keys[problem[0]]}: the ranks that save hold {problem[1]}; pass the process_group of all ranks "
            "that the model is sharded over, or None for all ranks"
        )
    values = _first_holders([each.values for each in held])
    writes = tuple(np.split(chosen, np.cumsum(counts)[:-1]))
    return WritePlan(table, writes, tuple(values), regions.take(written), ranks[written])


def _merge_tables(held: Sequence[RankInventory]) -> tuple[TensorTable, list[RegionTable]]:
    """Merge the tables of all ranks, and renumber every rank's regions to the merged table."""
    known: dict[bytes, Numbers] = {}  # by table: numbers in the merged table
    rows: dict[str, tuple[str, tuple[int, ...], bool]] = {}
    numbers: dict[str, int] = {}
    regions = []
    for each in held:
        if each.table not in known:
            own = TensorTable.unpacked(each.table)
            for key, dtype, shape, equal in zip(own.keys, own.dtypes, own.shapes, own.equal, strict=True):
                if key not in rows:  # the first rank that has it
                    rows[key], numbers[key] = (dtype, shape, equal), len(numbers)
                elif len(rows[key][1]) != len(shape):
                    raise CheckpointError(
                        f"{key}: expected the same shape on all ranks, found {rows[key][1]} and {shape}"
                    )
            known[each.table] = np.fromiter((numbers[key] for key in own.keys), dtype=np.int64)
        found = RegionTable.from_columns(unpack_columns(each.regions))
        regions.append(RegionTable(known[each.table][found.tensor], found.offsets, found.sizes))
    of_all = rows.values()
    dtypes, shapes = tuple(row[0] for row in of_all), tuple(row[1] for row in of_all)
    return TensorTable(tuple(rows), dtypes, shapes, tuple(row[2] for row in of_all)), regions


def _choose_writers(regions: RegionTable, shapes: Numbers, ranks: Numbers, equal: Flags, size: int) -> Flags:
    """Return for each region whether the rank that holds it writes it."""
    at = regions.first(shapes)
    order = np.lexsort((ranks, at, regions.tensor))
    tensor, first = regions.tensor[order], at[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (tensor[1:] != tensor[:-1]) | (first[1:] != first[:-1])
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(order))
    spread = (ends - starts > 1) & equal[tensor[starts]]
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[starts[~spread]]] = True
    numel = regions.numel
    loads = np.bincount(ranks[chosen], weights=numel[chosen].astype(np.float64), minlength=size)
    for start, end in zip(starts[spread].tolist(), ends[spread].tolist(), strict=True):
        holders = ranks[order[start:end]]
        place = order[start + int(loads[holders].argmin())]
        chosen[place] = True
        loads[ranks[place]] += numel[place]
    return chosen


def _first_holders(values: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return for each rank the keys that no rank before it has."""
    seen: set[str] = set()
    found = []
    for keys in values:
        own = tuple(key for key in keys if key not in seen)
        seen.update(own)
        found.append(own)
    return found
