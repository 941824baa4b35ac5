"""``docs/performance/gpu.md`` out of the JSON of ``python -m bench gpu``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from bench import report
from bench.command_line import RESULTS
from bench.environment import REPOSITORY, Environment
from bench.gpu.parts import PARTS

PAGE = REPOSITORY / "docs" / "performance" / "gpu.md"

_INTRODUCTION = """# Results on one GPU

`make gpu` runs on a machine with a CUDA device and takes at most ten minutes. It runs what only a real GPU can show:
the tests on CUDA, step time and memory, host time, overlap, CUDA graphs, and a check for missing waits between
streams. It writes `bench/results/gpu_<device>.json` and this page. [What is proven, and how](proof.md) compares this
with the race check of the emulated accelerator.

Without make: `PYTHONPATH=src python -m bench gpu`. It needs torch with CUDA and the packages that fullshard imports
(lazy_loader, xxhash, safetensors). The tests also need pytest, hypothesis, typer and rich.
"""
# Heading and explanation, by the first word of the parts below it.
_SECTIONS = {
    "races": (
        "Delayed streams",
        "A wait that is missing between two streams shows only if one of them is late. So each mode trains three "
        "times: normally, with a spinning kernel before every launch on a side stream, and with a spinning kernel "
        "before the computation of every unit. Memory that has not been filled reads as NaN. All three runs must end "
        "with the same bits. To show that the check works, one mode has a fault: nobody waits for the side streams. "
        "This is rank 0 of 8 ranks that all hold the same values; collectives are copies on their own stream.",
    ),
    "graphs": (
        "CUDA graphs",
        "Forward, backward and optimizer step of `fully_shard` are captured as one graph, which is replayed with "
        "other inputs. This is rank 0 of 8 ranks that all hold the same values: streams, events and allocations are "
        "those of a real run, and copies replace NCCL's kernels.",
    ),
    "step": (
        "Step time and memory",
        'A GPT with AdamW. "One rank" uses NCCL and communicates nothing: the time beyond that of the plain model is '
        'overhead. "1 of 8" is rank 0 of 8 on a fake process group: shapes and memory are those of 8 ranks, but '
        "nothing is sent or given to NCCL, and parameters of at least 64 KiB per rank are all-gathered in place (with "
        "NCCL: fewer). FSDP2 is that of the same torch. Where parameters are fp32, matrix products are "
        "TF32. All contestants live in one process with one allocator and take turns. Ratios are taken within a "
        "round; quartiles are in brackets.",
    ),
    "host": (
        "Host time",
        "A hundred tiny units on the fake process group: the time that the host needs to launch a step.",
    ),
    "overlap": (
        "Overlap",
        "Rank 0 of 8 on a [modelled network](../design/modelled_network.md). Its messages are spinning kernels, "
        'planned to take 0.8 of the plain model\'s step in total; no data arrives. "Hidden" is the share of message '
        "time during which a kernel of the computation runs, from the profiler's trace of a step.",
    ),
    "tests": (
        "Tests",
        "Tests with `FULLSHARD_TEST_DEVICE=cuda` on NCCL. Since NCCL 2.30, several ranks can share a GPU if "
        "`NCCL_MULTI_RANK_GPU_ENABLE=1` is set. Otherwise tests with more ranks than GPUs are skipped. `LD_PRELOAD` "
        "can name a `libnccl.so.2` that is newer than torch's. Files of tests have the names of the measured commit.",
    ),
}


def load() -> dict[str, Any]:
    """The latest results of a run on CUDA."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu_*.json"))]
    return max(found, key=lambda result: result["environment"]["date"])


def render(result: Mapping[str, Any]) -> str:
    """The whole page."""
    environment = Environment(**result["environment"])
    lines = [_INTRODUCTION, report.provenance(environment), f"CUDA {result['cuda']}, NCCL {result['nccl']}."]
    if result["device"] != "cuda" or result["small"]:
        lines += ["", "**A rehearsal: nothing here is a measurement.**"]
    for word, (heading, text) in _SECTIONS.items():
        lines += ["", f"## {heading}", "", text]
        for part in PARTS:
            if part.name.split(",")[0] == word:
                lines += ["", *_part(part.name, part.module, result["parts"].get(part.name), titled=part.name != word)]
    return "\n".join(lines) + "\n"


def _part(name: str, module: str, measured: Mapping[str, Any] | None, *, titled: bool) -> list[str]:
    lines = [f"{name[0].upper()}{name[1:]}:", ""] if titled else []
    if measured is None:
        return [*lines, "Not run."]
    if "failed" in measured:
        return [*lines, f"Failed after {measured['seconds']:.0f} s: {measured['failed']}"]
    return [*lines, importlib.import_module(f"bench.gpu.{module}").table(measured)]
