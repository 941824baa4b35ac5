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
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import PEER_WITH_SAME_FLAG, WRAPPING, distribute, fake_group, prepare
from bench.models import TinyUnit, tiny_units
from bench.report import column
from bench.statistics import paired_spread, spread
from bench.turns import compete

TITLE = "Time to wrap"
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


class Runner:
    """A contestant, with its imports and caches made by a first model."""

    def __init__(self, system: str, options: Options) -> None:
        self.system, self.units = system, options.units
        prepare(system)
        self.wrap(options.warmup_units)

    def turn(self) -> dict[str, float]:
        return self.wrap(self.units)

    def wrap(self, units: int) -> dict[str, float]:
        """Seconds per figure of one new model."""
        torch.manual_seed(0)
        model = tiny_units(units)
        inputs = torch.randn(1, model[0].linear.in_features)
        gc.collect()  # what the turn before left behind
        start = time.perf_counter()
        wrapped = distribute(self.system, model, TinyUnit, torch.device("cpu"))
        made = time.perf_counter()
        wrapped(inputs).sum().backward()
        end = time.perf_counter()
        return {"constructor": made - start, "first_step": end - made, "both": end - start}


def summarize(turns: Mapping[str, Sequence[Mapping[str, float]]], units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the time and, if the peer ran, its ratio to FSDP1's with the same flag."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in turns}
    for figure in FIGURES:
        seconds = {name: [one[figure] for one in each] for name, each in turns.items()}
        for name, times in seconds.items():
            peer, median = PEER_WITH_SAME_FLAG.get(name), spread(times).median
            entry: dict[str, Any] = {
                "median_seconds": median,
                "median_seconds_per_unit": median / units,
                "seconds": times,
            }
            if peer in seconds:
                entry["ratio_to_fsdp1"] = paired_spread(times, seconds[peer]).as_json()
            summary[name][figure] = entry
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    columns = []
    for figure, label in FIGURES.items():
        columns.append(column(f"{label}, ms", figure, "median_seconds", spec=".0f", scale=1e3))
        columns.append(column("/ FSDP1 with the same flag", figure, "ratio_to_fsdp1"))
    return report.table("contestant", summary, columns, failures)


def verdicts(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per wrapper of fullshard: its constructor's ratio, and whether it meets the target."""
    found = {name: figures["constructor"].get("ratio_to_fsdp1") for name, figures in summary.items()}
    return [report.verdict(f"constructor, {name}:", each["median"], TARGET) for name, each in found.items() if each]


def panels(summary: Mapping[str, Any]) -> list[report.Bars]:
    """A panel per figure."""
    return report.bars(summary, {f"{label} / FSDP1": (key, "ratio_to_fsdp1") for key, label in FIGURES.items()})


def run(options: Options) -> None:
    """Compare the time that wrapping a model of many small modules takes in fullshard and in FSDP1."""
    with fake_group(options.ranks):
        turns, failures = compete(options.only or WRAPPING, lambda name: Runner(name, options), options.rounds)
    summary = summarize(turns, options.units)
    paragraphs = [
        f"{options.units} units (linear 16 x 16 and norm) found by a ModuleWrapPolicy, rank 0 of "
        f"{options.ranks} on a fake process group, one thread; {options.rounds} rounds.",
        table(summary, failures),
        *report.against_targets(verdicts(summary)),
        *report.could_not_run(failures),
    ]
    report.publish(
        options,
        "wrap_time",
        {"settings": options.settings, "contestants": summary, "not_run": failures},
        paragraphs,
        title=TITLE,
        panels=panels(summary),
    )
