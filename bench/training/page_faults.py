"""What it costs to free large buffers and fill them anew: page faults and processor time per step, on gloo CPU ranks.

The same GPT trains with fullshard under several settings of the C allocator (``keep_freed_memory``), in turns, beside
FSDP2 if it is asked for. A page fault costs the time to map a page and to fill it with zeros; their number does not
depend on what else the machine does, nor much does the processor time of a step, so both say more than the step's
duration on a busy one. ``huge pages``: torch's own ``THP_MEM_ALLOC_ENABLE=1``, which asks the kernel for pages of 2 MiB
under larger blocks.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.command_line import DOCUMENT, UsageError, option
from bench.command_line import Options as SharedOptions
from bench.contestants import FSDP2, FULLSHARD, NOT_KEPT, WRAPPER, WRAPPER_FLAT, Contestant
from bench.report import cell, mebibytes, spread_cell
from bench.statistics import paired_spread, spread
from bench.training import trainer
from bench.training.contest import Record, Settings, compete

UNTOUCHED = "untouched"
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
MEBIBYTE = 2**20
PAGE = DOCUMENT.with_name("memory.md")


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Two systems, three settings each."""

    only: tuple[str, ...] = option((FULLSHARD, WRAPPER_FLAT), choices=(FULLSHARD, FSDP2, WRAPPER, WRAPPER_FLAT))
    keep: tuple[str, ...] = option(("0", "16", "32"), "MiB the allocator keeps; 0: untouched, 16+huge: huge pages.")
    width: int = 1024
    blocks: int = 8
    tokens: int = 64
    ranks: int = 2
    rounds: int = 5
    steps_per_round: int = 1
    document: Path = PAGE


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
            raise UsageError(f"expected MiB that are kept, such as 16, or 16+huge, got {text!r}")
        return cls(int(kept), bool(more))

    def contestant(self, system: str) -> Contestant:
        environment = {**({} if self.kept else NOT_KEPT), **(HUGE_PAGES if self.huge_pages else {})}
        return Contestant(f"{system}, {self.name}", system, environment)


class Trainer(trainer.Trainer):
    """Beside what a step costs in time: page faults without input or output, and processor time of all threads."""

    def __init__(self, assignment: trainer.Assignment, kept: Mapping[str, int]) -> None:
        self._kept_bytes = MEBIBYTE * kept[assignment.contestant.name]
        self.counted: dict[str, list[float]] = {"faults": [], "user_seconds": [], "system_seconds": []}
        super().__init__(assignment)

    def build(self) -> None:
        if self._kept_bytes:
            from fullshard.allocator import keep_freed_memory

            if not keep_freed_memory(self._kept_bytes):
                raise RuntimeError("the allocator does not take the setting")
        super().build()

    def run(self, steps: int) -> dict[str, object]:
        """Train; the first call is the warm-up, which is not counted."""
        warm = self.step > 0
        before = resource.getrusage(resource.RUSAGE_SELF)
        answer = super().run(steps)
        after = resource.getrusage(resource.RUSAGE_SELF)
        if warm:
            for name, field in (("faults", "ru_minflt"), ("user_seconds", "ru_utime"), ("system_seconds", "ru_stime")):
                self.counted[name].append((getattr(after, field) - getattr(before, field)) / steps)
        return answer

    def memory(self) -> dict[str, object]:
        """Bytes; and per round, and step of it, faults and seconds."""
        return {**super().memory(), **self.counted}


def build(kept: Mapping[str, int], **given: Any) -> Trainer:
    return Trainer(trainer.Assignment.of(**given), kept)


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
    header = ["contestant, blocks kept", "page faults per step", "kernel time, ms", "processor time, ms", "/ untouched"]
    header += ["step / untouched", "peak over baseline, MiB", "/ untouched"]
    rows = [
        [
            name,
            f"{entry['faults']['median']:,.0f}",
            f"{1e3 * entry['system_seconds']['median']:.0f}",
            f"{1e3 * entry['processor_seconds']['median']:.0f}",
            spread_cell(entry.get("processor_seconds_ratio")),
            spread_cell(entry.get("seconds_ratio")),
            mebibytes(entry["peak_over_baseline_bytes"]),
            cell(entry.get("peak_ratio"), ".2f"),
        ]
        for name, entry in summary.items()
    ]
    return report.markdown_table(header, rows, failures)


def run(options: Options) -> None:
    """Train with several settings of the allocator, in turns."""
    chosen = [Setting.parse(text) for text in options.keep]
    given = {name: getattr(options, name) for name in ("width", "blocks", "tokens", "ranks", "rounds")}
    settings = Settings(
        what="step", microbatches=1, threads=1, warmup_steps=2, steps_per_round=options.steps_per_round, **given
    )
    records: dict[str, Record] = {}
    failures: dict[str, str] = {}
    for system in options.only:  # one after another, for memory's sake: nothing is compared between systems
        kept = {setting.contestant(system).name: setting.kept for setting in chosen}
        contestants = [setting.contestant(system) for setting in chosen]
        found, failed = compete(contestants, settings, __name__, kept=kept)
        records.update(found)
        failures.update(failed)
    summary = summarise(records)
    paragraphs = [
        f"GPT of {settings.blocks} blocks of width {settings.width}, {settings.tokens} tokens per rank (sequences of "
        f"{settings.shape.sequence}), fp32, AdamW, {settings.ranks} gloo ranks; {settings.rounds} rounds of "
        f"{settings.steps_per_round} steps. A fault maps one page of 4 KiB (with huge pages: one of 2 MiB); times are "
        "per rank and step, all threads.",
        table(summary, failures),
        *report.could_not_run(failures),
    ]
    figures = {"settings": asdict(settings), "contestants": summary, "not_run": failures}
    report.publish(options, "page_faults", figures, paragraphs)
