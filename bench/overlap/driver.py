"""How much communication overlaps with computation: fullshard, FSDP2 and FSDP1 on a modelled network.

One process plays one rank of N on ``fullshard.planning.simulation``. A step is set beside T_LB, which no schedule with
the same memory undercuts, and beside what fullshard's schedule takes (``bound.py``).

``host``: as on CPU ranks, where what waits blocks. FSDP1 and FSDP2 overlap by streams, and on CPU these do nothing, so
that each of their collectives blocks. ``streams``: with streams that keep time, as on an accelerator; see
``fullshard.planning.simulation.streams``. Time is that of a clock that skips what would be slept.
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
from bench.overlap.cells import CLOCKS, HOST, STREAMS, Cell, Measured, even_units, measure, uneven_units
from bench.overlap.systems import SYSTEMS, System, UnitShape
from bench.statistics import spread

EVEN, UNEVEN, REAL = "even", "uneven", "GPT"
TITLE = "Overlap"
UNITS: Mapping[str, tuple[UnitShape, ...]] = {EVEN: even_units(), UNEVEN: uneven_units(), REAL: ()}
AHEAD_RANKS = 64
AHEAD = tuple(system for system in SYSTEMS if system.depth is not None or system.name == "fullshard")
SHOWN = ("FSDP1 PRE", "FSDP2", "fullshard")  # in the plot
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

Stored = Sequence[Mapping[str, Any]]  # cells, as they are stored


def table(cells: Stored) -> str:
    """One row per contestant, one column per cell: T / T_LB."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["contestants"]))
    header = ["", *(f"N={cell['ranks']}, {cell['link_over_computation']:g}" for cell in cells)]
    rows = [[name, *(report.cell(_over_bound(cell, name), ".3f") for cell in cells)] for name in names]
    bounds = {"T_LB, ms": ("bound_seconds", "least"), "one unit ahead, ms": ("scheduled_seconds",)}
    for label, keys in bounds.items():
        rows.append([label, *(report.cell(report.value_under(cell, keys), ".0f", 1e3) for cell in cells)])
    return report.markdown_table(header, rows)


def _over_bound(cell: Mapping[str, Any], name: str) -> Any:
    return report.value_under(cell, ("contestants", name, "over_bound", "median"))


def ahead_table(cells: Stored) -> str:
    """What gathering ahead gains, as the schedule predicts it and as measured; both over one unit ahead."""
    header = ["units ahead, reductions"]
    header += [f"{cell['model']}, {cell['device']}, {cell['link_over_computation']:g}" for cell in cells]
    rows: dict[str, list[str]] = {}
    for number, cell in enumerate(cells):
        for name, each in sorted(cell["predicted"].items(), key=lambda item: item[1]["order"]):
            row = rows.setdefault(f"{each['order'][0]}, {each['order'][1]}", ["-"] * len(cells))
            measured = report.value_under(cell, ("contestants", name, "step_seconds"))
            if measured:
                alone = cell["scheduled_seconds"]
                row[number] = f"{each['seconds'] / alone:.3f} / {spread(measured).median / alone:.3f}"
    return report.markdown_table(header, [[label, *row] for label, row in rows.items()])


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
            "bound_seconds": {
                "computation": measured.bound.computation,
                "link": measured.bound.link,
                "least": measured.bound.seconds,
            },
            "scheduled_seconds": measured.scheduled(),
            "predicted": {
                system.name: {"order": order, "seconds": measured.scheduled(*order)}
                for system in AHEAD
                for order in [(1 if system.depth is None else system.depth, system.reductions or 1)]
            },
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


def paragraphs(result: Mapping[str, Any]) -> list[str]:
    """The tables with what a reader needs to know."""
    cells: Stored = result["cells"]
    parts = [
        "Step time / T_LB. T_LB is less than or equal to the time of any schedule that has at most two units' full "
        "parameters at a time ([derivation](../design/modelled_network.md#lower-bound-of-a-step)). Last row: the "
        "schedule that gathers one unit ahead and has one reduction in flight, if nothing else costs time. Columns: "
        "number of ranks, and link time / computation at 8 ranks. Eight equal units, 10 ms forward and 20 ms backward "
        "each; one link; a launch costs 20 us, and 5 us per level of a tree.",
    ]
    texts = {
        HOST: "As on CPU ranks. FSDP1 and FSDP2 overlap by streams, which do nothing there: their collectives block.",
        STREAMS: "With streams that keep time, as on an accelerator. FSDP1 has `forward_prefetch=True`.",
    }
    for device, text in texts.items():
        some = [cell for cell in cells if (cell["device"], cell["model"]) == (device, EVEN)]
        parts += [text, table(some)] if some else []
    real = [cell for cell in cells if cell["model"] == REAL]
    if real:
        parts += [
            "A GPT of four blocks of width 256, 512 tokens, which really computes on the host. Its computation is the "
            "time of the plain model in the same rounds:",
            table(real),
        ]
    if result["ahead"]:
        parts += [
            "The gain of prefetching more units (`set_prefetch_bytes`) and of more reductions in flight "
            "(`set_reduce_scatter_max_input_buffers`): step time / that of one unit ahead, predicted / measured, "
            'without the time of the host. "Uneven": two small units with much computation, then two units of three '
            "times their size with a quarter of the computation, and so on.",
            ahead_table(result["ahead"]),
        ]
    return parts


def panels(result: Mapping[str, Any]) -> list[report.Curves]:
    """With streams: step time over the bound against link time over computation."""
    lines: dict[str, dict[float, float]] = {}
    for cell in result["cells"]:
        if (cell["model"], cell["device"], cell["ranks"]) == (EVEN, STREAMS, AHEAD_RANKS):
            for name in SHOWN:
                found = _over_bound(cell, name)
                if found is not None:
                    lines.setdefault(name, {})[cell["link_over_computation"]] = found
    label = "link time / computation"
    return [report.Curves(f"with streams, {AHEAD_RANKS} ranks: step / lower bound", lines, label, reference=1.0)]


def run(options: Options) -> None:
    """Set steps on a modelled network beside the least they can take."""
    if options.clock == "none" and REAL in options.what:
        raise UsageError("a GPT's computation is the host's own work, which the clock 'none' leaves out: choose --what")
    torch.set_num_threads(1)
    systems = [system for system in SYSTEMS if not options.only or system.name in options.only]
    found: Results = {}
    ahead: Results = {}
    if EVEN in options.what:
        some = [system for system in systems if system.depth in (None, 0)]
        found |= measured_cells(EVEN, options.ranks, some, options, options.clock, options.rounds)
    if REAL in options.what:
        some = [system for system in systems if system.name in REAL_SYSTEMS]
        found |= measured_cells(REAL, [AHEAD_RANKS], some, options, options.clock, options.rounds)
    some = [system for system in systems if system in AHEAD]
    if UNEVEN in options.what and some:
        for model in (EVEN, UNEVEN):  # without the host's own work, one step is like another
            ahead |= measured_cells(model, [AHEAD_RANKS], some, options, "none", 1)
    result = {"settings": options.settings, "cells": as_json(found), "ahead": as_json(ahead)}
    report.publish(options, "overlap", result, paragraphs(result), title=TITLE, panels=panels(result))
