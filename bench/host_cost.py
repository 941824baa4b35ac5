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
from bench.report import spread_cell, spread_of
from bench.statistics import Spread, paired_spread, spread
from bench.turns import each_that_runs, take_turns

PLAIN = UNSHARDED
SYSTEMS = (PLAIN, FSDP1, FSDP1_FLAT, FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT)
FIGURES = {"forward_backward": "forward + backward", "step": "with optimizer step"}
# What the wrapper may cost of FSDP1 with the same flag, forward and backward.
WRAPPER_TARGET = 0.50


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

    def turn(self) -> tuple[float, float]:
        """Medians of both times over some steps."""
        forward_backward, whole = zip(*(self.step() for _ in range(self.steps)), strict=True)
        return statistics.median(forward_backward), statistics.median(whole)


def compete(
    systems: Sequence[str], options: Options, device: str = "cpu"
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds per contestant, figure and round; the second value says why one cannot run."""
    runners, failures = each_that_runs(systems, lambda system: Runner(system, options, device))
    turns = take_turns({name: runner.turn for name, runner in runners.items()}, options.rounds)
    figures = tuple(enumerate(FIGURES))
    return {n: {figure: [one[i] for one in each] for i, figure in figures} for n, each in turns.items()}, failures


def host_costs(seconds: Mapping[str, Mapping[str, Sequence[float]]], figure: str, units: int) -> dict[str, list[float]]:
    """Seconds per unit beyond the plain model, per contestant and round."""
    plain = seconds[PLAIN][figure]
    return {
        name: [(mine - base) / units for mine, base in zip(times[figure], plain, strict=True)]
        for name, times in seconds.items()
        if name != PLAIN
    }


def summarise(seconds: Mapping[str, Mapping[str, Sequence[float]]], units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the step, the cost per unit and its ratio to FSDP2's, and, of
    fullshard's wrapper, to FSDP1's with the same flag."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in seconds}
    for figure in FIGURES:
        costs = host_costs(seconds, figure, units)
        for name, times in seconds.items():
            entry: dict[str, Any] = {
                "median_step_seconds": spread(times[figure]).median,
                "seconds": list(times[figure]),
            }
            if name in costs:
                entry["host_seconds_per_unit"] = spread(costs[name]).as_json()
                for label, peer in (("fsdp2", FSDP2), ("fsdp1", PEER_WITH_SAME_FLAG.get(name))):
                    if peer in costs:
                        entry[f"host_cost_ratio_to_{label}"] = paired_spread(costs[name], costs[peer]).as_json()
            summary[name][figure] = entry
    return summary


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    header = ["contestant"]
    for label in FIGURES.values():
        header += [f"{label}: step, ms", "host time per unit, us", "/ FSDP2", "/ FSDP1, same flag"]
    rows = []
    for name, figures in summary.items():
        row = ["plain" if name == PLAIN else name]
        for figure in FIGURES:
            entry = figures[figure]
            row += [
                f"{1e3 * entry['median_step_seconds']:.1f}",
                spread_cell(entry.get("host_seconds_per_unit"), ".0f", 1e6),
                spread_cell(entry.get("host_cost_ratio_to_fsdp2")),
                spread_cell(entry.get("host_cost_ratio_to_fsdp1")),
            ]
        rows.append(row)
    return report.markdown_table(header, rows, failures)


def verdicts(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per wrapper of fullshard whose peer ran: its ratio to FSDP1, and whether it meets the target."""
    lines = []
    for name in (WRAPPER, WRAPPER_FLAT):
        found = summary.get(name, {}).get("forward_backward", {}).get("host_cost_ratio_to_fsdp1")
        if found is not None:
            lines.append(report.verdict(f"{name}:", found["median"], WRAPPER_TARGET, " of FSDP1's"))
    return lines


def bars(summary: Mapping[str, Mapping[str, Any]]) -> list[report.Panel]:
    panels = []
    for figure, label in FIGURES.items():
        for peer in ("FSDP2", "FSDP1"):
            key = f"host_cost_ratio_to_{peer.lower()}"
            found = {name: spread_of(figures[figure].get(key)) for name, figures in summary.items()}
            values: dict[str, float | Spread] = {name: value for name, value in found.items() if value is not None}
            panels.append(report.Panel(f"host time per unit / {peer}, {label}", values, 1.0))
    return panels


def run(options: Options) -> None:
    """Compare the host time per unit and step of fullshard and its peers."""
    with fake_group(options.ranks):
        chosen = [name for name in SYSTEMS if not options.only or name == PLAIN or name in options.only]
        seconds, failures = compete(chosen, options)
    summary = summarise(seconds, options.units)
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
        draw=lambda path: report.plot_bars(path, f"{options.units} tiny units (whiskers: quartiles)", bars(summary)),
        image_text="Host time per unit",
    )
