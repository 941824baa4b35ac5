"""Peak memory of a training step over the least that it needs, for fullshard and torch's FSDP1 and FSDP2, on CPU.

    python -m bench.memory_limit --write-document      # widths 512 and 1024, about ten minutes on two quiet cores
    python -m bench.memory_limit --width 512 --ranks 64 --breakdown

Every allocation and free is recorded (``bench.memory_limit_ledger``), so figures are exact and do not depend on the
machine. Two gloo ranks, and rank 0 of c10d's fake group of 8 and 64, where the state at rest is small and what a unit
needs on top shows. The bound is that of ``bench.memory_limit_bound``: *sum* and *course*.

JSON and plot go to ``bench/results/``, the tables to ``docs/memory.md``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import report
from bench.contestants import FSDP1, FSDP2, FULLSHARD, UNSHARDED, WRAPPER, WRAPPER_FLAT, Contestant, process_environment
from bench.environment import REPOSITORY, Environment, current_environment
from bench.memory_limit_bound import Bound, Widths
from bench.memory_limit_reading import Reading
from bench.memory_limit_worker import BF16, FP32, MODES, OFFLOAD, Assignment
from bench.models import GPT, GPTShape

SYSTEMS = (FULLSHARD, WRAPPER, WRAPPER_FLAT, FSDP2, FSDP1)
OURS = (FULLSHARD, WRAPPER, WRAPPER_FLAT)
GLOO_RANKS = 2
RANKS = (GLOO_RANKS, 8, 64)
TARGET = 1.05
# By width; at 1024 more blocks than bench.step has, for one contestant's memory is alive at a time.
BLOCKS_AND_TOKENS = {512: (6, 256), 1024: (8, 64)}
WIDTHS = {FP32: Widths(), BF16: Widths(gathered=2, gradient=2), OFFLOAD: Widths()}
DOCUMENT = report.DOCUMENT.parent / "memory.md"
TIMEOUT = 900.0  # seconds, of one process
MEBIBYTE = 2**20

console = Console(highlight=False)


@dataclass(frozen=True)
class Cell:
    """One system in one mode. ``error`` instead of a reading: it cannot run."""

    width: int
    ranks: int
    mode: str
    system: str
    bound: Bound
    unsharded: Reading
    reading: Reading | None
    error: str = ""

    @property
    def to_sum(self) -> float | None:
        return self.reading.peak / self.bound.sum(self.unsharded) if self.reading else None

    @property
    def to_course(self) -> float | None:
        return self.reading.peak / self.bound.course(self.unsharded) if self.reading else None

    def as_json(self) -> dict[str, object]:
        found = None if self.reading is None else {k: v for k, v in asdict(self.reading).items() if k != "moments"}
        return {
            "width": self.width,
            "ranks": self.ranks,
            "mode": self.mode,
            "system": self.system,
            "error": self.error,
            "reading": found,
            "bound": {
                "resident": self.bound.resident,
                "transient": self.bound.transient,
                "activations": self.unsharded.activations,
                "sum": self.bound.sum(self.unsharded),
                "course": self.bound.course(self.unsharded),
            },
            "peak_over_sum": self.to_sum,
            "peak_over_course": self.to_course,
        }


def bound_of(shape: GPTShape, ranks: int, mode: str) -> Bound:
    with torch.device("meta"):
        model = GPT(shape)
    units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return Bound(units, sum(p.numel() for p in model.parameters()) - sum(units), ranks, WIDTHS[mode])


def measure(
    shape: GPTShape, ranks: int, systems: Sequence[str], modes: Sequence[str], device: str = "cpu"
) -> list[Cell]:
    """All systems and modes on so many ranks: gloo's, or a fake group's where there are more than two, or on a GPU."""
    if ranks == GLOO_RANKS and device == "cpu":
        found = _answers(shape, ranks, (UNSHARDED,), modes, fake=True)
        for system in systems:  # in processes of their own: who fails leaves the group out of step
            found += _answers(shape, ranks, (system,), modes, fake=False)
    else:
        found = _answers(shape, ranks, (UNSHARDED, *systems), modes, fake=True, device=device)
    answers = {(a["system"], a["mode"]): a for a in found}
    cells = []
    for mode in modes:
        plain = Reading.from_json(answers[UNSHARDED, mode]["reading"])
        for system in systems:
            answer = answers.get((system, mode), {"error": "its process ended"})
            reading = Reading.from_json(answer["reading"]) if "reading" in answer else None
            bound = bound_of(shape, ranks, mode)
            cells.append(Cell(shape.width, ranks, mode, system, bound, plain, reading, answer.get("error", "")))
    return cells


def _answers(
    shape: GPTShape, ranks: int, systems: Sequence[str], modes: Sequence[str], *, fake: bool, device: str = "cpu"
) -> list[dict[str, Any]]:
    """What rank 0 answers."""
    with tempfile.TemporaryDirectory() as folder:
        store = "" if fake else str(Path(folder) / "store")
        processes, sizes = [], (shape.width, shape.blocks, shape.tokens)
        for rank in [0] if fake else range(ranks):
            assignment = Assignment(tuple(systems), tuple(modes), *sizes, ranks, rank, store, device)
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.memory_limit_worker", assignment.as_argument()],
                    cwd=REPOSITORY,
                    env=process_environment(Contestant("", ""), threads=1),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [json.loads(line) for line in outputs[0].splitlines()]


def table(cells: Sequence[Cell]) -> str:
    """One row per width, ranks and mode: the bound's terms in MiB, and each system's peak over both bounds."""
    systems = list(dict.fromkeys(cell.system for cell in cells))
    header = ["width, ranks, mode", "at rest", "units", "activations", "sum", "course", *systems]
    rows = []
    for key in dict.fromkeys((cell.width, cell.ranks, cell.mode) for cell in cells):
        row = [cell for cell in cells if (cell.width, cell.ranks, cell.mode) == key]
        bound, plain = row[0].bound, row[0].unsharded
        terms = (bound.resident, bound.transient, plain.activations, bound.sum(plain), bound.course(plain))
        width, ranks, mode = key
        name = f"{width}, {ranks} {'gloo' if ranks == GLOO_RANKS else 'fake'}, {mode}"
        found = {cell.system: cell for cell in row}
        rows.append([name, *(f"{term / MEBIBYTE:.0f}" for term in terms), *(_ratios(found[s]) for s in systems)])
    return report.markdown_table(header, rows)


def _ratios(cell: Cell) -> str:
    if cell.reading is None:
        return "cannot run"
    return f"{cell.to_sum:.2f}, {cell.to_course:.2f}"


def breakdown(cells: Sequence[Cell]) -> str:
    """What was alive at the peak, MiB: one row per kind of memory, its units in brackets; one column per cell."""
    columns: list[dict[str, str]] = []
    kinds: dict[str, int] = {}
    for cell in cells:
        assert cell.reading is not None
        column: dict[str, list[tuple[str, int]]] = {}
        for name, nbytes in cell.reading.at_peak.items():
            what, unit = name.split("|")[:2]
            column.setdefault(what, []).append((unit, nbytes))
            kinds[what] = max(kinds.get(what, 0), nbytes)
        columns.append({what: _units_text(parts) for what, parts in column.items()})
    order = sorted(kinds, key=lambda what: -kinds[what])
    header = ["alive at the peak", *(f"{c.system}, {c.mode}" for c in cells)]
    rows = [[what, *(column.get(what, "-") for column in columns)] for what in order if kinds[what] >= MEBIBYTE / 4]
    peaks = [f"{cell.reading.peak / MEBIBYTE:.1f} in {cell.reading.peak_phase}" for cell in cells if cell.reading]
    return report.markdown_table(header, [*rows, ["**all**", *peaks]])


def _units_text(parts: Sequence[tuple[str, int]]) -> str:
    text = f"{sum(nbytes for _, nbytes in parts) / MEBIBYTE:.1f}"
    large = [unit.removeprefix("blocks.") or "root" for unit, nbytes in parts if nbytes >= MEBIBYTE / 4]
    named = any(unit for unit, _ in parts)
    return f"{text} ({', '.join(sorted(large))})" if named and 1 <= len(large) <= 4 else text


def verdicts(cells: Sequence[Cell]) -> Iterator[str]:
    """Per form of fullshard: its worst cell against the target."""
    for system in OURS:
        mine = [cell for cell in cells if cell.system == system and cell.reading is not None]
        for name in ("sum", "course"):
            worst = max(mine, key=lambda cell: getattr(cell, f"to_{name}") or 0.0, default=None)
            if worst is not None:
                ratio = getattr(worst, f"to_{name}")
                missed = "" if ratio <= TARGET else f" (missed: width {worst.width}, {worst.ranks} ranks, {worst.mode})"
                yield f"{system}: at most {ratio:.2f} of the {name}, target {TARGET:.2f}{missed}"


def document_block(cells: Sequence[Cell], environment: Environment, image: Path, document: Path) -> str:
    """What stands between the markers."""
    shapes = {cell.width: BLOCKS_AND_TOKENS.get(cell.width) for cell in cells}
    sizes = "; ".join(f"width {w}: {p[0]} blocks, {p[1]} tokens per rank" for w, p in shapes.items() if p)
    shown = breakdown_cells(cells)
    errors = {cell.system: cell.error for cell in cells if cell.error}
    lines = [
        f"GPT, AdamW, {sizes}. Bound in MiB, then per system its peak over the *sum* and over the *course*.",
        "",
        table(cells),
        "",
        *(f"`{system}` cannot run everything: {error}\n" for system, error in errors.items()),
        *(f"- {line}" for line in verdicts(cells)),
        "",
    ]
    if shown:
        lines += [f"At the peak, width {shown[0].width} and {shown[0].ranks} ranks, MiB (units in brackets):", ""]
        lines += [breakdown(shown), ""]
    lines.append(report.provenance(environment))
    if image.exists():
        lines += ["", report.image_link(image, document, "Peak memory over the bound")]
    return "\n".join(lines)


def breakdown_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Those whose peaks say most: fullshard on the most ranks at the largest width, without repetitions."""
    if not cells:
        return []
    width, ranks = max(cell.width for cell in cells), max(cell.ranks for cell in cells)
    chosen = [c for c in cells if (c.width, c.ranks) == (width, ranks) and c.mode != OFFLOAD and c.reading is not None]
    return [cell for cell in chosen if cell.system in (FULLSHARD, WRAPPER_FLAT)]


def plot(path: Path, cells: Sequence[Cell]) -> None:
    """The fewest ranks at the smallest width, where state at rest weighs most, and the other end."""
    sizes = sorted({(cell.ranks, cell.width) for cell in cells})
    panels = []
    for ranks, width in dict.fromkeys((sizes[0], sizes[-1])):
        for mode in (FP32, BF16):
            values: dict[str, float | Any] = {
                cell.system: cell.to_course
                for cell in cells
                if (cell.width, cell.ranks, cell.mode) == (width, ranks, mode) and cell.to_course is not None
            }
            if values:
                panels.append(report.Panel(f"width {width}, {ranks} ranks, {mode}", values, 1.0))
    if panels:
        report.plot_bars(path, "Peak memory of a training step over its bound (course)", panels)


def main(
    width: Annotated[list[int] | None, typer.Option(help="Model width; repeat for several.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Transformer blocks [6 at width 512, 8 at 1024].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank [256 at width 512, 64 at 1024].")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="2 (gloo), or more (fake group); repeat.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(MODES)}; repeat.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only this of {', '.join(SYSTEMS)}; repeat.")] = None,
    show_breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Print what was alive at fullshard's peaks.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda: rank 0 of fake groups on one GPU.")] = "cpu",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the tables.")] = DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the tables into the page.")] = False,
) -> None:
    """Measure the peak memory of a step and set it beside the least that the step needs."""
    systems, modes = only or list(SYSTEMS), mode or list(MODES)
    for name, known in [*((s, SYSTEMS) for s in systems), *((m, MODES) for m in modes)]:
        if name not in known:
            raise typer.BadParameter(f"unknown {name!r}; known are {', '.join(known)}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"no device {device!r} here", param_hint="--device")
    cells: list[Cell] = []
    for each in width or (512, 1024):
        preset = BLOCKS_AND_TOKENS.get(each, (6, 64))
        shape = GPTShape(each, blocks or preset[0], tokens or preset[1])
        for count in ranks or RANKS:
            fresh = measure(shape, count, systems, modes, device)
            cells += fresh
            console.print(f"\n{table(fresh)}\n", markup=False, soft_wrap=True)
    if show_breakdown:
        for cell in cells:
            if cell.system in OURS and cell.reading is not None:
                console.print(f"width {cell.width}, {cell.ranks} ranks\n{breakdown([cell])}\n", markup=False)
    for line in verdicts(cells):
        console.print(line, soft_wrap=True)
    environment = current_environment(torch.cuda.get_device_name(0) if device == "cuda" else None)
    path = results / f"memory_limit_{environment.name}.json"
    record = {"environment": environment.as_json(), "cells": [cell.as_json() for cell in cells]}
    report.write_json(path, {"benchmark": "memory_limit", **record})
    image = path.with_suffix(".png")
    plot(image, cells)
    if write_document:
        report.update_document(document, "memory_limit", document_block(cells, environment, image, document))
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
