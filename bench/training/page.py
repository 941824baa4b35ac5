"""A benchmark of training: its measurements at one width after another, their files, and the page's tables and bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.contestants import Contestant
from bench.environment import Environment
from bench.report import Column, column, mebibytes
from bench.stored import Results, Source, common_source, newest, oddness
from bench.training.contest import (
    LOSS_TOLERANCE,
    Measurement,
    Record,
    Settings,
    TrainingOptions,
    by_fsdp2,
    compete,
    disagreements,
    refuse_what_does_not_fit,
    summarize,
)

Result = Mapping[str, Any]  # of one measurement, as it is stored

MILLISECONDS = column("step, ms", "median_step_seconds", spec=".0f", scale=1e3)
# What a reader of a table of steps has to know about its rows and its columns of memory.
NOTES = (
    "*x, fullshard's malloc setting*: the peer in processes that call fullshard's `keep_freed_memory` just before they "
    "shard, which fullshard does by itself. *fullshard, glibc's default malloc*: fullshard without it "
    "(`FULLSHARD_KEEP_FREED_MEMORY=0`).",
    "*Counted*: the most bytes of live tensors at a time, from a record of every allocation in one step. *Resident*: "
    "what the kernel gave the process, beyond what it held before it built its model. The difference is heap slack: "
    "freed blocks that glibc still holds, gaps between blocks, and memory that holds no tensor.",
)


def memory_columns(peer: str, end: str) -> tuple[Column, ...]:
    """What was counted before what is resident, each with its ratio to the peer's. ``end``: of the ratios' names."""
    return (
        mebibytes("counted peak, MiB", "counted_bytes"),
        column(f"/ {peer}", f"counted_ratio{end}"),
        mebibytes("resident peak over baseline, MiB", "peak_over_baseline_bytes"),
        column(f"/ {peer}", f"peak_over_baseline_ratio{end}"),
    )


FINAL_LOSS = column("final loss", "final_loss", spec=".6f")


@dataclass(frozen=True)
class Benchmark:
    """Measurements that share tables and bars, and a page's block per width.

    Args:
        name: Of the files and of the block.
        measurements: In the order of the page.
        columns: Of the table.
        panel: Of the plot: its title, and the key of an entry.
        shown: Contestants in the plot.
        title: Of the plot, without the width.
        references: Whom a contestant is measured by, of those that ran.
        notes: More paragraphs.
        trainer: The module of a rank.
        figures: More of the JSON.
    """

    name: str
    measurements: Sequence[Measurement]
    columns: Sequence[Column]
    title: str
    panel: tuple[str, str] | None = None
    shown: Sequence[str] = ()
    references: Callable[[Contestant, Mapping[str, Record]], Mapping[str, str]] = by_fsdp2
    notes: Callable[[Mapping[str, Result]], Sequence[str]] = lambda results: ()
    trainer: str = "bench.training.trainer"
    figures: Callable[[], Mapping[str, object]] = dict

    @property
    def by_name(self) -> dict[str, Measurement]:
        return {measurement.name: measurement for measurement in self.measurements}

    @property
    def contestants(self) -> tuple[str, ...]:
        """All that can take part in something."""
        found = (each for m in self.measurements for each in (*m.contestants, *m.optional))
        return tuple(dict.fromkeys(each if isinstance(each, str) else each.name for each in found))

    def parts(self, what: str, width: int) -> tuple[object, ...]:
        """Of the name of a file."""
        return (what, width) if len(self.measurements) > 1 else (width,)

    def label(self, what: str, name: str) -> str:
        return f"{what}, {name}" if len(self.measurements) > 1 else name


def run(benchmark: Benchmark, options: TrainingOptions, what: Sequence[str] = ()) -> bool:
    """Measure at all widths. True if all losses agreed."""
    agreed = True
    for width in options.width:
        for name in what or benchmark.by_name:
            measurement = benchmark.by_name[name]
            contestants = measurement.chosen(options.only)
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
    references = {each.name: benchmark.references(each, records) for each in contestants}
    figures = {
        "settings": asdict(settings),
        **benchmark.figures(),
        "loss_tolerance": LOSS_TOLERANCE,
        "losses_that_disagree": wrong,
        "contestants": summarize(records, references),
        "not_run": failures,
    }
    for name, record in records.items():
        verdict = f"  WRONG by {wrong[name]:.1e}" if name in wrong else ""
        print(f"  loss after {len(record.losses)} steps, {name:28} {record.losses[-1]:.6f}{verdict}")
    report.store(options, benchmark.name, figures, *benchmark.parts(settings.what, settings.width))
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return bool(records) and not wrong


# ------------------------------------------------------------------ the page


def latest_results(benchmark: Benchmark, results: Results, width: int) -> dict[str, Result]:
    """The newest results of a width by measurement."""
    names = {what: f"{benchmark.name}_{'_'.join(map(str, benchmark.parts(what, width)))}" for what in benchmark.by_name}
    found = {what: results[name].result for what, name in names.items() if name in results}
    return {what: each for what, each in found.items() if each["contestants"]}


def widths(benchmark: Benchmark, results: Results) -> list[int]:
    """Those that were measured."""
    mine = [each.result for each in results.values() if each.result["benchmark"] == benchmark.name]
    found = {result["settings"]["width"] for result in mine}
    return sorted(width for width in found if latest_results(benchmark, results, width))


def _write_page(benchmark: Benchmark, width: int, options: TrainingOptions) -> None:
    stored = newest(options.results)
    results = latest_results(benchmark, stored, width)
    if not results:
        print("no times are reported: losses disagree, or nobody ran")
        return
    image, title = draw(benchmark, results, options.results, width)
    told = paragraphs(benchmark, results, common_source(stored))
    report.write_page(options, f"{benchmark.name}:{width}", told, image, title)


def draw(benchmark: Benchmark, results: Mapping[str, Result], folder: Path, width: int) -> tuple[Path | None, str]:
    """Plot what was measured at a width. The file, and the title."""
    machine = Environment(**next(iter(results.values()))["environment"]).name
    title = f"{benchmark.title} at width {width}"
    alone = len(benchmark.shown) == 1  # whose name is that of the plot then
    entries = {
        what.replace("_", " ") if alone else benchmark.label(what, name): result["contestants"][name]
        for what, result in results.items()
        for name in benchmark.shown
        if name in result["contestants"]
    }
    panels = report.bars(entries, {benchmark.panel[0]: (benchmark.panel[1],)}) if benchmark.panel else ()
    return report.plot(folder / f"{benchmark.name}_{width}_{machine}.png", title, panels), title


def _entries(benchmark: Benchmark, results: Mapping[str, Result]) -> dict[str, Mapping[str, Any]]:
    """All contestants of all measurements, by their names in table and plot."""
    return {
        benchmark.label(what, name): entry
        for what, result in results.items()
        for name, entry in result["contestants"].items()
    }


def table(benchmark: Benchmark, results: Mapping[str, Result]) -> str:
    """One row per measurement and contestant."""
    first = "contestant" if len(benchmark.measurements) == 1 else "measurement, contestant"
    failures = [benchmark.label(what, name) for what, result in results.items() for name in result["not_run"]]
    return report.table(first, _entries(benchmark, results), benchmark.columns, failures)


def paragraphs(benchmark: Benchmark, results: Mapping[str, Result], common: Source | None) -> list[str]:
    """What stands between the markers of one width, but for the plot. ``common``: the source of most results."""
    settings = {what: result["settings"] for what, result in results.items()}
    threads = " or ".join(sorted({str(each["threads"]) for each in settings.values()}))
    shapes = "; ".join(_shape_text(benchmark.by_name[what], each) for what, each in settings.items())
    provenances: dict[str, list[str]] = {}
    for what, result in results.items():
        environment = Environment(**result["environment"])
        odd = oddness(Source(environment.commit, environment.cpu), common)
        provenances.setdefault(report.provenance(environment, odd), []).append(what)
    width = next(iter(settings.values()))["width"]
    return [
        f"GPT of width {width}, AdamW, threads per rank: {threads}. {shapes}.",
        table(benchmark, results),
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
