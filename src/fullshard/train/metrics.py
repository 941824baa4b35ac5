"""`metrics.jsonl`: one JSON object per line, written during the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from fullshard.train.atomic_file import replace_text

Record = dict[str, Any]


def bits(nats: float) -> float:
    """Convert a cross-entropy in nats per byte to bits per byte."""
    return nats / math.log(2)


class MetricsFile:
    """Appends records to a file and flushes each, so that an interrupted run keeps its records."""

    _file: TextIO

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record as a line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush the records to disk: a checkpoint must not exist without the records before it."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Return all records of a `metrics.jsonl`, in order; a torn last line is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def write_metrics(path: Path, records: Sequence[Record]) -> None:
    """Replace the content of a `metrics.jsonl` by `records`, atomically."""
    replace_text(path, "".join(json.dumps(record) + "\n" for record in records))


def up_to(records: Sequence[Record], step: int, *, validated: bool) -> list[Record]:
    """Return the records of a run up to optimizer step `step`.

    Args:
        records: in order.
        step: records of later steps are left out.
        validated: whether a validation after `step` is behind the run; if not, its record is left out too.
    """
    last_validation = step if validated else step - 1
    return [r for r in records if r["step"] <= (step if r["kind"] == "train" else last_validation)]


def last_step(path: Path) -> int:
    """Return the last optimizer step in a `metrics.jsonl`; 0 if there is none, or no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # torn at its end, or at its start by the seek
            continue
    return 0
