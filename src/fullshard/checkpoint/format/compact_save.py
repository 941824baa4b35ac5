"""Save in fullshard's own format through torch.distributed.checkpoint, with plans of a few bytes per shard.

See [Note: Write plan]. The planner sends the regions that a rank holds as numbers and receives which of them to write;
the writer sends the index lines of this rank's file as text, and the first rank joins them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint.format.data_file import WrittenEntry
from fullshard.checkpoint.format.index import FileEntry, Index
from fullshard.checkpoint.format.index_json import WrittenIndex, shard_text, value_text
from fullshard.checkpoint.format.planner import SavePlanner
from fullshard.checkpoint.format.storage import INDEX_FILE, CheckpointWriter
from fullshard.checkpoint.format.write_plan import RankInventory, TensorTable, WritePlan, plan_writes
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.layout import Region

__all__ = ["CompactSavePlanner", "CompactWriter"]


@dataclass(frozen=True)
class _WriteAssignment:
    """The part of the write plan that one rank receives.

    Args:
        writes: A bit for each region that the rank has sent: 1 if the rank writes it.
        values: Keys of the values that the rank writes.
        file: Number of its file.
    """

    writes: bytes
    values: tuple[str, ...]
    file: int


@dataclass(frozen=True)
class _LocalPlan(SavePlan):
    """A save plan whose items stay on this rank: only ``planner_data``, its inventory of shards, is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePlan, ([], self.storage_data, self.planner_data)


@dataclass(frozen=True)
class _WriteReport:
    """Files and index lines that one rank wrote, sent to the coordinator.

    Args:
        index: The rank.
        name: Name of its file; empty: it wrote none.
        file: The file.
        shards: Compressed index lines of its shards, in the order in which the rank has sent them.
        values: Key and index line of each value.
    """

    index: int
    name: str
    file: FileEntry
    shards: bytes
    values: tuple[tuple[str, str], ...]
    storage_data: None = None  # expected by torch.distributed.checkpoint

    @property
    def lines(self) -> list[str]:
        """JSON text of each shard that was written."""
        return zlib.decompress(self.shards).decode().splitlines()


class CompactSavePlanner(SavePlanner):
    """Save planner that sends inventories as arrays of numbers. For :class:`CompactWriter` only.

    Args:
        same_tables: All ranks are known to have the same tensors, so that only the first rank sends its table.

    Attributes:
        write_plan: The write plan, on the coordinator.
        file: Number of this rank's file, once the plan is made.
    """

    write_plan: WritePlan | None
    file: int
    _same_tables: bool

    def __init__(self, *, same_tables: bool = False) -> None:
        super().__init__()
        self.write_plan, self.file, self._same_tables = None, -1, same_tables

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
        decided = zip(write_plan.writes, write_plan.values, write_plan.files, strict=True)
        assignments = [
            _WriteAssignment(np.packbits(writes).tobytes(), values, file) for writes, values, file in decided
        ]
        plans = [
            SavePlan([], storage_data=plan.storage_data, planner_data=assignment)
            for plan, assignment in zip(all_plans, assignments, strict=True)
        ]
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the items of the local plan that this rank is assigned to write. Runs on every rank."""
        assignment: _WriteAssignment = new_plan.planner_data
        self.file = assignment.file
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
    """Storage writer for :class:`CompactSavePlanner`: each rank writes its own lines of the index.

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
        """Write this rank's data file and describe it for the index. Runs on every rank."""
        written = {result.index: result.storage_data for result in super().write_data(plan, planner).value()}
        report: Any = self._report(plan.items, written)
        reports: Future[list[WriteResult]] = Future()
        reports.set_result([report])
        return reports

    def _report(self, items: list[WriteItem], written: Mapping[MetadataIndex, WrittenEntry]) -> _WriteReport:
        number = self._planner.file
        shards, values = [], []
        for item in items:
            place = written.get(item.index)
            if place is None:  # a shard without elements
                continue
            stored = (number, place.start, place.checksums)
            if item.tensor_data is None:
                values.append((item.index.fqn, value_text(stored, place.length)))
            else:
                chunk = item.tensor_data.chunk
                shards.append(shard_text(Region(tuple(chunk.offsets), tuple(chunk.sizes)), stored))
        one = next(iter(written.values()), None)
        name, file = ("", FileEntry(0)) if one is None else (one.name, one.file)
        return _WriteReport(self._rank, name, file, zlib.compress("\n".join(shards).encode(), 1), tuple(values))

    def _index(self, metadata: Metadata, results: list[Any]) -> Index:
        write_plan = self._planner.write_plan
        assert write_plan is not None
        reports: list[_WriteReport] = results
        table = write_plan.table
        shards: list[list[str]] = [[] for _ in table.keys]
        values: dict[str, str] = {}
        files: dict[str, FileEntry] = {}
        for report in sorted(reports, key=lambda report: report.index):
            for tensor, line in zip(write_plan.tensors[report.index].tolist(), report.lines, strict=True):
                shards[tensor].append(line)
            values.update(report.values)
            if report.name:
                files[report.name] = report.file
        rows = zip(table.dtypes, table.shapes, shards, strict=True)
        texts = [f"[[],{json.dumps(dtype)},{_numbers(shape)},[{','.join(of)}]]" for dtype, shape, of in rows]
        where = self.folder.where(INDEX_FILE)
        lines = dict(zip(table.keys, texts, strict=True))
        return WrittenIndex(
            where, {}, {}, files, self._aliases, self._about, self._save, lines=lines, value_lines=values
        )


def _numbers(shape: tuple[int, ...]) -> str:
    return json.dumps(shape, separators=(",", ":"))
