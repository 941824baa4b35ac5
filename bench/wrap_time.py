"""Time to wrap a model of a thousand small modules, fullshard's FullyShardedDataParallel beside torch FSDP1.

A thousand units, each a 16 x 16 linear layer and a norm, that a ``ModuleWrapPolicy`` finds, on a fake process group
of 8 ranks on CPU. All contestants live in this process and take turns; a turn makes a new model (not timed), times
the constructor, then the first training step of what it made: work that a constructor puts off is in there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import PEER_WITH_SAME_FLAG, WRAPPING, distribute, fake_group, prepare
from bench.models import TinyUnit, tiny_units
from bench.report import spread_cell, spread_of
from bench.statistics import Spread, paired_spread, spread
from bench.turns import each_that_runs, take_turns

FIGURES = {"constructor": "constructor", "first_step": "first step", "both": "both together"}
# What the constructor may take of FSDP1's with the same flag.
TARGET = 0.50


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All wrappers."""

    units: int = 1000
    ranks: int = 8
    rounds: int = 7
    warmup_units: int = option(10, "Units of each one's first model, not timed.")
    only: tuple[str, ...] = option((), choices=tuple(WRAPPING))


def turn(system: str, units: int) -> dict[str, float]:
    """Seconds per figure of one new model."""
    torch.manual_seed(0)
    model = tiny_units(units)
    inputs = torch.randn(1, model[0].linear.in_features)
    gc.collect()  # what the turn before left behind
    start = time.perf_counter()
    wrapped = distribute(system, model, TinyUnit, torch.device("cpu"))
    made = time.perf_counter()
    wrapped(inputs).sum().backward()
    end = time.perf_counter()
    return {"constructor": made - start, "first_step": end - made, "both": end - start}


def compete(options: Options) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds per contestant, figure and round; the second value says why a contestant has none."""

    def warm_up(system: str) -> None:
        prepare(system)
        turn(system, options.warmup_units)  # imports, caches

    able, failures = each_that_runs(options.only or WRAPPING, warm_up)
    turns = take_turns({system: partial(turn, system, options.units) for system in able}, options.rounds)
    return {
        name: {figure: [one[figure] for one in each] for figure in FIGURES} for name, each in turns.items()
    }, failures


def summarise(seconds: Mapping[str, Mapping[str, Sequence[float]]], units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the time and, if the peer ran, its ratio to FSDP1's with the same flag."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in seconds}
    for name, times in seconds.items():
        peer = PEER_WITH_SAME_FLAG.get(name)
        for figure in FIGURES:
            mine = spread(times[figure])
            entry: dict[str, Any] = {
                "median_seconds": mine.median,
                "median_seconds_per_unit": mine.median / units,
                "seconds": list(times[figure]),
            }
            if peer is not None and peer in seconds:
                entry["ratio_to_fsdp1"] = paired_spread(times[figure], seconds[peer][figure]).as_json()
            summary[name][figure] = entry
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    header = ["contestant"]
    for label in FIGURES.values():
        header += [f"{label}, ms", "/ FSDP1 with the same flag"]
    rows = []
    for name, figures in summary.items():
        row = [name]
        for figure in FIGURES:
            entry = figures[figure]
            row += [f"{1e3 * entry['median_seconds']:.0f}", spread_cell(entry.get("ratio_to_fsdp1"))]
        rows.append(row)
    return report.markdown_table(header, rows, failures)


def verdicts(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per wrapper of fullshard: its constructor's ratio, and whether it meets the target."""
    found = {name: figures["constructor"].get("ratio_to_fsdp1") for name, figures in summary.items()}
    return [report.verdict(f"constructor, {name}:", each["median"], TARGET) for name, each in found.items() if each]


def bars(summary: Mapping[str, Mapping[str, Any]]) -> list[report.Panel]:
    """Fullshard's wrappers, a panel per figure."""
    panels = []
    for figure, label in FIGURES.items():
        found = {name: spread_of(figures[figure].get("ratio_to_fsdp1")) for name, figures in summary.items()}
        values: dict[str, float | Spread] = {name: value for name, value in found.items() if value is not None}
        panels.append(report.Panel(f"{label} / FSDP1", values, 1.0))
    return panels


def run(options: Options) -> None:
    """Compare the time that wrapping a model of many small modules takes in fullshard and in FSDP1."""
    with fake_group(options.ranks):
        seconds, failures = compete(options)
    summary = summarise(seconds, options.units)
    paragraphs = [
        f"{options.units} units (linear 16 x 16 and norm) found by a ModuleWrapPolicy, rank 0 of "
        f"{options.ranks} on a fake process group, one thread; {options.rounds} rounds.",
        table(summary, failures),
        *report.against_targets(verdicts(summary)),
        *report.could_not_run(failures),
    ]
    title = f"Wrapping {options.units} modules (whiskers: quartiles)"
    report.publish(
        options,
        "wrap_time",
        {"settings": options.settings, "contestants": summary, "not_run": failures},
        paragraphs,
        draw=lambda path: report.plot_bars(path, title, bars(summary)),
        image_text="Time to wrap",
    )
