"""fullshard's FullyShardedDataParallel beside torch FSDP1, on two gloo CPU ranks.

``step``              a training step, with use_orig_params False (``-flat``) and True
``accumulation``      8 microbatches a step, all but the last in ``no_sync``; both flags
``summon``            entering and leaving ``summon_full_params(writeback=False)`` of the whole model; both flags
``summon_writeback``  the same with ``writeback=True``
``prefetch``          a step with BACKWARD_PRE, BACKWARD_POST and None; flat

Contestants take turns as in ``step``: ratios are paired per round, and a run whose losses disagree reports no times.
Every contestant is measured by its peer, FSDP1 in the same configuration. Optional contestants (``--only``):
``fsdp1+malloc`` and ``fsdp1-flat+malloc``, in processes that keep freed memory as fullshard's do, and
``fullshard-wrapper-malloc`` and ``fullshard-wrapper-flat-malloc``, which do not. The page has the latest results of all
measurements at a width on this kind of machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.command_line import option
from bench.contestants import FSDP1, FSDP1_FLAT, PREFETCHES, WRAPPER, WRAPPER_FLAT
from bench.report import column, mebibytes, verdict
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions, by_peer
from bench.training.page import FINAL_LOSS, Benchmark, Result
from bench.training.trainer import SUMMON, SUMMON_WRITEBACK

STEP, ACCUMULATION, PREFETCH = "step", "accumulation", "prefetch"
# What the wrapper's step may take of FSDP1's with the same flag, by width.
STEP_TARGETS = {512: 0.85, 1024: 0.65}
BOTH_FLAGS = (FSDP1_FLAT, WRAPPER_FLAT, FSDP1, WRAPPER)
ALLOCATORS = (f"{FSDP1}+malloc", f"{FSDP1_FLAT}+malloc", f"{WRAPPER}-malloc", f"{WRAPPER_FLAT}-malloc")

# Fewer blocks where there are more contestants than fit into 24 GiB together.
MEASUREMENTS = (
    Measurement(STEP, "a training step", BOTH_FLAGS, ALLOCATORS),
    Measurement(
        ACCUMULATION,
        "no_sync in all microbatches but the last",
        BOTH_FLAGS,
        ALLOCATORS,
        blocks={512: 6, 1024: 6},
        tokens={512: 64, 1024: 64},
        microbatches=8,
        steps_per_round=1,
    ),
    Measurement(SUMMON, "summon_full_params(writeback=False)", BOTH_FLAGS, ALLOCATORS, steps_per_round=5),
    Measurement(SUMMON_WRITEBACK, "summon_full_params(writeback=True)", BOTH_FLAGS, ALLOCATORS, steps_per_round=5),
    Measurement(
        PREFETCH,
        "backward_prefetch BACKWARD_PRE, BACKWARD_POST, None",
        tuple(f"{system}-{name}" for name in PREFETCHES for system in (FSDP1_FLAT, WRAPPER_FLAT)),
        blocks={512: 6, 1024: 4},
    ),
)


def verdicts(results: Mapping[str, Result]) -> Iterator[str]:
    """Per wrapper whose plain step has a target at this width: its ratio to FSDP1's, and whether it meets it."""
    if STEP not in results:
        return
    entries, target = results[STEP]["contestants"], STEP_TARGETS.get(results[STEP]["settings"]["width"])
    for name in (WRAPPER_FLAT, WRAPPER):
        found = entries.get(name, {}).get("time_ratio")
        if found is not None and target is not None:
            yield verdict(f"{STEP}, {name}:", found["median"], target)


BENCHMARK = Benchmark(
    name="wrapper",
    measurements=MEASUREMENTS,
    columns=(
        column("time, ms", "median_step_seconds", spec=".0f", scale=1e3),
        column("/ FSDP1 in the same configuration", "time_ratio"),
        mebibytes("peak over baseline, MiB", "peak_over_baseline_bytes"),
        column("/ FSDP1", "peak_over_baseline_ratio"),
        mebibytes("peak, MiB", "peak_bytes"),
        column("/ FSDP1", "peak_ratio"),
        mebibytes("sent per rank, MiB", "sent_bytes_per_step", spec=".1f"),
        column("/ FSDP1", "sent_ratio"),
        FINAL_LOSS,
    ),
    panels={
        "time / FSDP1 in the same configuration": "time_ratio",
        "peak over baseline / FSDP1": "peak_over_baseline_ratio",
    },
    title="The wrapper",
    references=by_peer,
    verdicts=verdicts,
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """Everything at both widths."""

    what: tuple[str, ...] = option((), choices=tuple(BENCHMARK.by_name))
    only: tuple[str, ...] = option((), choices=BENCHMARK.contestants)
    rounds: int = 7


def run(options: Options) -> bool:
    return page.run(BENCHMARK, options, options.what)
