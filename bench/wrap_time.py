"""Time to wrap a model of a thousand small modules, fullshard's FullyShardedDataParallel beside torch FSDP1.

    python -m bench.wrap_time
    python -m bench.wrap_time --units 100 --rounds 2 --profile fullshard-wrapper-flat    # where that time goes

A thousand units, each a 16 x 16 linear layer and a norm, that a ``ModuleWrapPolicy`` finds, on a fake process group
of 8 ranks on CPU. All contestants live in this process and take turns; a turn makes a new model (not timed), times
the constructor, then the first training step of what it made: work that a constructor puts off is in there.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from bench import report
from bench.contestants import PEER_WITH_SAME_FLAG, WRAPPING, distribute, prepare, start_fake_group
from bench.environment import current_environment
from bench.models import TinyUnit, tiny_units
from bench.statistics import Spread, paired_spread, spread, turn_order

FIGURES = {"constructor": "constructor", "first_step": "first step", "both": "both together"}
# What the constructor may take of FSDP1's with the same flag.
TARGET = 0.50

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    units: int
    ranks: int
    rounds: int
    warmup_units: int


def turn(system: str, units: int) -> dict[str, float]:
    """Seconds per figure of one new model."""
    torch.manual_seed(0)
    model = tiny_units(units)
    inputs = torch.randn(1, model[0].linear.in_features)
    gc.collect()  # what the turn before left behind
    start = time.perf_counter()
    wrapped = distribute(system, model, TinyUnit, torch.device("cpu"))
    made = time.perf_counter()
    wrapped(inputs).sum().backward()
    end = time.perf_counter()
    return {"constructor": made - start, "first_step": end - made, "both": end - start}


def compete(systems: Sequence[str], settings: Settings) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds per contestant, figure and round; the second value says why a contestant has none."""
    failures: dict[str, str] = {}
    for system in systems:
        try:
            prepare(system)
            turn(system, settings.warmup_units)  # imports, caches
        except Exception as error:
            failures[system] = f"{type(error).__name__}: {error}".splitlines()[0]
            console.print(f"[yellow]{system} cannot run: {failures[system]}")
    able = [system for system in systems if system not in failures]
    seconds: dict[str, dict[str, list[float]]] = {system: {figure: [] for figure in FIGURES} for system in able}
    for index in range(settings.rounds if able else 0):
        for system in turn_order(able, index):
            for figure, value in turn(system, settings.units).items():
                seconds[system][figure].append(value)
    return seconds, failures


def summarise(seconds: Mapping[str, Mapping[str, Sequence[float]]], units: int) -> dict[str, dict[str, Any]]:
    """JSON-ready: per contestant and figure the time and, if the peer ran, its ratio to FSDP1's with the same flag."""
    summary: dict[str, dict[str, Any]] = {name: {} for name in seconds}
    for name, times in seconds.items():
        peer = PEER_WITH_SAME_FLAG.get(name)
        for figure in FIGURES:
            mine = spread(times[figure])
            entry: dict[str, Any] = {
                "median_seconds": mine.median,
                "median_seconds_per_unit": mine.median / units,
                "seconds": list(times[figure]),
            }
            if peer is not None and peer in seconds:
                entry["ratio_to_fsdp1"] = paired_spread(times[figure], seconds[peer][figure]).as_json()
            summary[name][figure] = entry
    return summary


def ratio(entry: Mapping[str, Any]) -> Spread | None:
    found = entry.get("ratio_to_fsdp1")
    return None if found is None else Spread(**found)


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    header = ["contestant"]
    for label in FIGURES.values():
        header += [f"{label}, ms", "/ FSDP1 with the same flag"]
    rows = []
    for name, figures in summary.items():
        row = [name]
        for figure in FIGURES:
            found = ratio(figures[figure])
            row += [f"{1e3 * figures[figure]['median_seconds']:.0f}", "-" if found is None else f"{found:.2f}"]
        rows.append(row)
    rows += [[name, "cannot run", *["-"] * (len(header) - 2)] for name in failures]
    return report.markdown_table(header, rows)


def verdicts(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per wrapper of fullshard: its constructor's ratio, and whether it meets the target."""
    lines = []
    for name, figures in summary.items():
        found = ratio(figures["constructor"])
        if found is not None:
            missed = "" if found.median <= TARGET else " (missed)"
            lines.append(f"constructor, {name}: {found.median:.2f} of at most {TARGET:.2f}{missed}")
    return lines


def document_block(result: Mapping[str, Any], provenance: str, image: Path | None, document: Path) -> str:
    """What stands between the markers."""
    settings, judged = result["settings"], verdicts(result["contestants"])
    lines = [
        f"{settings['units']} units (linear 16 x 16 and norm) found by a ModuleWrapPolicy, rank 0 of "
        f"{settings['ranks']} on a fake process group, one thread; {settings['rounds']} rounds.",
        "",
        table(result["contestants"], result["not_run"]),
        "",
        *([f"Against the targets: {'; '.join(judged)}.", ""] if judged else []),
        *(f"`{name}` could not run: {reason}.\n" for name, reason in result["not_run"].items()),
        provenance,
    ]
    if image is not None:
        lines += ["", report.image_link(image, document, "Time to wrap")]
    return "\n".join(lines)


def plot(path: Path, settings: Settings, summary: Mapping[str, Mapping[str, Any]]) -> bool:
    """Bars of fullshard's wrappers, a panel per figure; False without a ratio to show."""
    panels = []
    for figure, label in FIGURES.items():
        found = {name: ratio(figures[figure]) for name, figures in summary.items()}
        values: dict[str, float | Spread] = {name: value for name, value in found.items() if value is not None}
        if values:
            panels.append(report.Panel(f"{label} / FSDP1", values, 1.0))
    if panels:
        report.plot_bars(path, f"Wrapping {settings.units} modules (whiskers: quartiles)", panels)
    return bool(panels)


def profile(system: str, settings: Settings, lines: int) -> None:
    """Print where one contestant's constructors spend their time, by the functions' own time."""
    prepare(system)
    turn(system, settings.warmup_units)
    profiler = cProfile.Profile()
    for _ in range(settings.rounds):
        model = tiny_units(settings.units)
        profiler.enable()
        distribute(system, model, TinyUnit, torch.device("cpu"))
        profiler.disable()
    console.print(f"{system}: {settings.rounds} models of {settings.units} units; calls and times are totals")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(lines)


def main(
    units: Annotated[int, typer.Option(min=1, help="Tiny units in the model.")] = 1000,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the fake process group.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 7,
    warmup_units: Annotated[int, typer.Option(min=1, help="Units of each one's first model, not timed.")] = 10,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only this of {', '.join(WRAPPING)}; repeat.")] = None,
    profile_of: Annotated[str | None, typer.Option("--profile", help="Profile this contestant instead.")] = None,
    profile_lines: Annotated[int, typer.Option(min=1, help="Lines of the profile.")] = 30,
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Compare the time that wrapping a model of many small modules takes in fullshard and in FSDP1."""
    for name in [*(only or []), *([profile_of] if profile_of else [])]:
        if name not in WRAPPING:
            raise typer.BadParameter(f"unknown contestant {name!r}; known are {', '.join(WRAPPING)}")
    settings = Settings(units, ranks, rounds, warmup_units)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake gather leaves whatever bytes were there
    start_fake_group(ranks)
    try:
        if profile_of:
            profile(profile_of, settings, profile_lines)
            return
        seconds, failures = compete([name for name in WRAPPING if not only or name in only], settings)
    finally:
        dist.destroy_process_group()
    environment = current_environment()
    summary = summarise(seconds, units)
    result = {
        "benchmark": "wrap_time",
        "settings": asdict(settings),
        "environment": environment.as_json(),
        "contestants": summary,
        "not_run": failures,
    }
    path = results / f"wrap_time_{environment.name}.json"
    report.write_json(path, result)
    console.print(f"\n{table(summary, failures)}\n", markup=False, soft_wrap=True)
    for line in verdicts(summary):
        console.print(line, soft_wrap=True)
    image = path.with_suffix(".png")
    drawn = plot(image, settings, summary)
    if write_document:
        block = document_block(result, report.provenance(environment), image if drawn else None, document)
        report.update_document(document, "wrap_time", block)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    typer.run(main)
