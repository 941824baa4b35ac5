"""A benchmark of training: its measurements at one width after another, their files, and the page's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import report
from bench.contestants import Contestant
from bench.environment import Environment
from bench.report import Column, column, mebibytes
from bench.results import Results, StoredResult, common_source, newest, oddness, store
from bench.training import contest
from bench.training.contest import Measurement, Record, Settings, TrainingOptions

MILLISECONDS = column("step, ms", "median_step_seconds", spec=".0f", scale=1e3)
FINAL_LOSS = column("final loss", "final_loss", spec=".6f")
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


def sent_columns(peer: str, end: str) -> tuple[Column, ...]:
    sent = mebibytes("sent per rank, MiB", "sent_bytes_per_step", spec=".1f")
    return sent, column(f"/ {peer}", f"sent_ratio{end}")


@dataclass(frozen=True)
class Benchmark:
    """Measurements that share a table, and a page's block per width."""

    name: str  # of the files and of the block
    measurements: Sequence[Measurement]  # in the order of the page
    columns: Sequence[Column]
    # Whom a contestant is measured by, of those that ran, by the end of the ratios' names.
    references: Callable[[Contestant, Mapping[str, Record]], Mapping[str, str]] = contest.by_fsdp2
    notes: Sequence[str] = NOTES  # more paragraphs

    @property
    def by_name(self) -> dict[str, Measurement]:
        return {measurement.name: measurement for measurement in self.measurements}

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for each in self.measurements for name in each.contestants))

    def parts(self, what: str, width: int) -> tuple[object, ...]:
        return (what, width) if len(self.measurements) > 1 else (width,)

    def label(self, what: str, name: str) -> str:
        return f"{what}, {name}" if len(self.measurements) > 1 else name


def run(benchmark: Benchmark, options: TrainingOptions, what: Sequence[str] = ()) -> bool:
    """Measure at all widths. True if all losses agreed."""
    agreed = True
    for width in options.width:
        for name in what or benchmark.by_name:
            measurement = benchmark.by_name[name]
            if contestants := measurement.chosen(options.only):
                agreed &= _measure(benchmark, Settings.of(measurement, width, options), contestants, options)
            else:
                print(f"{name}: none of the contestants asked for takes part")
        stored = newest(options.results)
        if latest_results(benchmark, stored, width):
            report.show(options, f"{benchmark.name}:{width}", block(benchmark, stored, width))
        else:
            print("no times are reported: losses disagree, or nobody ran")
    return agreed


def _measure(
    benchmark: Benchmark, settings: Settings, contestants: Sequence[Contestant], options: TrainingOptions
) -> bool:
    """Compete, and write the result; no times are reported of a run whose losses disagree."""
    contest.refuse_what_does_not_fit(settings, len(contestants))
    names = ", ".join(contestant.name for contestant in contestants)
    print(f"{settings.what}, width {settings.width}: {names}", flush=True)
    records, failures = contest.compete(contestants, settings)
    wrong = contest.disagreements(records)
    references = {each.name: benchmark.references(each, records) for each in contestants}
    figures = {
        "settings": asdict(settings),
        "loss_tolerance": contest.LOSS_TOLERANCE,
        "losses_that_disagree": wrong,
        "contestants": contest.summarize(records, references),
        "not_run": failures,
    }
    for name, record in records.items():
        verdict = f"  WRONG by {wrong[name]:.1e}" if name in wrong else ""
        print(f"  loss after {len(record.losses)} steps, {name:28} {record.losses[-1]:.6f}{verdict}")
    store(options, benchmark.name, figures, *benchmark.parts(settings.what, settings.width))
    return bool(records) and not wrong


# ------------------------------------------------------------------ the page


def latest_results(benchmark: Benchmark, results: Results, width: int) -> dict[str, StoredResult]:
    """The newest results of a width by measurement."""
    names = {what: f"{benchmark.name}_{'_'.join(map(str, benchmark.parts(what, width)))}" for what in benchmark.by_name}
    found = {what: results[name] for what, name in names.items() if name in results}
    return {what: each for what, each in found.items() if each.result["contestants"]}


def widths(benchmark: Benchmark, results: Results) -> list[int]:
    mine = [each.result for each in results.values() if each.result["benchmark"] == benchmark.name]
    found = {result["settings"]["width"] for result in mine}
    return sorted(width for width in found if latest_results(benchmark, results, width))


def block(benchmark: Benchmark, results: Results, width: int) -> str:
    """What stands between the markers of one width: one row per measurement and contestant."""
    found, common = latest_results(benchmark, results, width), common_source(results)
    settings = {what: each.result["settings"] for what, each in found.items()}
    threads = " or ".join(sorted({str(each["threads"]) for each in settings.values()}))
    shapes = "; ".join(_shape_text(benchmark.by_name[what], each) for what, each in settings.items())
    entries, failed, reasons = {}, [], []
    provenances: dict[str, list[str]] = {}
    for what, each in found.items():
        entries |= {benchmark.label(what, name): entry for name, entry in each.result["contestants"].items()}
        failed += [benchmark.label(what, name) for name in each.result["not_run"]]
        reasons += [f"`{what}`: {line}" for line in report.could_not_run(each.result["not_run"])]
        environment: Environment = each.environment
        provenances.setdefault(report.provenance(environment, oddness(each.source, common)), []).append(what)
    first = "contestant" if len(benchmark.measurements) == 1 else "measurement, contestant"
    paragraphs = [
        f"GPT of width {width}, AdamW, threads per rank: {threads}. {shapes}.",
        report.table(first, entries, benchmark.columns, failed),
        *benchmark.notes,
        *reasons,
        *(line if len(provenances) == 1 else f"`{', '.join(whats)}`: {line}" for line, whats in provenances.items()),
    ]
    return "\n\n".join(paragraphs)


def _shape_text(measurement: Measurement, settings: Mapping[str, Any]) -> str:
    microbatches = settings.get("microbatches", 1)
    batch = f"{settings['tokens']} tokens" if microbatches == 1 else f"{microbatches} x {settings['tokens']} tokens"
    return (
        f"`{measurement.name}` ({measurement.title}): {settings['blocks']} blocks, {batch} per rank, "
        f"{settings['ranks']} ranks, {settings['rounds']} rounds of {settings['steps_per_round']}"
    )
