"""What it costs to free large buffers and fill them anew: page faults and processor time per step, on gloo CPU ranks.

The same GPT trains under several settings of the C allocator (``keep_freed_memory``), in turns, one system after
another, for nothing is compared between systems. A page fault costs the time to map a page and to fill it with zeros;
their number does not depend on what else the machine does, nor much does the processor time of a step, so both say more
than the step's duration on a busy one. ``huge pages`` (``--only``): torch's own ``THP_MEM_ALLOC_ENABLE=1``, which asks
the kernel for pages of 2 MiB under larger blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.command_line import option
from bench.contestants import FULLSHARD, NOT_KEPT, WRAPPER_FLAT, Contestant
from bench.environment import REPOSITORY
from bench.report import column, mebibytes
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions, by_peer
from bench.training.page import Benchmark

PAGE = REPOSITORY / "docs" / "how_to" / "memory.md"
UNTOUCHED = "untouched"
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
KEPT = (32, 64, 256)  # MiB
NOTE = (
    "A page fault maps one page of 4 KiB (with huge pages: one of 2 MiB). Times are per rank and step, over all "
    "threads. Ratios are to the same system with an untouched allocator."
)


def settings_of(system: str) -> Measurement:
    """The system with its allocator untouched, and with blocks that are kept."""
    kept = (Contestant(f"{size} MiB", system, peer=UNTOUCHED, kept=size) for size in KEPT)
    huge = Contestant(f"{UNTOUCHED}, huge pages", system, {**NOT_KEPT, **HUGE_PAGES}, peer=UNTOUCHED)
    return Measurement(
        system,
        "blocks that are kept",
        (Contestant(UNTOUCHED, system, NOT_KEPT, peer=UNTOUCHED), *kept),
        (huge,),
        steps_per_round=1,
    )


BENCHMARK = Benchmark(
    name="page_faults",
    measurements=(settings_of(FULLSHARD), settings_of(WRAPPER_FLAT)),
    columns=(
        column("page faults per step", "faults", "median", spec=",.0f"),
        column("kernel time, ms", "system_seconds", "median", spec=".0f", scale=1e3),
        column("processor time, ms", "processor_seconds", "median", spec=".0f", scale=1e3),
        column("/ untouched", "processor_ratio"),
        column("step / untouched", "time_ratio"),
        mebibytes("counted peak, MiB", "counted_bytes"),
        mebibytes("resident peak over baseline, MiB", "peak_over_baseline_bytes"),
        column("/ untouched", "peak_over_baseline_ratio"),
    ),
    title="Page faults",
    references=by_peer,
    notes=lambda results: [NOTE],
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """Two systems, three settings each."""

    what: tuple[str, ...] = option((), choices=tuple(BENCHMARK.by_name))
    only: tuple[str, ...] = option((), choices=BENCHMARK.contestants)
    width: tuple[int, ...] = (1024,)
    rounds: int = 5
    document: Path = PAGE


def run(options: Options) -> bool:
    return page.run(BENCHMARK, options, options.what)
