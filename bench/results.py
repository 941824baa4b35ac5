"""Results as JSON: one file for each measurement and kind of machine, and which of them the pages are written from.

A result has ``benchmark``, ``environment`` and what was measured; one with a block of its own on a page has ``page``,
too: ``document``, ``marker``, ``title`` and ``paragraphs``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.command_line import Options
from bench.environment import DIRTY, Environment, current_environment


class Source(NamedTuple):
    """What a result was measured with and on."""

    commit: str
    machine: str


@dataclass(frozen=True)
class StoredResult:
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
        return Source(self.environment.commit, self.environment.machine)


Results = Mapping[str, StoredResult]  # by name


def store(options: Options, benchmark: str, figures: Mapping[str, object], *parts: object) -> StoredResult:
    """Write the figures as JSON, named after the benchmark, ``parts`` and this kind of machine."""
    environment = current_environment()
    path = options.results / f"{'_'.join(map(str, (benchmark, *parts)))}_{environment.name}.json"
    result = {"benchmark": benchmark, "environment": asdict(environment), **figures}
    write_json(path, result)
    print(f"wrote {path.name}", flush=True)
    return StoredResult(path, result)


def write_json(path: Path, result: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with NaN and infinities, which JSON does not know, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def newest(folder: Path) -> dict[str, StoredResult]:
    """The results of a folder, so that pages are of one machine where they can be: of several that machine's which has
    the most, else the latest; withdrawn ones and those with wrong values left out."""
    files = sorted(folder.glob("*.json"))
    stored = [StoredResult(path, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    wrong = ("wrong", "withdrawn", "losses_that_disagree")
    right = [each for each in stored if not any(each.result.get(key) for key in wrong)]
    main = _main_machine(right)
    return {each.name: each for each in sorted(right, key=lambda e: (e.source.machine == main, e.environment.date))}


def _main_machine(results: Iterable[StoredResult]) -> str | None:
    """Which has the most results on CPUs, of several the one that measured last; None if there are none."""
    dates: dict[str, list[str]] = {}
    for each in results:
        if each.environment.device is None:
            dates.setdefault(each.source.machine, []).append(each.environment.date)
    return max(dates, key=lambda machine: (len(dates[machine]), max(dates[machine])), default=None)


def of_one_machine(results: Results) -> dict[str, StoredResult]:
    """Those of the machine that has the most, and of accelerators: what a sentence may set side by side."""
    main = _main_machine(results.values())
    return {name: each for name, each in results.items() if each.environment.device or each.source.machine == main}


def common_source(results: Results) -> Source | None:
    """Of the most results on the main machine, clean ones if there are any; None if there are none."""
    sources = [each.source for each in of_one_machine(results).values() if each.environment.device is None]
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
