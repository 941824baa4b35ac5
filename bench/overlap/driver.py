"""How much communication overlaps with computation: fullshard, FSDP2 and FSDP1 on a modelled network.

One process plays one rank of N on ``bench/simulators/network.py``. A step is set beside T_LB, the largest of four lower
bounds: computation alone, the link alone, first gather + computation + last reduction, and the schedule that gathers
one unit ahead (``bound.py``). What it takes beyond its computation is *exposed*.

``host``: as on CPU ranks, where what waits blocks. FSDP1 and FSDP2 overlap by streams, and on CPU these do nothing, so
that each of their collectives blocks. ``streams``: with streams that keep time, as on an accelerator; see
``bench/simulators/streams.py``. Time is that of a clock that skips what would be slept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import UsageError, option
from bench.overlap.bound import Window, keep_last, step_bound
from bench.overlap.cells import CLOCKS, HOST, STREAMS, Cell, Measured, even_units, measure, uneven_units
from bench.overlap.systems import SYSTEMS, System, UnitShape

EVEN, UNEVEN, REAL = "even", "uneven", "GPT"
TITLE = "Overlap"
UNITS: Mapping[str, tuple[UnitShape, ...]] = {EVEN: even_units(), UNEVEN: uneven_units(), REAL: ()}
AHEAD_RANKS = 64
AHEAD = tuple(system for system in SYSTEMS if system.depth is not None or system.name == "fullshard")
REAL_SYSTEMS = ("fullshard", "fullshard, none ahead", "fullshard-wrapper PRE", "FSDP2", "FSDP2, async op", "FSDP1 PRE")
Results = dict[Cell, Measured]


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All cells."""

    what: tuple[str, ...] = option((EVEN, UNEVEN, REAL), choices=tuple(UNITS))
    device: tuple[str, ...] = option((HOST, STREAMS), "As on CPU ranks, or with streams.", choices=(HOST, STREAMS))
    ranks: tuple[int, ...] = (8, 64, 1024)
    ratio: tuple[float, ...] = option((0.3, 1.0, 3.0), "Link time over computation at 8 ranks.")
    clock: str = option(
        "thread", "thread: counts processor time; process: wall time; none: no host work.", choices=tuple(CLOCKS)
    )
    rounds: int = 5
    steps_per_round: int = 1
    only: tuple[str, ...] = option((), choices=tuple(system.name for system in SYSTEMS))


def measured_cells(
    model: str, ranks: Sequence[int], systems: Sequence[System], options: Options, clock: str, rounds: int
) -> Results:
    """Measure all cells of a model one after another."""
    results: Results = {}
    # A GPT's streams would need a GPU: here its computation is the host's own.
    devices = [device for device in options.device if UNITS[model] or device == HOST]
    for cell in (Cell(model, UNITS[model], d, n, r, clock) for d in devices for n in ranks for r in options.ratio):
        begun = time.monotonic()
        results[cell] = measured = measure(cell, systems, rounds, options.steps_per_round)
        best = {name: measured.over_bound(name).median for name in measured.steps}
        ours = f", fullshard {best['fullshard']:.3f}" if "fullshard" in best else ""
        print(
            f"{model}, {cell.device}, N={cell.ranks}, link/computation {cell.ratio:g}: "
            f"T_LB {1e3 * measured.bound.seconds:.0f} ms{ours} ({time.monotonic() - begun:.0f} s)",
            flush=True,
        )
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
    header += [f"{cell.model}, {cell.device}, {cell.ratio:g}" for cell in results]
    rows = []
    for system in sorted(AHEAD, key=lambda s: (1 if s.depth is None else s.depth, s.reductions or 1)):
        depth, reductions = 1 if system.depth is None else system.depth, system.reductions or 1
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
            "model": cell.model,
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
                }
                for name, steps in measured.steps.items()
            },
            "failures": measured.failures,
        }
        for cell, measured in results.items()
    ]


def paragraphs(results: Results, ahead: Results) -> list[str]:
    """The tables with what a reader needs to know."""
    parts = [
        "Step time / T_LB, the largest of four lower bounds (`bench/overlap/bound.py`) for a schedule that prefetches "
        "one unit and keeps one unit unsharded between forward and backward. A schedule that prefetches more can be "
        "below 1. Columns: number of ranks, and link time / computation at 8 ranks. Eight equal units, 10 ms forward "
        "and 20 ms backward each; one link; a launch costs 20 us, and 5 us per level of a tree.",
    ]
    texts = {
        HOST: "As on CPU ranks. FSDP1 and FSDP2 overlap by streams, which do nothing there: their collectives block.",
        STREAMS: "With streams that keep time, as on an accelerator. FSDP1 has `forward_prefetch=True`.",
    }
    for device, text in texts.items():
        some = {cell: m for cell, m in results.items() if (cell.device, cell.model) == (device, EVEN)}
        if some:
            parts += [text, table(some), "Exposed: milliseconds of the step beyond its computation.", ""]
            parts += [table(some, exposed=True)]
    real = {cell: m for cell, m in results.items() if cell.model == REAL}
    if real:
        parts += [
            "A GPT of four blocks of width 256, 512 tokens, which really computes on the host. Its computation is the "
            "time of the plain model in the same rounds:",
            table(real),
        ]
    if ahead:
        parts += [
            "The gain of prefetching more units (`set_prefetch_bytes`) and of more reductions in flight "
            "(`set_reduce_scatter_max_input_buffers`): step time / T_LB, predicted / measured, without the time of the "
            'host. "Uneven": two small units with much computation, then two units of three times their size with a '
            "quarter of the computation, and so on.",
            ahead_table(ahead),
        ]
    return parts


def curves(cells: Sequence[Mapping[str, Any]]) -> list[report.Curves]:
    """Step time over the bound against link time over computation: a panel per device and number of ranks."""
    found: dict[tuple[str, int], dict[str, dict[float, float]]] = {}
    for cell in cells:
        panel = found.setdefault((cell["device"], cell["ranks"]), {}) if cell["model"] == EVEN else {}
        for name, entry in cell["contestants"].items():
            panel.setdefault(name, {})[cell["link_over_computation"]] = entry["over_bound"]["median"]
    label = "link time / computation"
    return [report.Curves(f"{d}, {n:,} ranks", lines, label, reference=1.0) for (d, n), lines in found.items()]


def run(options: Options) -> None:
    """Set steps on a modelled network beside the least they can take."""
    if options.clock == "none" and REAL in options.what:
        raise UsageError("a GPT's computation is the host's own work, which the clock 'none' leaves out: choose --what")
    torch.set_num_threads(1)
    systems = [system for system in SYSTEMS if not options.only or system.name in options.only]
    found: Results = {}
    ahead: Results = {}
    if EVEN in options.what:
        some = [system for system in systems if system.depth != 3 and system.reductions is None]
        found |= measured_cells(EVEN, options.ranks, some, options, options.clock, options.rounds)
    if REAL in options.what:
        some = [system for system in systems if system.name in REAL_SYSTEMS]
        found |= measured_cells(REAL, [AHEAD_RANKS], some, options, options.clock, options.rounds)
    some = [system for system in systems if system in AHEAD]
    if UNEVEN in options.what and some:
        for model in (EVEN, UNEVEN):  # without the host's own work, one step is like another
            ahead |= measured_cells(model, [AHEAD_RANKS], some, options, "none", 1)
    report.publish(
        options,
        "overlap",
        {"settings": options.settings, "cells": as_json(found), "ahead": as_json(ahead)},
        paragraphs(found, ahead),
        title=TITLE,
        panels=curves(as_json(found)),
    )
