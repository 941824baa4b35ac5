"""Host time that sharding adds per unit and step, on a fake process group of 8 ranks on CPU.

A hundred units, each a 16 x 16 linear layer and a norm, at batch 1: the arithmetic costs next to nothing and
c10d's fake process group only copies a shard to each rank's part of the output, eight here, for all contestants. So the
time beyond the plain model's step is the library's own, and these copies. All contestants live in this process and take
turns. Two figures: forward and backward alone, and the whole step with AdamW, where it also matters what kind of
tensors the optimizer is given.

``fsdp1-flat`` and ``fullshard-wrapper-flat`` are wrappers with ``use_orig_params=False``, ``fsdp1`` and
``fullshard-wrapper`` with True; fullshard's are measured by FSDP1 with the same flag. A flat optimizer has fewer
tensors than the plain model's, which can hide all of the host cost in the second figure.

Host cost per unit = (step - plain step) / units, both medians of the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import (
    FSDP1,
    FSDP1_FLAT,
    FSDP2,
    FULLSHARD,
    PEER_WITH_SAME_FLAG,
    UNSHARDED,
    WRAPPER,
    WRAPPER_FLAT,
    distribute,
    fake_group,
)
from bench.models import TinyUnit, tiny_units
from bench.report import column
from bench.statistics import paired_spread, spread
from bench.turns import compete

TITLE = "Host time per unit"
PLAIN = UNSHARDED
SYSTEMS = (PLAIN, FSDP1, FSDP1_FLAT, FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT)
FIGURES = {"forward_backward": "forward + backward", "step": "with optimizer step"}
# What the wrapper may cost of FSDP1 with the same flag, forward and backward.
WRAPPER_TARGET = 0.50
# What fully_shard may cost of FSDP2, with the optimizer.
STEP_TARGET = 0.30

Turns = Mapping[str, Sequence[Mapping[str, float]]]  # seconds by contestant, round and figure


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All systems."""

    units: int = 100
    ranks: int = 8
    rounds: int = 20
    steps_per_round: int = 5
    warmup_steps: int = 3
    only: tuple[str, ...] = option((), choices=SYSTEMS)


class Runner:
    """One contestant's model and optimizer, warmed up."""

    def __init__(self, system: str, options: Options, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device, self.steps = torch.device(device), options.steps_per_round
        model = tiny_units(options.units).to(self.device)
        self.inputs = torch.randn(1, model[0].linear.in_features).to(self.device)
        self.model: nn.Module = distribute(system, model, TinyUnit, self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(options.warmup_steps):
            self.step()

    def step(self) -> tuple[float, float]:
        """Seconds until the end of backward, and until the end of the step (gradients cleared): the host's, which on an
        accelerator does not wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        start = time.perf_counter()
        self.model(self.inputs).sum().backward()
        after_backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return after_backward - start, time.perf_counter() - start

    def turn(self) -> dict[str, float]:
        """Medians of both times over some steps."""
        times = zip(*(self.step() for _ in range(self.steps)), strict=True)
        return dict(zip(FIGURES, map(statistics.median, times), strict=True))


def measured(systems: Sequence[str], options: Options, device: str = "cpu") -> tuple[dict[str, Any], dict[str, str]]:
    """Everyone's summary, and why one cannot run."""
    turns, failures = compete(systems, partial(Runner, options=options, device=device), options.rounds)
    return summarize(turns, options.units), failures


def summarize(turns: Turns, units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the step, the cost per unit and its ratio to FSDP2's, and, of
    fullshard's wrapper, to FSDP1's with the same flag."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in turns}
    for figure in FIGURES:
        seconds = {name: [one[figure] for one in each] for name, each in turns.items()}
        costs = {
            name: [(mine - base) / units for mine, base in zip(times, seconds[PLAIN], strict=True)]
            for name, times in seconds.items()
            if name != PLAIN
        }
        for name, times in seconds.items():
            entry: dict[str, Any] = {"median_step_seconds": spread(times).median, "seconds": times}
            if name in costs:
                entry["host_seconds_per_unit"] = spread(costs[name]).as_json()
                for label, peer in (("fsdp2", FSDP2), ("fsdp1", PEER_WITH_SAME_FLAG.get(name))):
                    if peer in costs:
                        entry[f"host_cost_ratio_to_{label}"] = paired_spread(costs[name], costs[peer]).as_json()
            summary[name][figure] = entry
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    columns = []
    for figure, label in FIGURES.items():
        columns += [
            column(f"{label}: step, ms", figure, "median_step_seconds", spec=".1f", scale=1e3),
            column("host time per unit, us", figure, "host_seconds_per_unit", spec=".0f", scale=1e6),
            column("/ FSDP2", figure, "host_cost_ratio_to_fsdp2"),
            column("/ FSDP1, same flag", figure, "host_cost_ratio_to_fsdp1"),
        ]
    named = {"plain" if name == PLAIN else name: entry for name, entry in summary.items()}
    return report.table("contestant", named, columns, failures)


def verdicts(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per contestant of fullshard whose peer ran: its ratio to it, and whether it meets the target."""
    lines = []
    found = report.value_under(summary, (FULLSHARD, "step", "host_cost_ratio_to_fsdp2"))
    if found is not None:
        lines.append(report.verdict(f"{FULLSHARD}, with the optimizer:", found["median"], STEP_TARGET, " of FSDP2's"))
    for name in (WRAPPER, WRAPPER_FLAT):
        found = report.value_under(summary, (name, "forward_backward", "host_cost_ratio_to_fsdp1"))
        if found is not None:
            lines.append(report.verdict(f"{name}:", found["median"], WRAPPER_TARGET, " of FSDP1's"))
    return lines


def panels(summary: Mapping[str, Any]) -> list[report.Bars]:
    """A panel per figure and peer."""
    keys = {
        f"host time per unit / {peer.upper()}, {label}": (figure, f"host_cost_ratio_to_{peer}")
        for figure, label in FIGURES.items()
        for peer in ("fsdp2", "fsdp1")
    }
    return report.bars(summary, keys)


def run(options: Options) -> None:
    """Compare the host time per unit and step of fullshard and its peers."""
    with fake_group(options.ranks):
        chosen = [name for name in SYSTEMS if not options.only or name == PLAIN or name in options.only]
        summary, failures = measured(chosen, options)
    paragraphs = [
        f"{options.units} units (linear 16 x 16 and norm) at batch 1, rank 0 of {options.ranks} on a fake "
        f"process group, one thread; {options.rounds} rounds of {options.steps_per_round} steps.",
        table(summary, failures),
        *report.against_targets(verdicts(summary)),
        *report.could_not_run(failures),
    ]
    report.publish(
        options,
        "host_cost",
        {"settings": options.settings, "contestants": summary, "not_run": failures},
        paragraphs,
        title=TITLE,
        panels=panels(summary),
    )
