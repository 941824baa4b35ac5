"""The plots of all stored results, drawn again from their JSON without a measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import host_cost, report, wrap_time
from bench.checkpoint import report as checkpoint
from bench.command_line import Options as SharedOptions
from bench.memory_limit import driver as memory_limit
from bench.muon import driver as muon
from bench.overlap import driver as overlap
from bench.scaling import driver as scaling
from bench.training import modes, page, step, wrapper

# Whose plot has one file of results.
TITLES = {
    "host_cost": host_cost.TITLE,
    "wrap_time": wrap_time.TITLE,
    "memory_limit": memory_limit.TITLE,
    "muon": muon.TITLE,
    "overlap": overlap.TITLE,
    "scaling": scaling.TITLE,
}
# Whose plot has all measurements of a width.
TRAINING = {each.name: each for each in (step.STEP, modes.BENCHMARK, wrapper.BENCHMARK)}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All that are in the folder of results."""


def panels_of(result: Mapping[str, Any]) -> list[Any]:
    """Of a result with a plot of its own; none if it lacks the figures, as results of earlier versions do."""
    found: Mapping[str, Any] = result.get("contestants", {})
    match result["benchmark"]:
        case "host_cost":
            direct = result.get("direct", {}).get("contestants", {})
            return [*host_cost.panels(found), *host_cost.panels(direct, f", {host_cost.DIRECT}")]
        case "wrap_time":
            return list(wrap_time.panels(found))
        case "muon":
            return list(muon.panels(found))
        case "memory_limit":
            return list(memory_limit.panels(result["cells"]))
        case "overlap":
            return list(overlap.curves(result["cells"]))
        case "scaling":
            return list(scaling.curves(result["costs"]))
        case "checkpoint":
            return list(checkpoint.panels(result))
    return []


def run(options: Options) -> None:
    """Redraw; results with wrong values, and withdrawn ones, are left alone."""
    for path in sorted(options.results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        image = _training(result, path) if result["benchmark"] in TRAINING else _own(result, path)
        if image is not None:
            print(f"wrote {image.name}", flush=True)


def _own(result: Mapping[str, Any], path: Path) -> Path | None:
    name = result["benchmark"]
    title = f"Checkpoints at width {result['settings']['width']}" if name == "checkpoint" else TITLES.get(name)
    if title is None or result.get("wrong") or result.get("withdrawn"):
        return None
    return report.plot(path.with_suffix(".png"), title, panels_of(result))


def _training(result: Mapping[str, Any], path: Path) -> Path | None:
    """The plot of a benchmark and width, drawn with the first of its measurements."""
    benchmark, width = TRAINING[result["benchmark"]], result["settings"]["width"]
    found = re.search(rf"_{width}_(.+)\.json$", path.name)
    if found is None:
        return None
    results = page.latest_results(benchmark, path.parent, width, found[1])
    if result != next(iter(results.values()), None):
        return None
    return page.draw(benchmark, results, path.parent, width, found[1])[0]
