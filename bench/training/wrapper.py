"""fullshard's FullyShardedDataParallel beside torch FSDP1, on two gloo CPU ranks.

``step``              a training step, with use_orig_params False (``-flat``) and True
``accumulation``      8 microbatches a step, all but the last in ``no_sync``; both flags
``summon``            entering and leaving ``summon_full_params(writeback=False)`` of the whole model; both flags
``summon_writeback``  the same with ``writeback=True``
``prefetch``          a step with BACKWARD_PRE, BACKWARD_POST and None; flat

Contestants take turns as in ``step``: ratios are paired per round, and a run whose losses disagree reports no times.
Every contestant is measured by its peer, FSDP1 in the same configuration, and all but those of ``prefetch`` also take
part with the other's malloc.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.command_line import option
from bench.contestants import FSDP1, FSDP1_FLAT, PREFETCHES, WITHOUT_OURS, WRAPPER, WRAPPER_FLAT, with_setting
from bench.report import column
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions, by_peer
from bench.training.page import FINAL_LOSS, Benchmark, memory_columns, sent_columns
from bench.training.trainer import SUMMON, SUMMON_WRITEBACK

STEP, ACCUMULATION, PREFETCH = "step", "accumulation", "prefetch"
OURS = tuple(each for system in (WRAPPER_FLAT, WRAPPER) for each in (system, f"{system}{WITHOUT_OURS}"))
BOTH_FLAGS = (*with_setting((FSDP1_FLAT, FSDP1)), *OURS)

MEASUREMENTS = (
    Measurement(STEP, "a training step", BOTH_FLAGS),
    Measurement(
        ACCUMULATION,
        "no_sync in all microbatches but the last",
        BOTH_FLAGS,
        tokens={512: 64, 1024: 64},
        microbatches=4,
        steps_per_round=1,
    ),
    Measurement(SUMMON, "summon_full_params(writeback=False)", BOTH_FLAGS, steps_per_round=5),
    Measurement(SUMMON_WRITEBACK, "summon_full_params(writeback=True)", BOTH_FLAGS, steps_per_round=5),
    Measurement(
        PREFETCH,
        "backward_prefetch BACKWARD_PRE, BACKWARD_POST, None",
        tuple(f"{system}-{name}" for name in PREFETCHES for system in (FSDP1_FLAT, WRAPPER_FLAT)),
    ),
)


BENCHMARK = Benchmark(
    name="wrapper",
    measurements=MEASUREMENTS,
    columns=(
        column("time, ms", "median_step_seconds", spec=".0f", scale=1e3),
        column("/ FSDP1 in the same configuration", "time_ratio"),
        column("/ FSDP1 with our malloc setting", "time_ratio_with_our_malloc"),
        *memory_columns("FSDP1", ""),
        *sent_columns("FSDP1", ""),
        FINAL_LOSS,
    ),
    references=by_peer,
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    what: tuple[str, ...] = option((), choices=tuple(BENCHMARK.by_name))
    only: tuple[str, ...] = option((), choices=BENCHMARK.contestants)
    rounds: int = 7


def run(options: Options) -> bool:
    return page.run(BENCHMARK, options, options.what)
