"""How much communication overlaps with computation: fullshard, FSDP2 and FSDP1 on a modelled network.

    python -m bench.overlap                       # all cells, prints tables
    python -m bench.overlap --write-document      # and puts them into docs/performance.md
    python -m bench.overlap --ranks 64 --ratio 1 --only fullshard --only FSDP2 --device streams

One process plays one rank of N on ``bench.modelled_network``. A step is set beside T_LB, the largest of four lower
bounds: computation alone, the link alone, first gather + computation + last reduction, and the schedule that gathers
one unit ahead (``bench.overlap_bound``). What it takes beyond its computation is *exposed*.

``host``: as on CPU ranks, where what waits blocks. FSDP1 and FSDP2 overlap by streams, and on CPU these do nothing, so
that each of their collectives blocks. ``streams``: with streams that keep time, as on an accelerator; see
``bench.overlap_device``. Time is that of a clock that skips what would be slept; ``--clock wall`` sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import report
from bench.environment import current_environment
from bench.overlap_bound import Window, keep_last, step_bound
from bench.overlap_plot import plot_cells
from bench.overlap_run import CLOCKS, Cell, Measured, Model, Rounds, even_units, measure, uneven_units
from bench.overlap_systems import SYSTEMS, System

RANKS, RATIOS = (8, 64, 1024), (0.3, 1.0, 3.0)
EVEN, UNEVEN, REAL = Model("even", even_units()), Model("uneven", uneven_units()), Model("GPT")
# A GPT's streams would need a GPU: here its computation is the host's own.
DEVICES: Mapping[str, tuple[Any, ...]] = {"even": ("host", "streams"), "uneven": ("host", "streams"), "GPT": ("host",)}
AHEAD_RANKS = 64
AHEAD = tuple(system for system in SYSTEMS if system.depth is not None or system.name == "fullshard")
REAL_SYSTEMS = ("fullshard", "fullshard, none ahead", "fullshard-wrapper PRE", "FSDP2", "FSDP2, async op", "FSDP1 PRE")
TARGET = 1.05

console = Console(highlight=False)
Results = dict[Cell, Measured]


def cells_of(model: Model, devices: Sequence[str], ranks: Sequence[int], ratios: Sequence[float], clock: Any) -> Any:
    """All cells of one model."""
    wanted = [device for device in DEVICES[model.name] if device in devices]
    return [Cell(model, device, n, ratio, clock) for device in wanted for n in ranks for ratio in ratios]


def run(cells: Sequence[Cell], systems: Sequence[System], rounds: Rounds) -> Results:
    """Measure them one after another."""
    results: Results = {}
    for cell in cells:
        begun = time.monotonic()
        results[cell] = measured = measure(cell, systems, rounds)
        best = {name: measured.over_bound(name).median for name in measured.steps}
        ours = f", fullshard {best['fullshard']:.3f}" if "fullshard" in best else ""
        console.print(
            f"{cell.model.name}, {cell.device}, N={cell.ranks}, link/computation {cell.ratio:g}: "
            f"T_LB {1e3 * measured.bound.seconds:.0f} ms{ours} ({time.monotonic() - begun:.0f} s)"
        )
        for name, why in measured.failures.items():
            console.print(f"[yellow]  {name}: {why}", markup=True)
    return results


# ------------------------------------------------------------------------------------------------------------ tables


def table(results: Results, *, exposed: bool = False) -> str:
    """One row per contestant, one column per cell: T / T_LB, or the exposed milliseconds."""
    names = list(dict.fromkeys(name for measured in results.values() for name in measured.steps))
    header = ["", *(f"N={cell.ranks}, {cell.ratio:g}" for cell in results)]

    def figure(measured: Measured, name: str) -> str:
        if name not in measured.steps:
            return "-"
        if exposed:
            return f"{1e3 * measured.exposed(name).median:.0f}"
        return f"{measured.over_bound(name).median:.3f}"

    rows = [[name, *(figure(measured, name) for measured in results.values())] for name in names]
    first = "T_LB, ms" if not exposed else "LB3 - LB1, ms"
    bounds = [m.bound.seconds if not exposed else m.bound.chain - m.bound.computation for m in results.values()]
    rows.append([first, *(f"{1e3 * bound:.0f}" for bound in bounds)])
    return report.markdown_table(header, rows)


def ahead_table(results: Results) -> str:
    """What gathering ahead gains, as the schedule predicts it and as measured; both over T_LB."""
    header = ["units ahead, reductions", "gathered at once"]
    header += [f"{cell.model.name}, {cell.device}, {cell.ratio:g}" for cell in results]
    rows = []
    for system in sorted(AHEAD, key=lambda s: (1 if s.depth is None else s.depth, s.reductions or 1)):
        depth = 1 if system.depth is None else system.depth
        reductions = system.reductions or 1
        row = [f"{depth}, {reductions}", ""]
        for measured in results.values():
            if system.name not in measured.steps:
                row.append("-")
                continue
            predicted, memory = prediction(measured, depth, reductions)
            row[1] = f"{memory:.0%}"
            row.append(f"{predicted / measured.bound.seconds:.3f} / {measured.over_bound(system.name).median:.3f}")
        rows.append(row)
    return report.markdown_table(header, rows)


def prediction(measured: Measured, depth: int, reductions: int = 1) -> tuple[float, float]:
    """Seconds of a step with so many of the largest units ahead, and how much of the model is gathered then."""
    window = Window(depth, depth * max(cost.nbytes for cost in measured.costs), reductions)
    bound = step_bound(keep_last(measured.costs, window), window)
    return bound.schedule, bound.memory / sum(cost.nbytes for cost in measured.costs)


def as_json(results: Results) -> list[dict[str, Any]]:
    """All figures."""
    return [
        {
            "model": cell.model.name,
            "device": cell.device,
            "ranks": cell.ranks,
            "link_over_computation": cell.ratio,
            "clock": cell.clock,
            "network": asdict(measured.network),
            "bound_seconds": {**asdict(measured.bound), "largest": measured.bound.seconds},
            "units": [asdict(cost) for cost in measured.costs],
            "contestants": {
                name: {
                    "step_seconds": steps,
                    "over_bound": measured.over_bound(name).as_json(),
                    "exposed_seconds": measured.exposed(name).as_json(),
                    "link_seconds": measured.link[name],
                }
                for name, steps in measured.steps.items()
            },
            "failures": measured.failures,
        }
        for cell, measured in results.items()
    ]


def document_block(results: Results, ahead: Results, document: Path, image: Path) -> str:
    """The tables with what a reader needs to know."""
    parts = [
        "Step time over T_LB, the largest of four lower bounds (`bench/overlap_bound.py`); 1 is the limit of a "
        "schedule that gathers one unit ahead and keeps one between forward and backward, so that more ahead can be "
        "below it. Columns: ranks, and link time over computation at 8 ranks. Eight equal units, 10 ms forward and 20 "
        "ms backward each; one link; 20 us and 5 us per level of a tree on every launch.",
    ]
    for device, text in (
        (
            "host",
            "As on CPU ranks. FSDP1 and FSDP2 overlap by streams, which do nothing there: their collectives block.",
        ),
        ("streams", "With streams that keep time, as on an accelerator. FSDP1 has `forward_prefetch=True`."),
    ):
        some = {cell: m for cell, m in results.items() if cell.device == device and cell.model == EVEN}
        if some:
            parts += [text, table(some), "Exposed: milliseconds of the step beyond its computation.", ""]
            parts += [table(some, exposed=True)]
    real = {cell: m for cell, m in results.items() if cell.model == REAL}
    if real:
        parts += [
            "A GPT of four blocks of width 256 that computes, 512 tokens, on the host; its computation is what the "
            "plain model takes in the same rounds:",
            table(real),
        ]
    if ahead:
        parts += [
            "What gathering ahead (`set_prefetch_bytes`) and more reductions in flight "
            "(`set_reduce_scatter_max_input_buffers`) gain, predicted / measured, over T_LB and without the host's own "
            "work. Uneven: two units that compute much and weigh little, then two of three times their size with a "
            "quarter of the computation.",
            ahead_table(ahead),
        ]
    return "\n\n".join(
        [*parts, report.provenance(current_environment()), report.image_link(image, document, "Overlap")]
    )


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Ranks; repeat for several [8, 64, 1024].")] = None,
    ratio: Annotated[list[float] | None, typer.Option(help="Link time over computation [0.3, 1, 3].")] = None,
    device: Annotated[list[str] | None, typer.Option(help="host or streams [both].")] = None,
    compute: Annotated[list[str] | None, typer.Option(help="even, uneven or GPT [all].")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this contestant; repeat for several.")] = None,
    clock: Annotated[
        str, typer.Option(help="thread: skips, counts processor time; process: skips; none: no host; wall: sleeps.")
    ] = "thread",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 5,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 1,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the tables.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the tables into the page.")] = False,
) -> None:
    """Set steps on a modelled network beside the least they can take."""
    torch.set_num_threads(1)
    known = {system.name: system for system in SYSTEMS}
    unknown = [name for name in only or () if name not in known]
    if unknown or clock not in CLOCKS:
        raise typer.BadParameter(f"unknown: {', '.join(unknown) or clock}; known are {', '.join([*known, *CLOCKS])}")
    systems = [known[name] for name in only] if only else list(SYSTEMS)
    models, devices = compute or ["even", "uneven", "GPT"], device or ["host", "streams"]
    turns = Rounds(rounds=rounds, steps=steps_per_round)
    found: Results = {}
    if "even" in models:
        some = [system for system in systems if system.depth != 3 and system.reductions is None]
        found |= run(cells_of(EVEN, devices, ranks or RANKS, ratio or RATIOS, clock), some, turns)
    if "GPT" in models:
        some = [system for system in systems if system.name in REAL_SYSTEMS]
        found |= run(cells_of(REAL, devices, [AHEAD_RANKS], ratio or RATIOS, clock), some, turns)
    ahead: Results = {}
    some = [system for system in systems if system in AHEAD]
    if "uneven" in models and some:
        for model in (EVEN, UNEVEN):  # without the host's own work, one step is like another
            ahead |= run(cells_of(model, devices, [AHEAD_RANKS], ratio or RATIOS, "none"), some, Rounds(2, 1, 1))
    environment = current_environment()
    path = results / f"overlap_{environment.name}.json"
    image = path.with_suffix(".png")
    for name in ("host", "streams"):
        some = {cell: m for cell, m in found.items() if cell.device == name and cell.model == EVEN}
        if some:
            console.print(f"\n{name}\n{table(some)}\n\n{table(some, exposed=True)}", markup=False, soft_wrap=True)
    if ahead:
        console.print(f"\n{ahead_table(ahead)}", markup=False, soft_wrap=True)
    report.write_json(
        path,
        {
            "benchmark": "overlap",
            "environment": environment.as_json(),
            "rounds": asdict(turns),
            "cells": as_json(found),
            "ahead": as_json(ahead),
        },
    )
    plot_cells(image, [(cell, m) for cell, m in found.items() if cell.model == EVEN], TARGET)
    if write_document:
        report.update_document(document, "overlap", document_block(found, ahead, document, image))


if __name__ == "__main__":
    typer.run(main)
