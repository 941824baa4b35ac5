"""Save in fullshard's own format through torch.distributed.checkpoint, with plans of a few bytes per shard.

See [Note: Write plan]. The planner sends the regions that a rank holds as numbers and receives which of them to write;
the writer sends only the length and checksum of its file, because the first rank knows from the plan what is in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint.format.data_file import WrittenEntry
from fullshard.checkpoint.format.index import Index, TensorEntry, Value, split_by_tensor
from fullshard.checkpoint.format.planner import SavePlanner
from fullshard.checkpoint.format.region_table import shape_columns
from fullshard.checkpoint.format.storage import INDEX_FILE, CheckpointWriter
from fullshard.checkpoint.format.write_plan import RankInventory, TensorTable, WritePlan, plan_writes
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.errors import CheckpointError

__all__ = ["CompactSavePlanner", "CompactWriter", "WriteReport"]


@dataclass(frozen=True)
class _WriteAssignment:
    """The part of the write plan that one rank receives.

    Args:
        writes: A bit for each region that the rank has sent: 1 if the rank writes it.
        values: Keys of the values that the rank writes.
    """

    writes: bytes
    values: tuple[str, ...]


@dataclass(frozen=True)
class _LocalPlan(SavePlan):
    """A save plan whose items stay on this rank: only ``planner_data``, its inventory of shards, is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePlan, ([], self.storage_data, self.planner_data)


@dataclass(frozen=True)
class WriteReport:
    """The file that one rank wrote, sent to the coordinator.

    Args:
        index: The rank.
        written: Its file; None: it wrote none.
    """

    index: int
    written: WrittenEntry | None
    storage_data: None = None  # expected by torch.distributed.checkpoint


class CompactSavePlanner(SavePlanner):
    """Save planner that sends inventories as arrays of numbers. For :class:`CompactWriter` only.

    Args:
        same_tables: All ranks are known to have the same tensors, so that only the first rank sends its table.

    Attributes:
        write_plan: The write plan, on the coordinator.
    """

    write_plan: WritePlan | None
    _same_tables: bool

    def __init__(self, *, same_tables: bool = False) -> None:
        super().__init__()
        self.write_plan, self._same_tables = None, same_tables

    def create_local_plan(self) -> SavePlan:
        """Return this rank's inventory as a plan. Runs on every rank."""
        self.plan = plan = super().create_local_plan()
        tensors = {key: value for key, value in self.state_dict.items() if isinstance(value, TensorShards)}
        table = TensorTable.of(tensors)
        regions = [(number, shard.region) for number, shards in enumerate(tensors.values()) for shard in shards.shards]
        values = tuple(item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
        sent = None if self._same_tables and not self.is_coordinator else table.packed
        return _LocalPlan(plan.items, planner_data=RankInventory(sent, RankInventory.packed(regions), values))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide which rank writes which shards. Runs on the coordinator.

        Raises:
            CheckpointError: If the shards of all ranks do not cover every tensor.
        """
        self.write_plan = write_plan = plan_writes([plan.planner_data for plan in all_plans])
        decided = zip(write_plan.writes, write_plan.values, strict=True)
        assignments = [_WriteAssignment(np.packbits(writes).tobytes(), values) for writes, values in decided]
        plans = [
            SavePlan([], storage_data=plan.storage_data, planner_data=assignment)
            for plan, assignment in zip(all_plans, assignments, strict=True)
        ]
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the items of the local plan that this rank is assigned to write. Runs on every rank."""
        assignment: _WriteAssignment = new_plan.planner_data
        bits = np.unpackbits(np.frombuffer(assignment.writes, dtype=np.uint8)).tolist()
        tensors = [item for item in self.plan.items if item.type is not WriteItemType.BYTE_IO]
        values = [
            item
            for item in self.plan.items
            if item.type is WriteItemType.BYTE_IO and item.index.fqn in assignment.values
        ]
        items = [item for item, bit in zip(tensors, bits, strict=False) if bit] + values
        return replace(new_plan, items=items)


class CompactWriter(CheckpointWriter):
    """Storage writer for :class:`CompactSavePlanner`: the index is made from the write plan.

    Args:
        path: As in :class:`CheckpointWriter`.
        planner: Planner of this save.
        aliases: As in :class:`CheckpointWriter`.
        about: As in :class:`CheckpointWriter`.
        ranks: As in :class:`CheckpointWriter`.
    """

    _planner: CompactSavePlanner

    def __init__(
        self,
        path: str | os.PathLike[str],
        planner: CompactSavePlanner,
        *,
        aliases: Mapping[str, str],
        about: Mapping[str, Any],
        ranks: int,
    ) -> None:
        super().__init__(path, aliases=aliases, about=about, ranks=ranks, returns_metadata=False)
        self._planner = planner

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file. Runs on every rank."""
        results = super().write_data(plan, planner).value()
        report: Any = WriteReport(self._rank, results[0].storage_data if results else None)
        reports: Future[list[WriteResult]] = Future()
        reports.set_result([report])
        return reports

    def _index(self, metadata: Metadata, results: list[Any]) -> Index:
        plan = self._planner.write_plan
        assert plan is not None
        reports: list[WriteReport] = sorted(results, key=lambda report: report.index)
        files = {report.written.name: report.written.file for report in reports if report.written is not None}
        names = list(files)
        if [report.index for report in reports if report.written is not None] != [
            rank for rank, number in enumerate(plan.files) if number >= 0
        ]:
            raise CheckpointError(f"{self.folder.path}: ranks have written other files than planned")
        order = np.lexsort((plan.regions.first(shape_columns(plan.table.shapes)), plan.regions.tensor))
        numbers = np.array(plan.files, dtype=np.int64)[plan.ranks[order]]
        shards = split_by_tensor(plan.table.shapes, plan.regions.take(order), numbers, names)
        rows = zip(plan.table.keys, plan.table.dtypes, plan.table.shapes, shards, strict=True)
        tensors = {key: TensorEntry(dtype, shape, found) for key, dtype, shape, found in rows}
        values = {
            key: Value(names[number]) for keys, number in zip(plan.values, plan.files, strict=True) for key in keys
        }
        where = self.folder.where(INDEX_FILE)
        return Index(where, tensors, values, files, self._aliases, self._about, self._save)
