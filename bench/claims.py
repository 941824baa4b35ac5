"""What README and the page about performance claim, in the same words, with the figures of the stored results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bench import report
from bench.contestants import WITH_OURS, WITHOUT_OURS
from bench.figures import OURS, UNMEASURED, Find, at, files, of_step, whole_steps
from bench.results import Results, of_one_machine

# A paragraph is said as a whole: a figure that flatters stands beside those without which it says too much.
CLAIMS = """\
- **Step on CPU ranks.** On two CPU ranks over gloo, with fullshard's malloc setting and the same losses, a step \
takes {step 512}; {step 1024}. The gain is due to the exchange over gloo, which on CPUs only fullshard overlaps with \
computation, and to smaller buffers, which cost fewer page faults.
- **What carries over to GPUs.** Not the gains from malloc and from overlap over gloo: GPU memory does not come from \
malloc, and on GPUs FSDP2 overlaps, too. On simulated streams and a modelled network (commit b9209000f941), fullshard \
takes 0.95 to 1.00 of FSDP2's time; against FSDP2 with its last unit kept by hand, 1.00 to 1.00. On one H200, as one \
of eight ranks without a network, a step takes {gpu_fp32} (fp32) and {gpu_bf16} (bf16) of FSDP2's time (torch \
{gpu_torch}, commit {gpu_commit}).{gpu_earlier} Several GPUs have not been measured.
- **Host time.** The host time of 100 tiny units beyond the plain model's is, of FSDP2's, {host} in forward and \
backward ({host_whole} of the whole step; {host_cpu}); {host_step} with the optimizer step ({host_step_whole}); on \
the H200 {gpu_host} in forward and backward ({gpu_host_whole}). A GPU waits for the host only if its kernels are \
short. On a fake process group, for 800 small parameters, a step of AdamW (foreach; {adamw_cpu}) takes {adamw} of \
FSDP2's time, and {dtensors} of it on DTensors, which optimizers unknown to fullshard step; torch's `clip_grad_norm_` \
takes {clip}.
- **Memory.** The peak of tensor memory in a step, counted allocation by allocation, is 0.94 to 1.05 of FSDP2's in 8 \
configurations (commit b9209000f941). Resident memory on CPU ranks is {resident 512}; {resident 1024}; most of the \
difference is heap slack of glibc, and it does not carry over to GPUs.
- **Checkpoints.** On two CPU ranks, of the time of FSDP2 with torch's functions (smallest and largest round in \
brackets): a save takes {save:spread}; a load {load:spread}; `async_save` returns after {async:spread}, both with \
kept memory; an export to safetensors {export:spread}; an import {import:spread}."""
# By width.
PARTS = {
    "step": "at width W {fair_W} of the time of {faster_W}, the faster of FSDP1 and FSDP2, {kept_W} of FSDP2's with "
    "its last two units kept by hand as fullshard keeps them, and {step_W} of FSDP2's as it comes; without the "
    "setting, {default_W} of the faster peer's",
    "resident": "{resident_fair_W} of FSDP2's with our malloc setting and {resident_W} as it comes, at width W",
}
TEXT = re.sub(r"{(step|resident) (\d+)}", lambda part: PARTS[part[1]].replace("W", part[2]), CLAIMS)

# Ratios within one process, which stand for themselves wherever they were measured: with the processor beside them.
ALONE = ("host_cost", "optimizer_cost")
# Commits of stored results of a GPU, and what has come since that matters to them.
EARLIER = {"23a9c6b": " That was before optimizers stepped local tensors by default."}


def _of_width(width: int) -> dict[str, Find]:
    fair, name = "time_ratio_to_better_peer_with_our_malloc", f"step_{width}"
    ours = {
        "fair": fair,
        "kept": "time_ratio_to_two_kept",
        "step": "time_ratio_to_fsdp2",
        "resident": "peak_over_baseline_ratio_to_fsdp2",
        "resident_fair": "peak_over_baseline_ratio_to_fsdp2_with_our_malloc",
    }
    faster = of_step(name, OURS, fair)
    return {
        **{f"{short}_{width}": of_step(name, OURS, key) for short, key in ours.items()},
        f"default_{width}": of_step(name, f"{OURS}{WITHOUT_OURS}", "time_ratio_to_better_peer"),
        f"faster_{width}": lambda results: (
            faster(results) and faster(results)["reference"].removesuffix(WITH_OURS).upper()
        ),
    }


def _environment(name: str, key: str) -> Find:
    return lambda results: getattr(results[name].environment, key) if name in results else None


HOST, GPU, GPU_HOST = ("host_cost", "contestants"), ("gpu", "parts"), ("gpu", "parts", "host", "contestants")
HOST_RATIO, OPTIMIZERS = "host_cost_ratio_to_fsdp2", ("optimizer_cost", "contestants")
_commit = _environment("gpu", "commit")
# Name in the text -> where its value is.
VALUES: Mapping[str, Find] = {
    **_of_width(512),
    **_of_width(1024),
    "gpu_fp32": at(*GPU, "step, 1 of 8, fp32", "contestants", OURS, "time_ratio_to_fsdp2"),
    "gpu_bf16": at(*GPU, "step, 1 of 8, bf16", "contestants", OURS, "time_ratio_to_fsdp2"),
    "gpu_commit": _commit,
    "gpu_torch": _environment("gpu", "torch"),
    "gpu_earlier": lambda results: EARLIER.get(_commit(results), ""),
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
    "host_cpu": _environment("host_cost", "cpu"),
    "adamw_cpu": _environment("optimizer_cost", "cpu"),
    "adamw": at(*OPTIMIZERS, "fullshard foreach", "ratio_to_fsdp2"),
    "dtensors": at(*OPTIMIZERS, "dtensors foreach", "ratio_to_fsdp2"),
    "clip": at(*OPTIMIZERS, "fullshard clip", "ratio_to_fsdp2"),
}


class Value:
    """A number, a text, or a spread as it is stored, which is written by its median unless its format is "spread"."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __format__(self, spec: str) -> str:
        if self._found is None or isinstance(self._found, str):
            return UNMEASURED if self._found is None else self._found
        is_spread = isinstance(self._found, Mapping)
        return report.cell(self._found["median"] if is_spread and spec != "spread" else self._found)


def claims(results: Results) -> str:
    """The paragraphs as a list, with medians, of one machine and a GPU, and those of ``ALONE``; a line each."""
    some = of_one_machine(results) | {name: each for name, each in results.items() if name in ALONE}
    return TEXT.format_map({name: Value(find(some)) for name, find in VALUES.items()})
