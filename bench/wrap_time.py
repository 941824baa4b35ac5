"""Time to wrap a model of many small modules: FullyShardedDataParallel and fully_shard, each beside torch's.

For FullyShardedDataParallel a thousand units, each a 16 x 16 linear layer and a norm, that a ``ModuleWrapPolicy``
finds; for ``fully_shard`` a tenth as many units, of eight parameters each. On a fake process group of 8 ranks on CPU.
All contestants live in this process and take turns; a turn makes a new model (not timed), times the wrapping, then the
first training step of what it made: work that wrapping puts off is in there. Times are CPU time of the thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import (
    COMPOSABLE,
    FSDP2,
    FULLSHARD,
    PEER_WITH_SAME_FLAG,
    WRAPPING,
    distribute,
    fake_group,
    prepare,
)
from bench.models import PARAMETERS_PER_UNIT, SmallUnit, TinyUnit
from bench.report import column
from bench.statistics import paired_spread, spread
from bench.turns import compete

FIGURES = {"constructor": "wrapping", "first_step": "first step", "both": "both together"}
SYSTEMS = (*WRAPPING, *COMPOSABLE)
# Contestant -> what it is measured by, and the key of their ratio.
PEERS = {name: (peer, "ratio_to_fsdp1") for name, peer in PEER_WITH_SAME_FLAG.items()}
PEERS[FULLSHARD] = (FSDP2, "ratio_to_fsdp2")


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    units: int = 1000
    ranks: int = 8
    rounds: int = 7
    warmup_units: int = option(10, "Units of each one's first model, not timed.")
    only: tuple[str, ...] = option((), choices=SYSTEMS)


class Runner:
    """A contestant, with its imports made by a first model."""

    def __init__(self, system: str, options: Options) -> None:
        self.system, self.units = system, options.units
        prepare(system)
        self.wrap(options.warmup_units)

    def turn(self) -> dict[str, float]:
        return self.wrap(self.units)

    def wrap(self, units: int) -> dict[str, float]:
        """Seconds per figure of one new model."""
        torch.manual_seed(0)
        kind = SmallUnit if self.system in COMPOSABLE else TinyUnit
        model: nn.Module = nn.Sequential(*(kind() for _ in range(units_of(self.system, units))))
        inputs = torch.randn(1, kind.width)
        gc.collect()  # what the turn before left behind
        start = time.thread_time()
        wrapped = distribute(self.system, model, kind, torch.device("cpu"))
        made = time.thread_time()
        wrapped(inputs).sum().backward()
        end = time.thread_time()
        return {"constructor": made - start, "first_step": end - made, "both": end - start}


def units_of(system: str, units: int) -> int:
    """``fully_shard`` has a tenth of the units."""
    return max(1, units // 10) if system in COMPOSABLE else units


def summarize(turns: Mapping[str, Sequence[Mapping[str, float]]], units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the time and, if the peer ran, its ratio to the peer's."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in turns}
    for figure in FIGURES:
        seconds = {name: [one[figure] for one in each] for name, each in turns.items()}
        for name, times in seconds.items():
            (peer, key), median = PEERS.get(name, ("", "")), spread(times).median
            entry: dict[str, Any] = {
                "median_seconds": median,
                "median_seconds_per_unit": median / units_of(name, units),
                "seconds": times,
            }
            if peer in seconds:
                entry[key] = paired_spread(times, seconds[peer]).as_json()
            summary[name][figure] = entry
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    columns, rows = [], {}
    for figure, label in FIGURES.items():
        columns.append(column(f"{label}, ms", figure, "median_seconds", spec=".0f", scale=1e3))
        columns.append(column("/ torch's", figure, "ratio"))
    for name, of in summary.items():
        _, key = PEERS.get(name, ("", ""))
        rows[name] = {figure: entry | {"ratio": entry.get(key)} for figure, entry in of.items()}
    return report.table("contestant", rows, columns, failures)


def run(options: Options) -> None:
    """Compare the time that wrapping a model of many small modules takes in fullshard and in torch."""
    with fake_group(options.ranks):
        turns, failures = compete(options.only or SYSTEMS, lambda name: Runner(name, options), options.rounds)
    summary = summarize(turns, options.units)
    paragraphs = [
        f"{options.units} units (linear 16 x 16 and norm) found by a ModuleWrapPolicy, for `fully_shard` "
        f"{units_of(FULLSHARD, options.units)} of {PARAMETERS_PER_UNIT} parameters each; rank 0 of {options.ranks} on "
        f"a fake process group, one thread, its CPU time; {options.rounds} rounds. Ratios are to FSDP1 with the same "
        "flag, and to FSDP2.",
        table(summary, failures),
        *report.could_not_run(failures),
    ]
    figures = {"settings": options.settings, "contestants": summary, "not_run": failures}
    report.publish(options, "wrap_time", figures, paragraphs)
