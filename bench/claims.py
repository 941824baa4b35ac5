"""What README and the page about performance claim, in the same words, with the figures of the stored results."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench import report
from bench.figures import Find, at, counted, counted_ratios, of_step, overlapped
from bench.stored import Results

# Name in a sentence -> where its value is.
VALUES: Mapping[str, Find] = {
    "step_512": of_step("step_512", "fullshard", "time_ratio_to_fsdp2"),
    "step_1024": of_step("step_1024", "fullshard", "time_ratio_to_fsdp2"),
    "malloc_512": of_step("step_512", "fsdp2+our-malloc", "time_ratio_to_fsdp2"),
    "malloc_1024": of_step("step_1024", "fsdp2+our-malloc", "time_ratio_to_fsdp2"),
    "default_512": of_step("step_512", "fullshard-malloc", "time_ratio_to_fsdp2"),
    "default_1024": of_step("step_1024", "fullshard-malloc", "time_ratio_to_fsdp2"),
    "fair_512": of_step("step_512", "fullshard", "time_ratio_to_fsdp2_with_our_malloc"),
    "fair_1024": of_step("step_1024", "fullshard", "time_ratio_to_fsdp2_with_our_malloc"),
    "streams_least": overlapped(min, "fullshard", "FSDP2"),
    "streams_most": overlapped(max, "fullshard", "FSDP2"),
    "gpu_fp32": at("gpu", "parts", "step, 1 of 8, fp32", "contestants", "fullshard", "time_ratio_to_fsdp2"),
    "gpu_bf16": at("gpu", "parts", "step, 1 of 8, bf16", "contestants", "fullshard", "time_ratio_to_fsdp2"),
    "counted_least": counted(min),
    "counted_most": counted(max),
    "resident_512": of_step("step_512", "fullshard", "peak_over_baseline_ratio_to_fsdp2"),
    "host": at("host_cost", "contestants", "fullshard", "forward_backward", "host_cost_ratio_to_fsdp2"),
    "host_step": at("host_cost", "contestants", "fullshard", "step", "host_cost_ratio_to_fsdp2"),
    "save": at("checkpoint_1024", "operations", "save", "ways", "fullshard", "done_ratio"),
    "load": at("checkpoint_1024", "operations", "load", "ways", "fullshard", "returned_ratio"),
    "async": at("checkpoint_1024", "operations", "async_save", "ways", "fullshard", "returned_ratio"),
    "adamw": at("optimizer_cost", "contestants", "fullshard foreach", "ratio_to_fsdp2"),
}

# Paragraphs of sentences; one that needs a value which is not measured is left out.
CLAIMS = (
    (
        "**Step on CPU ranks.**",
        "On two CPU ranks over gloo a step takes {step_512} of FSDP2's time at width 512 and {step_1024} at width "
        "1024, with the same losses.",
        "With fullshard's malloc setting, FSDP2 takes {malloc_512} and {malloc_1024} of its time without it, and "
        "fullshard {fair_512} and {fair_1024} of FSDP2's time with it. If neither has it, fullshard takes "
        "{default_512} and {default_1024}. The rest is due to the exchange over gloo, which on CPUs only fullshard "
        "overlaps with computation, and to smaller buffers, which cost fewer page faults.",
    ),
    (
        "**What carries over to GPUs.**",
        "Not the gains from malloc and from overlap over gloo: GPU memory does not come from malloc, and on GPUs "
        "FSDP2 overlaps, too.",
        "On simulated streams and a modelled network, fullshard takes {streams_least} to {streams_most} of FSDP2's "
        "time.",
        "On one H200, as one of eight ranks without a network, it takes {gpu_fp32} (fp32) and {gpu_bf16} (bf16).",
        "Several GPUs have not been measured.",
    ),
    (
        "**Host time.**",
        "Forward and backward of 100 tiny units take {host} of FSDP2's host time per unit, and {host_step} with the "
        "optimizer step; a GPU waits for the host only if its kernels are short.",
        "A step of AdamW (foreach) takes {adamw} of FSDP2's time.",
    ),
    (
        "**Memory.**",
        "The peak of tensor memory in a step, counted allocation by allocation, is {counted_least} to {counted_most} "
        "of FSDP2's in {cells} configurations.",
        "Resident memory on CPU ranks is {resident_512} of FSDP2's at width 512; most of that difference is heap slack "
        "of glibc, and it does not carry over to GPUs.",
    ),
    (
        "**Checkpoints.**",
        "Compared with FSDP2 and torch's distributed checkpoint on two CPU ranks, a save takes {save} of the time, a "
        "load {load}, and `async_save` returns after {async}.",
    ),
)


def scaling(results: Results) -> str:
    """How a later step of 100 units grows with ranks, everyone's."""
    costs = results["scaling"].result["costs"] if "scaling" in results else []
    steps: dict[str, dict[int, float]] = {}
    for each in costs:
        if each["over"] == "ranks" and "cost" in each:
            steps.setdefault(each["system"], {})[each["ranks"]] = 1e3 * each["cost"]["steady"]
    found = [(name, by_ranks) for name, by_ranks in steps.items() if len(by_ranks) > 1]
    if not found:
        return "Not measured since all contestants are silenced alike."
    least, most = (pick(rank for _, by_ranks in found for rank in by_ranks) for pick in (min, max))
    listed = "; ".join(f"{name} {by_ranks[least]:.0f} and {by_ranks[most]:.0f}" for name, by_ranks in found)
    return f"CPU milliseconds of a later step, 100 units on {least:,} and on {most:,} ranks: {listed}."


def claims(results: Results) -> str:
    """The sentences as a list, with medians; a line each."""
    values = {"cells": str(len(counted_ratios(results)))}
    for name, find in VALUES.items():
        found = find(results)
        if found is not None:
            values[name] = report.cell(found["median"] if isinstance(found, Mapping) else found)
    written = []
    for paragraph in CLAIMS:
        said = [each.format_map(values) for each in paragraph if set(re.findall(r"{(\w+)}", each)) <= set(values)]
        written.append(f"- {' '.join(said)}")
    return "\n".join(written)
