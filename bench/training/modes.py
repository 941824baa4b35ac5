"""The modes of fully_shard beside FSDP2 (and FSDP1 where it has the mode), on gloo CPU ranks.

``bf16``          parameters and compute in bf16, gradients reduced in fp32, 2 ranks
``hsdp``          a (2, 2) mesh: sharded over pairs, replicated over two of them, 4 ranks
``accumulation``  8 microbatches a step, gradients exchanged in the last only, 2 ranks; FSDP1 as well
``offload``       shards, gradients and optimizer state under the CPU offload policy, 2 ranks

Contestants take turns as in ``step``: ratios are paired per round, and a run whose losses disagree reports no times.
Beside time and memory stands what a rank sends per step, counted by the kernel. The page has the latest results of
all modes at a width on this kind of machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.command_line import option
from bench.contestants import BF16, HSDP, OFFLOAD
from bench.report import column, mebibytes, verdict
from bench.training import page
from bench.training.contest import Measurement, TrainingOptions
from bench.training.page import FINAL_LOSS, MILLISECONDS, Benchmark, Result

ACCUMULATION = "accumulation"
NAMES, ALLOCATORS = ("fsdp2", "fullshard"), ("fsdp2+malloc", "fullshard-malloc")
# What fullshard's step may take of the better peer's, and its peak over baseline of FSDP2's.
STEP_TARGETS = {512: 0.80, 1024: 0.70}
MEMORY_TARGET = 0.75

# Batches are those of the step, smaller where compute would hide the exchange: forward, backward and optimizer
# alone, without sharding, take at most three fifths of FSDP2's step at width 512 and under a third at 1024, on a CPU
# that multiplies bf16 matrices in hardware (AVX-512 BF16: 400 GFLOP/s a core beside 90 in fp32). Where it does
# not, bf16 would measure mostly the emulation. HSDP halves them because two ranks share a core. The tolerance of
# losses is that of fp32 in all modes: reductions of two summands and divisions by powers of two round alike.
MODES = (
    Measurement(BF16, "parameters gathered in bf16, gradients reduced in fp32", NAMES, ALLOCATORS),
    Measurement(
        HSDP, "mesh (2, 2) of replicate and shard axis", NAMES, ALLOCATORS, tokens={512: 128, 1024: 32}, ranks=4
    ),
    Measurement(
        ACCUMULATION,
        "gradients exchanged in the last microbatch only",
        ("fsdp1", *NAMES),
        ALLOCATORS,
        tokens={512: 64, 1024: 64},
        microbatches=8,
        steps_per_round=1,
    ),
    Measurement(OFFLOAD, "CPU offload policy, not pinned", NAMES, ALLOCATORS),
)


def verdicts(results: Mapping[str, Result]) -> Iterator[str]:
    """Per mode that fullshard ran at a width with targets: its ratios, and whether they meet them."""
    for mode, result in results.items():
        entry = result["contestants"].get("fullshard", {})
        target = STEP_TARGETS.get(result["settings"]["width"])
        step, memory = entry.get("time_ratio_to_better_peer"), entry.get("peak_over_baseline_ratio_to_fsdp2")
        if target is None or step is None:
            continue
        figures = [verdict("step", step["median"], target)]
        if memory is not None:
            figures.append(verdict("peak over baseline", memory, MEMORY_TARGET))
        yield f"{mode}: {', '.join(figures)}"


BENCHMARK = Benchmark(
    name="modes",
    measurements=MODES,
    columns=(
        MILLISECONDS,
        column("step / FSDP2", "time_ratio_to_fsdp2"),
        column("step / better of FSDP1, FSDP2", "time_ratio_to_better_peer"),
        mebibytes("peak over baseline, MiB", "peak_over_baseline_bytes"),
        column("/ FSDP2", "peak_over_baseline_ratio_to_fsdp2"),
        mebibytes("peak, MiB", "peak_bytes"),
        column("/ FSDP2", "peak_ratio_to_fsdp2"),
        mebibytes("sent per rank, MiB", "sent_bytes_per_step", spec=".1f"),
        column("/ FSDP2", "sent_ratio_to_fsdp2"),
        FINAL_LOSS,
    ),
    panels={
        "step time / FSDP2": "time_ratio_to_fsdp2",
        "peak memory over baseline / FSDP2": "peak_over_baseline_ratio_to_fsdp2",
    },
    title="The modes",
    verdicts=verdicts,
)


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """Every mode at both widths."""

    what: tuple[str, ...] = option((), choices=tuple(BENCHMARK.by_name))
    only: tuple[str, ...] = option((), choices=BENCHMARK.contestants)
    rounds: int = 5


def run(options: Options) -> bool:
    return page.run(BENCHMARK, options, options.what)
