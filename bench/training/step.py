"""A training step of fullshard beside torch FSDP1, FSDP2, DDP and the unsharded model, on gloo CPU ranks.

Every contestant has one process per rank, all alive in one run; they take turns, so that never two compute at
once and a drift of the machine touches all of them alike. A turn is ``--steps-per-round`` steps; a round
gives every contestant one turn, and the order changes every round. Losses come first: a contestant that
trains something else has no step time worth reporting.

Memory is counted in one step that is not timed, and resident: the high-water mark over the steps after it, minus what
the process held before it built its model (interpreter, torch, process group).
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.command_line import option
from bench.contestants import DDP, FSDP1, FSDP2, FULLSHARD, TWO_KEPT, UNSHARDED, WITHOUT_OURS, with_setting
from bench.report import column
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions
from bench.training.page import FINAL_LOSS, MILLISECONDS, NOTES, Benchmark, memory_columns

NAMES = (UNSHARDED, DDP, *with_setting((FSDP1, FSDP2)), TWO_KEPT, FULLSHARD, f"{FULLSHARD}{WITHOUT_OURS}")
STEP = Benchmark(
    name="step",
    measurements=(Measurement("step", "a training step in fp32", NAMES),),
    columns=(
        MILLISECONDS,
        column("step / FSDP2", "time_ratio_to_fsdp2"),
        column("step / FSDP2 with our malloc setting", "time_ratio_to_fsdp2_with_our_malloc"),
        column("step / better of FSDP1, FSDP2", "time_ratio_to_better_peer"),
        column("step / better of them with our malloc setting", "time_ratio_to_better_peer_with_our_malloc"),
        column("step / FSDP2, its last two units kept, with our malloc setting", "time_ratio_to_two_kept"),
        *memory_columns("FSDP2", "_to_fsdp2"),
        FINAL_LOSS,
    ),
    notes=(
        *NOTES,
        "`unsharded` exchanges nothing, so each rank trains alone. fullshard keeps the last two units gathered between "
        "forward and backward; *last two units kept by hand*: so does FSDP2, by `reshard_after_forward=False`.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """All contestants at both widths: about five minutes on two cores."""

    only: tuple[str, ...] = option((), choices=STEP.contestants)


def run(options: Options) -> bool:
    return page.run(STEP, options)
