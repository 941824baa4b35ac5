"""Peak memory of a training step over the least that it needs, for fullshard and torch's FSDP1 and FSDP2, on CPU.

Every allocation and free is recorded (``ledger.py``), so figures are exact and do not depend on the machine. Two gloo
ranks, and rank 0 of c10d's fake group of 8 and 64, where the state at rest is small and what a unit needs on top shows.
The bound is that of ``bound.py``: *sum* and *course*.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.contestants import (
    BF16,
    CONTESTANTS,
    FP32,
    FSDP1,
    FSDP2,
    FULLSHARD,
    OFFLOAD,
    OURS,
    UNSHARDED,
    WRAPPER,
    WRAPPER_FLAT,
)
from bench.environment import REPOSITORY
from bench.memory_limit.bound import Bound, Widths
from bench.memory_limit.reading import Reading
from bench.models import GPT, GPTShape
from bench.teams import Launch, Teams

WORKER = "bench.memory_limit.worker"
SYSTEMS = (FULLSHARD, WRAPPER, WRAPPER_FLAT, FSDP2, FSDP1)
GLOO_RANKS = 2
TARGET = 1.05
TITLE = "Peak memory over the bound"
# By width; at 1024 more blocks than the step benchmark has, for one contestant's memory is alive at a time.
BLOCKS_AND_TOKENS = {512: (6, 256), 1024: (8, 64)}
WIDTHS = {FP32: Widths(), BF16: Widths(gathered=2, gradient=2), OFFLOAD: Widths()}
TIMEOUT = 900.0  # seconds, of one answer
MEBIBYTE = 2**20
PAGE = REPOSITORY / "docs" / "how_to" / "memory.md"


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Both widths, two gloo ranks and more on fake groups: about ten minutes on two quiet cores."""

    width: tuple[int, ...] = (512, 1024)
    blocks: int | None = None
    tokens: int | None = None
    ranks: tuple[int, ...] = (GLOO_RANKS, 8, 64)
    what: tuple[str, ...] = option((), choices=tuple(WIDTHS))
    only: tuple[str, ...] = option((), choices=SYSTEMS)
    document: Path = PAGE


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
    def row(self) -> tuple[int, int, str]:
        """Which row of the table it is in."""
        return self.width, self.ranks, self.mode

    @property
    def to_sum(self) -> float | None:
        return self.reading.peak / self.bound.sum(self.unsharded) if self.reading else None

    @property
    def to_course(self) -> float | None:
        return self.reading.peak / self.bound.course(self.unsharded) if self.reading else None

    @property
    def terms(self) -> dict[str, float]:
        """Of the bound, in bytes."""
        return {
            "training state": self.bound.resident,
            "unsharded units": self.bound.transient,
            "activations": self.unsharded.activations,
            "sum": self.bound.sum(self.unsharded),
            "course": self.bound.course(self.unsharded),
        }

    def as_json(self) -> dict[str, object]:
        found = None if self.reading is None else {k: v for k, v in asdict(self.reading).items() if k != "moments"}
        return {
            "width": self.width,
            "ranks": self.ranks,
            "mode": self.mode,
            "system": self.system,
            "error": self.error,
            "reading": found,
            "bound": self.terms,
            "peak_over_sum": self.to_sum,
            "peak_over_course": self.to_course,
        }


def bound_of(shape: GPTShape, ranks: int, mode: str) -> Bound:
    with torch.device("meta"):
        model = GPT(shape)
    units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return Bound(units, sum(p.numel() for p in model.parameters()) - sum(units), ranks, WIDTHS[mode])


def measure(shape: GPTShape, ranks: int, systems: Sequence[str], modes: Sequence[str]) -> list[Cell]:
    """All systems and modes on so many ranks: gloo's, or a fake group's where there are more than two."""
    answers = {system: _answers(shape, ranks, system, modes) for system in (UNSHARDED, *systems)}
    cells = []
    for mode in modes:
        plain = Reading.from_json(answers[UNSHARDED][mode]["reading"])
        for system in systems:
            answer = answers[system].get(mode, {"error": "its ranks are out of step"})
            reading = Reading.from_json(answer["reading"]) if "reading" in answer else None
            bound = bound_of(shape, ranks, mode)
            cells.append(Cell(shape.width, ranks, mode, system, bound, plain, reading, answer.get("error", "")))
    return cells


def _answers(shape: GPTShape, ranks: int, system: str, modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rank 0's answers by mode, from processes of the system's own: who fails leaves the group out of step."""
    told: dict[str, Any] = {"width": shape.width, "blocks": shape.blocks, "tokens": shape.tokens, "ranks": ranks}
    found: dict[str, dict[str, Any]] = {}
    gloo, contestant = ranks == GLOO_RANKS and system != UNSHARDED, CONTESTANTS[system]
    with tempfile.TemporaryDirectory() as folder, Teams(Path(folder)) as teams:
        alone = Launch.alone(contestant, WORKER, **told)
        teams.start(Launch.of(contestant, WORKER, Path(folder), **told) if gloo else alone, TIMEOUT)
        for mode in modes:
            answers = teams.ask(system, "measure", system=system, mode=mode)
            found[mode] = answers[0] if answers else {"error": teams.failures[system]}
            if not answers or any("error" in answer for answer in answers):
                break
    return found


def table(cells: Sequence[Cell]) -> str:
    """One row per width, ranks and mode: the bound's terms in MiB, and each system's peak over both bounds."""
    systems = list(dict.fromkeys(cell.system for cell in cells))
    rows = []
    for key in dict.fromkeys(cell.row for cell in cells):
        found = {cell.system: cell for cell in cells if cell.row == key}
        width, ranks, mode = key
        name = f"{width}, {ranks} {'gloo' if ranks == GLOO_RANKS else 'fake'}, {mode}"
        terms = next(iter(found.values())).terms.values()
        rows.append([name, *(f"{term / MEBIBYTE:.0f}" for term in terms), *(_ratios(found[s]) for s in systems)])
    return report.markdown_table(["width, ranks, mode", *(cells[0].terms if cells else ()), *systems], rows)


def _ratios(cell: Cell) -> str:
    return "cannot run" if cell.reading is None else f"{cell.to_sum:.2f}, {cell.to_course:.2f}"


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


def paragraphs(cells: Sequence[Cell]) -> list[str]:
    """What the page says; last, of fullshard on the most ranks at the largest width, what was alive at the peak."""
    shapes = {cell.width: BLOCKS_AND_TOKENS.get(cell.width) for cell in cells}
    sizes = "; ".join(f"width {w}: {p[0]} blocks, {p[1]} tokens per rank" for w, p in shapes.items() if p)
    errors = {cell.system: cell.error for cell in cells if cell.error}
    lines = [
        f"GPT, AdamW, {sizes}. Bounds in MiB; then for each system its peak divided by the *sum* and by the *course*.",
        table(cells),
        *(f"`{system}` cannot run everything: {error}" for system, error in errors.items()),
        "\n".join(f"- {line}" for line in verdicts(cells)),
    ]
    able = [c for c in cells if c.system in (FULLSHARD, WRAPPER_FLAT) and c.mode != OFFLOAD and c.reading is not None]
    shown = [c for c in able if (c.width, c.ranks) == max((c.width, c.ranks) for c in able)]
    if shown:
        lines += [f"At the peak, width {shown[0].width} and {shown[0].ranks} ranks, MiB (units in brackets):"]
        lines += [breakdown(shown)]
    return lines


def panels(cells: Sequence[Mapping[str, Any]]) -> list[report.Dots]:
    """All cells, as they are stored, over the course."""
    rows: dict[str, dict[str, float]] = {}
    for cell in sorted(cells, key=lambda cell: (cell["width"], cell["ranks"])):
        if cell["peak_over_course"] is not None and cell["system"] in (FULLSHARD, FSDP2):
            row = f"width {cell['width']}, {cell['ranks']} ranks, {cell['mode']}"
            rows.setdefault(row, {})[cell["system"]] = cell["peak_over_course"]
    return [report.Dots("peak memory / least with overlap (course)", rows, {1.0: "least", TARGET: "target"})]


def run(options: Options) -> None:
    """Measure the peak memory of a step and set it beside the least that the step needs."""
    cells: list[Cell] = []
    for width in options.width:
        preset = BLOCKS_AND_TOKENS.get(width, (6, 64))
        shape = GPTShape(width, options.blocks or preset[0], options.tokens or preset[1])
        for count in options.ranks:
            fresh = measure(shape, count, options.only or SYSTEMS, options.what or tuple(WIDTHS))
            cells += fresh
            print(f"\n{table(fresh)}\n", flush=True)
    figures = {"cells": [cell.as_json() for cell in cells]}
    report.publish(options, "memory_limit", figures, paragraphs(cells), title=TITLE, panels=panels(figures["cells"]))
