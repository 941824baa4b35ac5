"""A training step of fullshard beside torch FSDP1, FSDP2, DDP and the unsharded model, on gloo CPU ranks.

Every contestant has one process per rank, all alive in one run; they take turns, so that never two compute at
once and a drift of the machine touches all of them alike. A turn is ``--steps-per-round`` steps; a round
gives every contestant one turn, and the order changes every round. Losses come first: a contestant that
trains something else has no step time worth reporting.

Memory is the high-water mark of a rank's resident memory over its training steps, warm-up included, and the
same minus what the process held before it built its model (interpreter, torch, process group).
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.command_line import option
from bench.report import column, mebibytes
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions
from bench.training.page import FINAL_LOSS, MILLISECONDS, Benchmark

NAMES = ("unsharded", "ddp", "fsdp1", "fsdp1+malloc", "fsdp2", "fsdp2+malloc", "fullshard", "fullshard-malloc")
# Eight blocks of width 1024 would need 30 GB for all contestants at once, and would not finish in a few minutes.
BLOCKS = {512: 6, 1024: 4}
NOTE = (
    "`+malloc`: the peer in a process whose allocator keeps freed memory (`MALLOC_MMAP_MAX_=0`, "
    "`MALLOC_TRIM_THRESHOLD_`, `MALLOC_TOP_PAD_`); `fullshard, default malloc`: fullshard without its own such "
    "policy (`FULLSHARD_KEEP_FREED_MEMORY=0`). `unsharded` exchanges nothing, so each rank trains alone."
)
STEP = Benchmark(
    name="step",
    measurements=(Measurement("step", "a training step in fp32", NAMES, blocks=BLOCKS),),
    columns=(
        MILLISECONDS,
        column("step / FSDP2", "time_ratio_to_fsdp2"),
        column("step / better of FSDP1, FSDP2", "time_ratio_to_better_peer"),
        column("step / better of them keeping freed memory", "time_ratio_to_better_peer_keeping_memory"),
        mebibytes("peak over baseline, MiB", "peak_over_baseline_bytes"),
        column("/ FSDP2", "peak_over_baseline_ratio_to_fsdp2"),
        mebibytes("peak, MiB", "peak_bytes"),
        FINAL_LOSS,
    ),
    panels={
        "step time / FSDP2": "time_ratio_to_fsdp2",
        "step time / better of FSDP1 and FSDP2": "time_ratio_to_better_peer",
        "peak memory over baseline / FSDP2": "peak_over_baseline_ratio_to_fsdp2",
    },
    title="A step",
    notes=lambda results: [NOTE],
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """All contestants at both widths: about five minutes on two cores."""

    only: tuple[str, ...] = option((), choices=STEP.contestants)


def run(options: Options) -> bool:
    return page.run(STEP, options)
