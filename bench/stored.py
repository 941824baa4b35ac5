"""The stored results: the newest of each measurement, and of what commit and machine most of them are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.environment import Environment

DIRTY = "with changes"  # ends a commit in whose tree something had changed


class Source(NamedTuple):
    """What a result was measured with and on."""

    commit: str
    machine: str


@dataclass(frozen=True)
class StoredResult:
    """A result and its file."""

    path: Path
    result: Mapping[str, Any]

    @property
    def environment(self) -> Environment:
        return Environment(**self.result["environment"])

    @property
    def name(self) -> str:
        """Of the measurement: that of the file, without the machine."""
        return self.path.stem.removesuffix(f"_{self.environment.name}")

    @property
    def source(self) -> Source:
        environment = self.environment
        return Source(environment.commit, environment.device or environment.cpu)


Results = Mapping[str, StoredResult]  # by name


def newest(folder: Path) -> dict[str, StoredResult]:
    """The results of a folder, of several machines the latest; withdrawn ones and those with wrong values left out."""
    found: dict[str, StoredResult] = {}
    for path in sorted(folder.glob("*.json")):
        each = StoredResult(path, json.loads(path.read_text(encoding="utf-8")))
        if any(each.result.get(key) for key in ("wrong", "withdrawn", "losses_that_disagree")):
            continue
        other = found.get(each.name)
        if other is None or each.environment.date >= other.environment.date:
            found[each.name] = each
    return found


def common_source(results: Results) -> Source | None:
    """Of the most results on CPUs, clean ones if there are any; None if there are none."""
    sources = [each.source for each in results.values() if each.environment.device is None]
    clean = [source for source in sources if not source.commit.endswith(DIRTY)]
    counted = Counter(clean or sources).most_common(1)
    return counted[0][0] if counted else None


def oddness(source: Source, common: Source | None) -> list[str]:
    """What a reader has to know if it is not from the commit and the machine of most results; empty if it is."""
    odd = ["with uncommitted changes"] if source.commit.endswith(DIRTY) else []
    if common is not None:
        odd += ["of another commit than most tables"] if source.commit.split()[0] != common.commit.split()[0] else []
        odd += ["of another machine than most tables"] if source.machine != common.machine else []
    return odd
