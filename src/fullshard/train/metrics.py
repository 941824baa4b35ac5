"""`metrics.jsonl`: one JSON object per line, written as the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Record = dict[str, Any]


def bits(nats: float) -> float:
    """A cross-entropy in nats per byte as bits per byte."""
    return nats / math.log(2)


class MetricsFile:
    """Appends records to a file and flushes each, so that an interrupted run keeps what it measured."""

    _file: TextIO

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record as a line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of a `metrics.jsonl`, in order; a torn last line is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
