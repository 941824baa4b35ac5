"""What it costs to free large buffers and fill them anew: page faults and processor time per step, on gloo CPU ranks.

    python -m bench.memory_limit_faults --write-document

The same GPT trains with fullshard under several settings of the C allocator (``keep_freed_memory``), in turns, beside
FSDP2. A page fault costs the time to map a page and to fill it with zeros; their number does not depend on what else
the machine does, nor much does the processor time of a step, so both say more than the step's duration on a busy one.
``huge pages``: torch's own ``THP_MEM_ALLOC_ENABLE=1``, which asks the kernel for pages of 2 MiB under larger blocks.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.comparison import Record
from bench.contestants import FSDP2, FULLSHARD, WRAPPER, WRAPPER_FLAT, Contestant, process_environment
from bench.environment import Environment, current_environment
from bench.memory_limit_faults_worker import FaultsAssignment
from bench.models import GPTShape
from bench.statistics import paired_spread, spread
from bench.teams import Launch, Turns, console, take_turns

DOCUMENT = report.DOCUMENT.parent / "memory.md"
UNTOUCHED = "untouched"
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Setting:
    """How the allocator of a contestant's processes is set. ``kept`` in MiB; 0: untouched."""

    kept: int
    huge_pages: bool = False

    @property
    def name(self) -> str:
        text = f"{self.kept} MiB" if self.kept else UNTOUCHED
        return f"{text}, huge pages" if self.huge_pages else text

    @classmethod
    def parse(cls, text: str) -> Setting:
        """``16``, ``0`` or ``16+huge``."""
        kept, _, more = text.partition("+")
        if not kept.isdigit() or more not in ("", "huge"):
            raise typer.BadParameter(f"expected MiB that are kept, such as 16, or 16+huge, got {text!r}")
        return cls(int(kept), bool(more))


@dataclass(frozen=True)
class Settings:
    """One run."""

    width: int
    blocks: int
    tokens: int
    ranks: int
    rounds: int
    steps_per_round: int
    warmup_steps: int = 2


def launch_of(system: str, setting: Setting, settings: Settings, folder: Path) -> Launch:
    """One contestant's processes."""
    name = f"{system}, {setting.name}"
    environment = {} if setting.kept else {"FULLSHARD_KEEP_FREED_MEMORY": "0"}
    contestant = Contestant(name, system, {**environment, **(HUGE_PAGES if setting.huge_pages else {})})
    store = str(folder / f"{system}.{setting.kept}.{setting.huge_pages}.store")
    assignments = [
        FaultsAssignment(
            contestant=system,
            rank=rank,
            ranks=settings.ranks,
            store=store,
            threads=1,
            width=settings.width,
            blocks=settings.blocks,
            tokens=settings.tokens,
            learning_rate=1e-3,
            kept_bytes=setting.kept * MEBIBYTE,
        ).as_argument()
        for rank in range(settings.ranks)
    ]
    return Launch(name, "bench.memory_limit_faults_worker", process_environment(contestant, 1), assignments)


def summarise(records: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """JSON-ready: medians over rounds of the ranks' means, and ratios to the same system's untouched allocator."""
    rounds = {name: _rounds(record) for name, record in records.items()}
    summary = {}
    for name, record in records.items():
        mine = rounds[name]
        entry: dict[str, Any] = {key: spread(values).as_json() for key, values in mine.items()}
        entry["peak_over_baseline_bytes"] = record.peak_over_baseline
        base = f"{name.partition(',')[0]}, {UNTOUCHED}"
        if base in rounds:
            for key in ("processor_seconds", "seconds"):
                entry[f"{key}_ratio"] = paired_spread(mine[key], rounds[base][key]).as_json()
            peaks = record.peak_over_baseline, records[base].peak_over_baseline
            entry["peak_ratio"] = peaks[0] / peaks[1] if peaks[0] and peaks[1] else None
        summary[name] = entry
    return summary


def _rounds(record: Record) -> dict[str, list[float]]:
    def mean(field: str) -> list[float]:
        return [statistics.fmean(ranks) for ranks in zip(*(rank[field] for rank in record.memory), strict=True)]

    user, system = mean("user_seconds"), mean("system_seconds")
    return {
        "faults": mean("faults"),
        "system_seconds": system,
        "processor_seconds": [a + b for a, b in zip(user, system, strict=True)],
        "seconds": [statistics.median(steps) for steps in record.seconds],
    }


def table(summary: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> str:
    header = [
        "contestant, blocks kept",
        "page faults per step",
        "kernel time, ms",
        "processor time, ms",
        "/ untouched",
        "step / untouched",
        "peak over baseline, MiB",
        "/ untouched",
    ]
    rows = []
    for name, entry in summary.items():
        ratio = {key: entry.get(f"{key}_ratio") for key in ("processor_seconds", "seconds", "peak")}
        peak = entry["peak_over_baseline_bytes"]
        rows.append(
            [
                name,
                f"{entry['faults']['median']:,.0f}",
                f"{1e3 * entry['system_seconds']['median']:.0f}",
                f"{1e3 * entry['processor_seconds']['median']:.0f}",
                _ratio(ratio["processor_seconds"]),
                _ratio(ratio["seconds"]),
                "-" if peak is None else f"{peak / MEBIBYTE:.0f}",
                "-" if ratio["peak"] is None else f"{ratio['peak']:.2f}",
            ]
        )
    rows += [[name, "cannot run", *["-"] * (len(header) - 2)] for name in failures]
    return report.markdown_table(header, rows)


def _ratio(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.2f} ({found['lower_quartile']:.2f} to {found['upper_quartile']:.2f})"


def document_block(settings: Settings, text: str, failures: Mapping[str, str], environment: Environment) -> str:
    """What stands between the markers."""
    shape = GPTShape(settings.width, settings.blocks, settings.tokens)
    lines = [
        f"GPT of {settings.blocks} blocks of width {settings.width}, {settings.tokens} tokens per rank (sequences of "
        f"{shape.sequence}), fp32, AdamW, {settings.ranks} gloo ranks; {settings.rounds} rounds of "
        f"{settings.steps_per_round} steps. A fault maps one page of 4 KiB (with huge pages: one of 2 MiB); times are "
        "per rank and step, all threads.",
        "",
        text,
        "",
        *(f"`{name}` could not run: {reason}." for name, reason in failures.items()),
        report.provenance(environment),
    ]
    return "\n".join(lines)


def main(
    system: Annotated[list[str] | None, typer.Option(help="System; repeat for several.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="MiB kept, 0 for none, 16+huge with huge pages.")] = None,
    width: Annotated[int, typer.Option(help="Model width.")] = 1024,
    blocks: Annotated[int, typer.Option(help="Transformer blocks.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per rank and step.")] = 64,
    ranks: Annotated[int, typer.Option(min=1, help="Processes per contestant.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 5,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 1,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = report.RESULTS,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = DOCUMENT,
    write_document: Annotated[bool, typer.Option(help="Write the table into the page.")] = False,
) -> None:
    """Train with several settings of the allocator, in turns."""
    chosen = [Setting.parse(text) for text in keep or ("0", "16", "32")]
    systems = system or [FULLSHARD, WRAPPER_FLAT]
    unknown = set(systems) - {FULLSHARD, FSDP2, WRAPPER, WRAPPER_FLAT}
    if unknown:
        raise typer.BadParameter(f"unknown system {', '.join(sorted(unknown))}")
    settings = Settings(width, blocks, tokens, ranks, rounds, steps_per_round)
    records: dict[str, Record] = {}
    failures: dict[str, str] = {}
    for each in systems:  # one after another, for memory's sake: nothing is compared between systems
        with tempfile.TemporaryDirectory() as folder:
            launches = [launch_of(each, setting, settings, Path(folder)) for setting in chosen]
            turns = Turns(settings.warmup_steps, rounds, steps_per_round)
            found, failed = take_turns(launches, turns, Path(folder))
            records.update(found)
            failures.update(failed)
    summary = summarise(records)
    environment = current_environment()
    path = results / f"page_faults_{environment.name}.json"
    report.write_json(
        path,
        {
            "benchmark": "memory_limit_faults",
            "settings": asdict(settings),
            "environment": environment.as_json(),
            "contestants": summary,
            "not_run": failures,
        },
    )
    text = table(summary, failures)
    console.print(f"\n{text}\n", markup=False, soft_wrap=True)
    if write_document:
        report.update_document(document, "page_faults", document_block(settings, text, failures, environment))
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    # Killed from outside, still end the workers: the finally blocks run on SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
