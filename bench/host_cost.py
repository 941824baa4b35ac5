"""Host time that sharding adds per unit and step, on a fake process group of 8 ranks on CPU.

    python -m bench.host_cost --write-document
    python -m bench.host_cost --profile fullshard      # where that time goes

A hundred units, each a 16 x 16 linear layer and a norm, at batch 1: the arithmetic costs next to nothing and
c10d's fake process group only copies a shard to each rank's part of the output, eight here, for all contestants. So the
time beyond the plain model's step is the library's own, and these copies. All contestants live in this process and take
turns. Two figures: forward and backward alone, and the whole step
with AdamW, where it also matters what kind of tensors the optimizer is given.

``fsdp1-flat`` and ``fullshard-wrapper-flat`` are wrappers with ``use_orig_params=False``, ``fsdp1`` and
``fullshard-wrapper`` with True; fullshard's are measured by FSDP1 with the same flag. A flat optimizer has fewer
tensors than the plain model's, which can hide all of the host cost in the second figure.

Host cost per unit = (step - plain step) / units, both medians of the same round.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import nn

from bench import report
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
    start_fake_group,
)
from bench.environment import Environment, current_environment
from bench.models import TinyUnit, tiny_units
from bench.statistics import Spread, paired_spread, spread, turn_order

PLAIN = UNSHARDED
SYSTEMS = (PLAIN, FSDP1, FSDP1_FLAT, FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT)
FIGURES = {"forward_backward": "forward + backward", "step": "with optimizer step"}
# What the wrapper may cost of FSDP1 with the same flag, forward and backward.
WRAPPER_TARGET = 0.50

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    units: int
    ranks: int
    rounds: int
    steps_per_round: int
    warmup_steps: int
    device: str = "cpu"


class Runner:
    """One contestant's model and optimizer, and the times of its turns."""

    def __init__(self, system: str, settings: Settings) -> None:
        torch.manual_seed(0)
        self.device = torch.device(settings.device)
        model = tiny_units(settings.units).to(self.device)
        self.inputs = torch.randn(1, model[0].linear.in_features).to(self.device)
        self.model: nn.Module = distribute(system, model, TinyUnit, self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

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

    def turn(self, steps: int) -> tuple[float, float]:
        """Medians of both times over some steps."""
        forward_backward, whole = zip(*(self.step() for _ in range(steps)), strict=True)
        return statistics.median(forward_backward), statistics.median(whole)


def build(systems: Sequence[str], settings: Settings) -> tuple[dict[str, Runner], dict[str, str]]:
    """Build and warm up the contestants; the second value says why one cannot run."""
    runners: dict[str, Runner] = {}
    failures: dict[str, str] = {}
    for system in systems:
        try:
            runner = Runner(system, settings)
            runner.turn(settings.warmup_steps)
            runners[system] = runner
        except Exception as error:
            failures[system] = f"{type(error).__name__}: {error}".splitlines()[0]
            console.print(f"[yellow]{system} cannot run: {failures[system]}")
    return runners, failures


def compete(runners: Mapping[str, Runner], settings: Settings) -> dict[str, dict[str, list[float]]]:
    """Seconds per contestant, figure and round."""
    seconds: dict[str, dict[str, list[float]]] = {name: {f: [] for f in FIGURES} for name in runners}
    for index in range(settings.rounds):
        gc.collect()  # not in somebody's turn
        for name in turn_order(list(runners), index):
            for figure, value in zip(FIGURES, runners[name].turn(settings.steps_per_round), strict=True):
                seconds[name][figure].append(value)
    return seconds


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
            if name in costs and FSDP2 in costs:
                entry["host_cost_ratio_to_fsdp2"] = paired_spread(costs[name], costs[FSDP2]).as_json()
            peer = PEER_WITH_SAME_FLAG.get(name)
            if name in costs and peer in costs:
                entry["host_cost_ratio_to_fsdp1"] = paired_spread(costs[name], costs[peer]).as_json()
            summary[name][figure] = entry
    return summary


def _text(values: Mapping[str, float] | None, spec: str, scale: float = 1.0) -> str:
    if values is None:
        return "-"
    return f"{Spread(**{key: value * scale for key, value in values.items()}):{spec}}"


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
                _text(entry.get("host_seconds_per_unit"), ".0f", 1e6),
                _text(entry.get("host_cost_ratio_to_fsdp2"), ".2f"),
                _text(entry.get("host_cost_ratio_to_fsdp1"), ".2f"),
            ]
        rows.append(row)
    rows += [[name, "cannot run", *["-"] * (len(header) - 2)] for name in failures]
    return report.markdown_table(header, rows)


def verdicts(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per wrapper of fullshard whose peer ran: its ratio to FSDP1, and whether it meets the target."""
    lines = []
    for name in (WRAPPER, WRAPPER_FLAT):
        found = summary.get(name, {}).get("forward_backward", {}).get("host_cost_ratio_to_fsdp1")
        if found is not None:
            missed = "" if found["median"] <= WRAPPER_TARGET else " (missed)"
            lines.append(f"{name}: {found['median']:.2f} of at most {WRAPPER_TARGET:.2f} of FSDP1's{missed}")
    return lines


def _document_block(
    settings: Settings,
    text: str,
    failures: Mapping[str, str],
    environment: Environment,
    image: Path,
    document: Path,
) -> str:
    lines = [
        f"{settings.units} units (linear 16 x 16 and norm) at batch 1, rank 0 of {settings.ranks} on a fake "
        f"process group, one thread; {settings.rounds} rounds of {settings.steps_per_round} steps.",
        "",
        text,
        "",
        *(f"`{name}` could not run: {reason}." for name, reason in failures.items()),
        "",
        report.provenance(environment),
        "",
        report.image_link(image, document, "Host time per unit"),
    ]
    return "\n".join(lines)


def _plot(path: Path, settings: Settings, summary: Mapping[str, Mapping[str, Any]]) -> None:
    panels = []
    for figure, label in FIGURES.items():
        for peer in ("FSDP2", "FSDP1"):
            key = f"host_cost_ratio_to_{peer.lower()}"
            found = {name: figures[figure].get(key) for name, figures in summary.items()}
            values: dict[str, float | Spread] = {name: Spread(**v) for name, v in found.items() if v is not None}
            if values:
                panels.append(report.Panel(f"host time per unit / {peer}, {label}", values, 1.0))
    if panels:
        report.plot_bars(path, f"{settings.units} tiny units (whiskers: quartiles)", panels)


def profile(system: str, settings: Settings, lines: int) -> None:
    """Print where one contestant's host time goes, by the functions' own time."""
    runner = Runner(system, settings)
    runner.turn(settings.warmup_steps)
    steps = settings.rounds * settings.steps_per_round
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        runner.step()
    profiler.disable()
    console.print(f"{system}: {steps} steps of {settings.units} units; calls and times are totals")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(lines)


def main(
    units: Annotated[int, typer.Option(min=1, help="Tiny units in the model.")] = 100,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the fake process group.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 20,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 5,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only this of {', '.join(SYSTEMS[1:])}; repeat.")] = None,
    profile_of: Annotated[str | None, typer.Option("--profile", help="Profile this contestant instead.")] = None,
    profile_lines: Annotated[int, typer.Option(min=1, help="Lines of the profile.")] = 30,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Compare the host time per unit and step of fullshard and its peers."""
    for name in [*(only or []), *([profile_of] if profile_of else [])]:
        if name not in SYSTEMS:
            raise typer.BadParameter(f"unknown contestant {name!r}; known are {', '.join(SYSTEMS)}")
    settings = Settings(units, ranks, rounds, steps_per_round, warmup_steps)
    torch.set_num_threads(1)
    # A fake gather leaves whatever bytes were there; denormal numbers among them would cost time.
    torch.set_flush_denormal(True)
    start_fake_group(ranks)
    try:
        if profile_of:
            profile(profile_of, settings, profile_lines)
            return
        systems = [name for name in SYSTEMS if not only or name == PLAIN or name in only]
        runners, failures = build(systems, settings)
        summary = summarise(compete(runners, settings), units)
    finally:
        dist.destroy_process_group()
    environment = current_environment()
    path = results / f"host_cost_{environment.name}.json"
    report.write_json(
        path,
        {
            "benchmark": "host_cost",
            "settings": asdict(settings),
            "environment": environment.as_json(),
            "contestants": summary,
            "not_run": failures,
        },
    )
    text = table(summary, failures)
    console.print(f"\n{text}\n", markup=False, soft_wrap=True)
    for line in verdicts(summary):
        console.print(line, soft_wrap=True)
    image = path.with_suffix(".png")
    _plot(image, settings, summary)
    if write_document:
        block = _document_block(settings, text, failures, environment, image, document)
        report.update_document(document, "host_cost", block)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    typer.run(main)
