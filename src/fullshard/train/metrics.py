"""`metrics.jsonl`: one JSON object per line, written during the run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.train.run_folder import replace_text

Record = dict[str, Any]


def bits(nats: float) -> float:
    """Convert a cross-entropy in nats per byte to bits per byte."""
    return nats / math.log(2)


def read_metrics(path: Path) -> list[Record]:
    """Return all records of a `metrics.jsonl`, in order, up to a torn line; none if there is no such file."""
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def write_metrics(path: Path, records: Sequence[Record]) -> None:
    """Replace the content of a `metrics.jsonl` by `records`, atomically."""
    replace_text(path, "".join(json.dumps(record) + "\n" for record in records))


def up_to(records: Sequence[Record], step: int, steps: int) -> list[Record]:
    """Return the records of a run up to optimizer step `step`, when it resumes there.

    Args:
        records: in order.
        step: records of later steps are left out.
        steps: of the whole run; the final validation after them is left out, as it will be repeated.
    """
    return [r for r in records if r["step"] <= step and (r["kind"] != "final_validation" or r["step"] < steps)]
