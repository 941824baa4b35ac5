"""Saving in fullshard's own format: torch.distributed.checkpoint's steps, with little for ranks to tell each other.

See [Note: Division]. The planner sends what a rank holds as numbers and gets back which of it to write; the writer
sends what the index is to say of this rank's file, as text, and the first rank puts these texts together.
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

from fullshard.checkpoint.data_file import Written
from fullshard.checkpoint.division import Division, Held, TensorTable, divide
from fullshard.checkpoint.index import FileEntry, Index
from fullshard.checkpoint.index_json import WrittenIndex, piece_text, value_text
from fullshard.checkpoint.pieces import Pieces
from fullshard.checkpoint.planner import SavePlanner
from fullshard.checkpoint.storage import INDEX_FILE, CheckpointWriter
from fullshard.layout import Box

__all__ = ["DividingPlanner", "DividingWriter"]


@dataclass(frozen=True)
class _Answer:
    """What a rank is to do.

    Args:
        parts: A bit for each of the boxes that it has sent: whether it writes it.
        values: Keys of what it writes that is no tensor.
        file: The number of its file.
    """

    parts: bytes
    values: tuple[str, ...]
    file: int


@dataclass(frozen=True)
class _LocalPlan(SavePlan):
    """A plan whose items stay where they are: what is sent is ``planner_data``, what this rank holds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePlan, ([], self.storage_data, self.planner_data)


@dataclass(frozen=True)
class _Report:
    """What a rank has written.

    Args:
        index: The rank.
        name: Of its file; empty: it has none.
        file: That file.
        pieces: Of each box, in the order in which the rank has sent them, the text for the index; as one line each.
        values: The same by key of what is no tensor.
    """

    index: int
    name: str
    file: FileEntry
    pieces: bytes
    values: tuple[tuple[str, str], ...]
    storage_data: None = None  # what torch.distributed.checkpoint's writers have in its place

    @property
    def lines(self) -> list[str]:
        """The texts of the boxes."""
        return zlib.decompress(self.pieces).decode().splitlines()


class DividingPlanner(SavePlanner):
    """As its base; what ranks write is decided from numbers. For :class:`DividingWriter` only.

    Args:
        alike: Whether all ranks are known to have the same tensors, so that the first rank's table is enough.

    Attributes:
        division: Who writes what, on the rank that has decided it.
        file: The number of this rank's file, once that is decided.
    """

    division: Division | None
    file: int
    _alike: bool

    def __init__(self, *, alike: bool = False) -> None:
        super().__init__()
        self.division, self.file, self._alike = None, -1, alike

    def create_local_plan(self) -> SavePlan:
        """Called on every rank."""
        self.plan = plan = super().create_local_plan()
        tensors = {key: value for key, value in self.state_dict.items() if isinstance(value, Pieces)}
        table = TensorTable.of(tensors)
        boxes = [(number, piece.box) for number, pieces in enumerate(tensors.values()) for piece in pieces.pieces]
        values = tuple(item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
        sent = None if self._alike and not self.is_coordinator else table.packed
        return _LocalPlan(plan.items, planner_data=Held(sent, Held.packed(boxes), values))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Called on the coordinator.

        Raises:
            CheckpointError: If what ranks hold is not all of every tensor.
        """
        self.division = division = divide([plan.planner_data for plan in all_plans])
        decided = zip(division.parts, division.values, division.files, strict=True)
        answers = [_Answer(np.packbits(parts).tobytes(), values, file) for parts, values, file in decided]
        plans = [
            SavePlan([], storage_data=plan.storage_data, planner_data=answer)
            for plan, answer in zip(all_plans, answers, strict=True)
        ]
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Called on every rank: those of its items that it is to write."""
        answer: _Answer = new_plan.planner_data
        self.file = answer.file
        bits = np.unpackbits(np.frombuffer(answer.parts, dtype=np.uint8)).tolist()
        tensors = [item for item in self.plan.items if item.type is not WriteItemType.BYTE_IO]
        values = [
            item for item in self.plan.items if item.type is WriteItemType.BYTE_IO and item.index.fqn in answer.values
        ]
        items = [item for item, bit in zip(tensors, bits, strict=False) if bit] + values
        return replace(new_plan, items=items)


class DividingWriter(CheckpointWriter):
    """As its base, for :class:`DividingPlanner`: each rank writes its lines of the index itself.

    Args:
        path: As for the base.
        planner: Of this save.
        aliases: As for the base.
        about: As for the base.
        ranks: As for the base.
    """

    _planner: DividingPlanner

    def __init__(
        self,
        path: str | os.PathLike[str],
        planner: DividingPlanner,
        *,
        aliases: Mapping[str, str],
        about: Mapping[str, Any],
        ranks: int,
    ) -> None:
        super().__init__(path, aliases=aliases, about=about, ranks=ranks, returns_metadata=False)
        self._planner = planner

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Called on every rank: write its data file, and describe it for the index."""
        written = {result.index: result.storage_data for result in super().write_data(plan, planner).value()}
        report: Any = self._report(plan.items, written)
        reports: Future[list[WriteResult]] = Future()
        reports.set_result([report])
        return reports

    def _report(self, items: list[WriteItem], written: Mapping[MetadataIndex, Written]) -> _Report:
        number = self._planner.file
        pieces, values = [], []
        for item in items:
            place = written.get(item.index)
            if place is None:  # a part without elements
                continue
            stored = (number, place.start, place.checksums)
            if item.tensor_data is None:
                values.append((item.index.fqn, value_text(stored, place.length)))
            else:
                chunk = item.tensor_data.chunk
                pieces.append(piece_text(Box(tuple(chunk.offsets), tuple(chunk.sizes)), stored))
        one = next(iter(written.values()), None)
        name, file = ("", FileEntry(0)) if one is None else (one.name, one.file)
        return _Report(self._rank, name, file, zlib.compress("\n".join(pieces).encode(), 1), tuple(values))

    def _index(self, metadata: Metadata, results: list[Any]) -> Index:
        division = self._planner.division
        assert division is not None
        reports: list[_Report] = results
        table = division.table
        pieces: list[list[str]] = [[] for _ in table.keys]
        values: dict[str, str] = {}
        files: dict[str, FileEntry] = {}
        for report in sorted(reports, key=lambda report: report.index):
            for tensor, line in zip(division.tensors[report.index].tolist(), report.lines, strict=True):
                pieces[tensor].append(line)
            values.update(report.values)
            if report.name:
                files[report.name] = report.file
        rows = zip(table.dtypes, table.shapes, pieces, strict=True)
        texts = [f"[[],{json.dumps(dtype)},{_numbers(shape)},[{','.join(of)}]]" for dtype, shape, of in rows]
        where = self.folder.where(INDEX_FILE)
        lines = dict(zip(table.keys, texts, strict=True))
        return WrittenIndex(
            where, {}, {}, files, self._aliases, self._about, self._save, lines=lines, value_lines=values
        )


def _numbers(shape: tuple[int, ...]) -> str:
    return json.dumps(shape, separators=(",", ":"))
