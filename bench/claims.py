"""What README and the page about performance claim, in the same words, with the figures of the stored results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.contestants import WITH_OURS, WITHOUT_OURS
from bench.figures import OURS, Find, at, counted, counted_ratios, files, of_step, overlapped, whole_steps
from bench.stored import Results, of_one_machine


def _steps() -> Iterator[tuple[str, Find]]:
    """By width: each way to compare a step, and its peers' memory."""
    for width in (512, 1024):
        for name, contestant, key in (
            ("fair", OURS, "time_ratio_to_better_peer_with_our_malloc"),
            ("kept", OURS, "time_ratio_to_two_kept"),
            ("default", f"{OURS}{WITHOUT_OURS}", "time_ratio_to_better_peer"),
            ("step", OURS, "time_ratio_to_fsdp2"),
            ("resident", OURS, "peak_over_baseline_ratio_to_fsdp2"),
            ("resident_fair", OURS, "peak_over_baseline_ratio_to_fsdp2_with_our_malloc"),
        ):
            yield f"{name}_{width}", of_step(f"step_{width}", contestant, key)
        yield f"faster_{width}", _faster(f"step_{width}")


def _faster(name: str) -> Find:
    """The faster peer, with fullshard's malloc setting, by the name of its class."""
    find = of_step(name, OURS, "time_ratio_to_better_peer_with_our_malloc")
    return lambda results: find(results) and find(results)["reference"].removesuffix(WITH_OURS).upper()


def _gpu(name: str) -> Find:
    """What its environment says; before what the code was changed, of a commit that had not yet changed."""

    def find(results: Results) -> str | None:
        environment = results["gpu"].environment if "gpu" in results else None
        if name == "earlier":
            return EARLIER.get(environment.commit) if environment else None
        return getattr(environment, name, None)

    return find


def _cpu(name: str) -> Find:
    """The processor that a benchmark ran on."""
    return lambda results: results[name].source.machine if name in results else None


# Ratios within one process, which stand for themselves wherever they were measured: with the processor beside them.
ALONE = ("host_cost", "optimizer_cost")
# Commits of stored results of a GPU, and what has come since that matters to them.
EARLIER = {"23a9c6b": "before optimizers stepped local tensors by default"}
HOST, GPU_HOST = ("host_cost", "contestants"), ("gpu", "parts", "host", "contestants")
HOST_RATIO = "host_cost_ratio_to_fsdp2"
# Name in a sentence -> where its value is.
VALUES: Mapping[str, Find] = {
    **dict(_steps()),
    "streams_least": overlapped(min, OURS, "FSDP2"),
    "streams_most": overlapped(max, OURS, "FSDP2"),
    "kept_least": overlapped(min, OURS, "FSDP2, last kept"),
    "kept_most": overlapped(max, OURS, "FSDP2, last kept"),
    "gpu_fp32": at("gpu", "parts", "step, 1 of 8, fp32", "contestants", OURS, "time_ratio_to_fsdp2"),
    "gpu_bf16": at("gpu", "parts", "step, 1 of 8, bf16", "contestants", OURS, "time_ratio_to_fsdp2"),
    "gpu_commit": _gpu("commit"),
    "gpu_torch": _gpu("torch"),
    "gpu_earlier": _gpu("earlier"),
    "counted_least": counted(min),
    "counted_most": counted(max),
    "cells": lambda results: str(len(counted_ratios(results))),
    "host": at(*HOST, OURS, "forward_backward", HOST_RATIO),
    "host_step": at(*HOST, OURS, "step", HOST_RATIO),
    "host_whole": whole_steps(*HOST, figure="forward_backward"),
    "host_step_whole": whole_steps(*HOST, figure="step"),
    "gpu_host": at(*GPU_HOST, OURS, "forward_backward", HOST_RATIO),
    "gpu_host_whole": whole_steps(*GPU_HOST, figure="forward_backward"),
    "save": files("save", "done", "fsdp2"),
    "load": files("load", "returned", "fsdp2"),
    "async": files("async_save_kept", "returned", "fsdp2"),
    "export": files("export", "returned", "fsdp2"),
    "import": files("import", "returned", "fsdp2"),
    "host_cpu": _cpu("host_cost"),
    "adamw_cpu": _cpu("optimizer_cost"),
    "adamw": at("optimizer_cost", "contestants", "fullshard foreach", "ratio_to_fsdp2"),
    "dtensors": at("optimizer_cost", "contestants", "dtensors foreach", "ratio_to_fsdp2"),
    "clip": at("optimizer_cost", "contestants", "fullshard clip", "ratio_to_fsdp2"),
}
# A figure that flatters -> those without which it says too much: a clause that has it has them as well.
COUNTERPARTS = {
    **{f"step_{width}": {f"fair_{width}", f"kept_{width}", f"default_{width}"} for width in (512, 1024)},
    **{f"fair_{width}": {f"kept_{width}", f"default_{width}"} for width in (512, 1024)},
    **{f"resident_{width}": {f"resident_fair_{width}"} for width in (512, 1024)},
    "streams_least": {"streams_most", "kept_least", "kept_most"},
    "gpu_bf16": {"gpu_fp32", "gpu_commit", "gpu_torch"},
    "host": {"host_whole", "host_cpu"},
    "host_step": {"host_step_whole"},
    "gpu_host": {"gpu_host_whole"},
    "adamw": {"dtensors", "adamw_cpu"},
}


@dataclass(frozen=True)
class Sentence:
    """A beginning, and clauses after it of which those are left out that need a value which is not measured.

    Args:
        begin: The beginning. A sentence that has clauses is left out if none is left.
        clauses: With "; " between them.
        end: Comes last.
    """

    begin: str
    clauses: tuple[str, ...] = ()
    end: str = "."

    def text(self, values: Mapping[str, Value]) -> str | None:
        """With the values; None if it is left out."""
        said = [each.format_map(values) for each in self.clauses if names(each) <= set(values)]
        if not names(self.begin) <= set(values) or (self.clauses and not said):
            return None
        return self.begin.format_map(values) + "; ".join(said) + self.end


def names(text: str) -> set[str]:
    """Of the values that a text needs."""
    return set(re.findall(r"{(\w+)", text))


@dataclass(frozen=True)
class Value:
    """A number, a text, or a spread as it is stored, which is written by its median unless its format is "spread"."""

    found: Any

    def __format__(self, spec: str) -> str:
        if isinstance(self.found, str):
            return self.found
        return report.cell(self.found["median"] if isinstance(self.found, Mapping) and spec != "spread" else self.found)


_STEP = (
    "at width W {fair_W} of the time of {faster_W}, the faster of FSDP1 and FSDP2, {kept_W} of FSDP2's with its last "
    "two units kept by hand as fullshard keeps them, and {step_W} of FSDP2's as it comes; without the setting, "
    "{default_W} of the faster peer's"
)
_RESIDENT = "{resident_fair_W} of FSDP2's with our malloc setting and {resident_W} as it comes, at width W"
# What each paragraph is about -> its sentences.
CLAIMS: Mapping[str, tuple[Sentence, ...]] = {
    "Step on CPU ranks": (
        Sentence(
            "On two CPU ranks over gloo, with fullshard's malloc setting and the same losses, a step takes ",
            tuple(_STEP.replace("W", width) for width in ("512", "1024")),
            ". The gain is due to the exchange over gloo, which on CPUs only fullshard overlaps with computation, and "
            "to smaller buffers, which cost fewer page faults.",
        ),
    ),
    "What carries over to GPUs": (
        Sentence(
            "Not the gains from malloc and from overlap over gloo: GPU memory does not come from malloc, and on GPUs "
            "FSDP2 overlaps, too"
        ),
        Sentence(
            "On simulated streams and a modelled network, fullshard takes {streams_least} to {streams_most} of FSDP2's "
            "time; against FSDP2 with its last unit kept by hand, {kept_least} to {kept_most}"
        ),
        Sentence(
            "On one H200, as one of eight ranks without a network, a step takes ",
            ("{gpu_fp32} (fp32) and {gpu_bf16} (bf16) of FSDP2's time (torch {gpu_torch}, commit {gpu_commit})",),
        ),
        Sentence("That was {gpu_earlier}"),
        Sentence("Several GPUs have not been measured"),
    ),
    "Host time": (
        Sentence(
            "The host time of 100 tiny units beyond the plain model's is, of FSDP2's, ",
            (
                "{host} in forward and backward ({host_whole} of the whole step; {host_cpu})",
                "{host_step} with the optimizer step ({host_step_whole})",
                "on the H200 {gpu_host} in forward and backward ({gpu_host_whole})",
            ),
        ),
        Sentence("A GPU waits for the host only if its kernels are short"),
        Sentence(
            "On a fake process group, for 800 small parameters, ",
            (
                "a step of AdamW (foreach; {adamw_cpu}) takes {adamw} of FSDP2's time, and {dtensors} of it on "
                "DTensors, which optimizers unknown to fullshard step",
                "torch's `clip_grad_norm_` takes {clip}",
            ),
        ),
    ),
    "Memory": (
        Sentence(
            "The peak of tensor memory in a step, counted allocation by allocation, is {counted_least} to "
            "{counted_most} of FSDP2's in {cells} configurations"
        ),
        Sentence(
            "Resident memory on CPU ranks is ",
            tuple(_RESIDENT.replace("W", width) for width in ("512", "1024")),
            "; most of the difference is heap slack of glibc, and it does not carry over to GPUs.",
        ),
    ),
    "Checkpoints": (
        Sentence(
            "On two CPU ranks, of the time of FSDP2 with torch's functions (smallest and largest round in brackets): ",
            (
                "a save takes {save:spread}",
                "a load {load:spread}",
                "`async_save` returns after {async:spread}, both with kept memory",
                "an export to safetensors {export:spread}",
                "an import {import:spread}",
            ),
        ),
    ),
}


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
    return (
        f"CPU milliseconds of a later step, 100 units on {least:,} and on {most:,} ranks: {listed}. FSDP1 gathers into "
        "a chunk per rank on CPU only; that grows with ranks, and says nothing about FSDP1 on GPUs."
    )


def claims(results: Results) -> str:
    """The sentences as a list, with medians, of one machine and a GPU, and those of ``ALONE``; a line each."""
    some = of_one_machine(results) | {name: each for name, each in results.items() if name in ALONE}
    found = {name: find(some) for name, find in VALUES.items()}
    values = {name: Value(each) for name, each in found.items() if each is not None}
    lines = []
    for about, sentences in CLAIMS.items():
        said = [text for text in (sentence.text(values) for sentence in sentences) if text is not None]
        lines.append(f"- **{about}.** {' '.join(said) or 'Not measured yet.'}")
    return "\n".join(lines)
