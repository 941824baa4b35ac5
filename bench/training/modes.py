"""The modes of fully_shard beside FSDP2 (and FSDP1 where it has the mode), on gloo CPU ranks.

``bf16``          parameters and compute in bf16, gradients reduced in fp32, 2 ranks
``hsdp``          a (2, 2) mesh: sharded over pairs, replicated over two of them, 4 ranks
``accumulation``  8 microbatches a step, gradients exchanged in the last only, 2 ranks; FSDP1 as well
``offload``       shards, gradients and optimizer state under the CPU offload policy, 2 ranks
``ragged``        fp32, with both of fullshard's layouts, 2 ranks

Contestants take turns as in ``step``: ratios are paired per round, and a run whose losses disagree reports no times.
Beside time and memory stands what a rank sends per step, counted by the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.command_line import option
from bench.contestants import BF16, FSDP1, FSDP2, FULLSHARD, HSDP, OFFLOAD, RAGGED, WITHOUT_OURS, with_setting
from bench.report import column
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions
from bench.training.page import FINAL_LOSS, MILLISECONDS, Benchmark, memory_columns, sent_columns

ACCUMULATION = "accumulation"
OURS = (FULLSHARD, f"{FULLSHARD}{WITHOUT_OURS}")
NAMES = (*with_setting((FSDP2,)), *OURS)

# Batches are those of the step, smaller where compute would hide the exchange: forward, backward and optimizer
# alone, without sharding, take at most three fifths of FSDP2's step at width 512 and under a third at 1024, on a CPU
# that multiplies bf16 matrices in hardware (AVX-512 BF16: 400 GFLOP/s a core beside 90 in fp32). Where it does
# not, bf16 would measure mostly the emulation. HSDP halves them because two ranks share a core. The tolerance of
# losses is that of fp32 in all modes: reductions of two summands and divisions by powers of two round alike.
MODES = (
    Measurement(BF16, "parameters gathered in bf16, gradients reduced in fp32", NAMES),
    Measurement(HSDP, "mesh (2, 2) of replicate and shard axis", NAMES, tokens={512: 128, 1024: 32}, ranks=4),
    Measurement(
        ACCUMULATION,
        "gradients exchanged in the last microbatch only",
        (*with_setting((FSDP1, FSDP2)), *OURS),
        tokens={512: 64, 1024: 64},
        microbatches=8,
        steps_per_round=1,
    ),
    Measurement(OFFLOAD, "CPU offload policy, not pinned", NAMES),
    Measurement("ragged", "fp32, both layouts of fullshard", (*NAMES, RAGGED)),
)


BENCHMARK = Benchmark(
    name="modes",
    measurements=MODES,
    columns=(
        MILLISECONDS,
        column("step / FSDP2", "time_ratio_to_fsdp2"),
        column("step / FSDP2 with our malloc setting", "time_ratio_to_fsdp2_with_our_malloc"),
        column("step / better of FSDP1, FSDP2 with our malloc setting", "time_ratio_to_better_peer_with_our_malloc"),
        *memory_columns("FSDP2", "_to_fsdp2"),
        *sent_columns("FSDP2", "_to_fsdp2"),
        FINAL_LOSS,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    what: tuple[str, ...] = option((), choices=tuple(BENCHMARK.by_name))
    only: tuple[str, ...] = option((), choices=BENCHMARK.contestants)
    rounds: int = 5


def run(options: Options) -> bool:
    return page.run(BENCHMARK, options, options.what)
