"""A benchmark of training: its measurements at one width after another, their files, and the page's tables and bars."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.contestants import CONTESTANTS, Contestant
from bench.environment import Environment, current_environment
from bench.report import cell, mebibytes, spread_cell, spread_of
from bench.statistics import Spread
from bench.training.contest import (
    LOSS_TOLERANCE,
    Measurement,
    Record,
    Settings,
    TrainingOptions,
    compete,
    disagreements,
    references_of_steps,
    refuse_what_does_not_fit,
    summarise,
)

Result = Mapping[str, Any]  # of one measurement, as it is stored
Column = tuple[str, Callable[[Mapping[str, Any]], str]]  # header, and the cell of a contestant's entry
References = Callable[[str, Mapping[str, Record]], Mapping[str, str]]


def milliseconds(header: str = "step, ms") -> Column:
    return header, lambda entry: f"{1e3 * entry['median_step_seconds']:.0f}"


def time_ratio(header: str, end: str) -> Column:
    return header, lambda entry: spread_cell(entry.get(f"time_ratio{end}"))


def amount(header: str, key: str, spec: str = ".0f") -> Column:
    return header, lambda entry: mebibytes(entry.get(key), spec)


def ratio(header: str, key: str) -> Column:
    return header, lambda entry: cell(entry.get(key), ".2f")


FINAL_LOSS: Column = ("final loss", lambda entry: f"{entry['final_loss']:.6f}")


def by_fsdp2(_: str, records: Mapping[str, Record]) -> Mapping[str, str]:
    """FSDP2, and the better one of it and FSDP1."""
    return references_of_steps(records)


@dataclass(frozen=True)
class Benchmark:
    """Measurements that share tables and bars, and a page's block per width.

    Args:
        name: Of the files and of the block.
        measurements: In the order of the page.
        columns: Of the table.
        panels: Of the plot: title -> key of an entry.
        title: Of the plot, without the width.
        references: Whom a contestant is measured by.
        verdicts: Figures beside their targets.
        notes: More paragraphs.
        trainer: The module of a rank.
        figures: More of the JSON.
    """

    name: str
    measurements: Mapping[str, Measurement]
    columns: Sequence[Column]
    panels: Mapping[str, str]
    title: str
    references: References = by_fsdp2
    verdicts: Callable[[Mapping[str, Result]], Iterable[str]] = lambda results: ()
    notes: Callable[[Mapping[str, Result]], Sequence[str]] = lambda results: ()
    trainer: str = "bench.training.trainer"
    figures: Callable[[], Mapping[str, object]] = dict

    @property
    def contestants(self) -> tuple[str, ...]:
        """All that can take part in something."""
        found = (name for each in self.measurements.values() for name in (*each.contestants, *each.optional))
        return tuple(dict.fromkeys(found))

    def parts(self, what: str, width: int) -> tuple[object, ...]:
        """Of the name of a file."""
        return (what, width) if len(self.measurements) > 1 else (width,)

    def label(self, what: str, name: str) -> str:
        return f"{what}, {name}" if len(self.measurements) > 1 else name


def contestants_of(measurement: Measurement, only: Sequence[str] = ()) -> list[Contestant]:
    """The measurement's contestants, or those asked for that take part in it."""
    able = {*measurement.contestants, *measurement.optional}
    return [CONTESTANTS[name] for name in only or measurement.contestants if name in able]


def run(benchmark: Benchmark, options: TrainingOptions, what: Sequence[str] = ()) -> bool:
    """Measure at all widths. True if all losses agreed."""
    agreed = True
    for width in options.width:
        for name in what or benchmark.measurements:
            measurement = benchmark.measurements[name]
            contestants = contestants_of(measurement, options.only)
            if not contestants:
                print(f"{name}: none of the contestants asked for takes part")
                continue
            agreed &= _measure(benchmark, Settings.of(measurement, width, options), contestants, options)
        _write_page(benchmark, width, options)
    return agreed


def _measure(
    benchmark: Benchmark, settings: Settings, contestants: Sequence[Contestant], options: TrainingOptions
) -> bool:
    """Compete, and write the result; no times are reported of a run whose losses disagree."""
    refuse_what_does_not_fit(settings, len(contestants))
    started = time.monotonic()
    names = ", ".join(contestant.name for contestant in contestants)
    print(f"{settings.what}, width {settings.width}: {names}", flush=True)
    records, failures = compete(contestants, settings, benchmark.trainer)
    wrong = disagreements(records)
    figures = {
        "settings": asdict(settings),
        **benchmark.figures(),
        "loss_tolerance": LOSS_TOLERANCE,
        "losses_that_disagree": wrong,
        "contestants": summarise(records, lambda name: benchmark.references(name, records)),
        "not_run": failures,
    }
    for name, record in records.items():
        verdict = f"  WRONG by {wrong[name]:.1e}" if name in wrong else ""
        print(f"  loss after {len(record.losses)} steps, {name:28} {record.losses[-1]:.6f}{verdict}")
    report.store(options, benchmark.name, figures, *benchmark.parts(settings.what, settings.width))
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return bool(records) and not wrong


# ------------------------------------------------------------------ the page


def latest_results(benchmark: Benchmark, folder: Path, width: int, machine: str) -> dict[str, Result]:
    """The stored results of a width on this kind of machine, those with agreeing losses, by measurement."""
    found = {}
    for what in benchmark.measurements:
        parts = "_".join(map(str, benchmark.parts(what, width)))
        path = folder / f"{benchmark.name}_{parts}_{machine}.json"
        if path.exists():
            found[what] = json.loads(path.read_text(encoding="utf-8"))
    return {what: each for what, each in found.items() if each["contestants"] and not each["losses_that_disagree"]}


def _write_page(benchmark: Benchmark, width: int, options: TrainingOptions) -> None:
    machine = current_environment().name
    results = latest_results(benchmark, options.results, width, machine)
    if not results:
        print("no times are reported: losses disagree, or nobody ran")
        return
    image = options.results / f"{benchmark.name}_{width}_{machine}.png"
    drawn = report.plot_bars(image, f"{benchmark.title}, width {width} (whiskers: quartiles)", bars(benchmark, results))
    text = f"{benchmark.title} at width {width}"
    marker = f"{benchmark.name}:{width}"
    report.write_page(options, marker, paragraphs(benchmark, results), image if drawn else None, text)


def table(benchmark: Benchmark, results: Mapping[str, Result]) -> str:
    """One row per measurement and contestant."""
    header = ["contestant" if len(benchmark.measurements) == 1 else "measurement, contestant"]
    rows, failures = [], []
    for what, result in results.items():
        for name, entry in result["contestants"].items():
            rows.append([benchmark.label(what, name), *(text(entry) for _, text in benchmark.columns)])
        failures += [benchmark.label(what, name) for name in result["not_run"]]
    return report.markdown_table([*header, *(each for each, _ in benchmark.columns)], rows, failures)


def bars(benchmark: Benchmark, results: Mapping[str, Result]) -> list[report.Panel]:
    """Ratios of everyone who is not the reference itself."""
    panels = []
    for title, key in benchmark.panels.items():
        values: dict[str, float | Spread] = {}
        for what, result in results.items():
            for name, entry in result["contestants"].items():
                found = entry.get(key)
                if isinstance(found, Mapping) and found.get("reference") != name:
                    values[benchmark.label(what, name)] = spread_of(found)  # type: ignore[assignment]
                elif isinstance(found, float):
                    values[benchmark.label(what, name)] = found
        panels.append(report.Panel(title, values, 1.0))
    return panels


def paragraphs(benchmark: Benchmark, results: Mapping[str, Result]) -> list[str]:
    """What stands between the markers of one width, but for the plot."""
    settings = {what: result["settings"] for what, result in results.items()}
    threads = " or ".join(sorted({str(each["threads"]) for each in settings.values()}))
    shapes = "; ".join(_shape_text(benchmark.measurements[what], each) for what, each in settings.items())
    provenances: dict[str, list[str]] = {}
    for what, result in results.items():
        provenances.setdefault(report.provenance(Environment(**result["environment"])), []).append(what)
    width = next(iter(settings.values()))["width"]
    return [
        f"GPT of width {width}, AdamW, threads per rank: {threads}. {shapes}.",
        table(benchmark, results),
        *report.against_targets(benchmark.verdicts(results)),
        *benchmark.notes(results),
        *(f"`{what}`: {line}" for what, each in results.items() for line in report.could_not_run(each["not_run"])),
        *(line if len(provenances) == 1 else f"`{', '.join(whats)}`: {line}" for line, whats in provenances.items()),
    ]


def _shape_text(measurement: Measurement, settings: Mapping[str, Any]) -> str:
    microbatches = settings.get("microbatches", 1)
    batch = f"{settings['tokens']} tokens" if microbatches == 1 else f"{microbatches} x {settings['tokens']} tokens"
    return (
        f"`{measurement.name}` ({measurement.title}): {settings['blocks']} blocks, {batch} per rank, "
        f"{settings['ranks']} ranks, {settings['rounds']} rounds of {settings['steps_per_round']}"
    )
