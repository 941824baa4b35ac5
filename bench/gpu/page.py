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

_INTRODUCTION = """# On a GPU

`make gpu` runs, on a machine with a CUDA device and within ten minutes, what only a real one can show: the tests, step
time and memory, host time, overlap, CUDA graphs, and a check for missing waits. It writes the figures to
`bench/results/gpu_<device>.json` and this page. [What is proven how](proof.md) says what they add to the emulated
accelerator's race check. Without make: `PYTHONPATH=src python -m bench gpu`, which needs torch with CUDA and what
fullshard imports, lazy_loader, xxhash and safetensors; the tests among its parts need pytest, hypothesis, typer and
rich as well.
"""
# Heading and what to know, by the first word of the parts below it.
_SECTIONS = {
    "races": (
        "Streams held up",
        "Each mode trains three times: as it comes, with every launch on a side stream held up by a kernel that spins, "
        "and with the computation held up before every unit; memory not filled yet reads as NaN. Rank 0 of 8 that all "
        "hold the same: collectives are copies on a stream of their own. All have to end with the same bits. A fault, "
        "side streams that nobody waits for, has to be noticed.",
    ),
    "graphs": (
        "CUDA graphs",
        "Forward, backward and optimizer step of `fully_shard` are captured as one graph and replayed on other inputs. "
        "Rank 0 of 8 that all hold the same: streams, events and allocations are those of a real run, and copies take "
        "the place of NCCL's kernels.",
    ),
    "step": (
        "Step time and memory",
        "A GPT with AdamW. One rank on NCCL communicates nothing: what a step costs beyond the plain model's is "
        "overhead. Rank 0 of 8 on the fake group has the shapes of such a run, but nothing is sent or enqueued to "
        "NCCL, and parameters from 64 KiB per rank on are gathered in place, with NCCL from 1 MiB on. FSDP2 is that of "
        "the same torch. Matrix products are TF32 where parameters are fp32. All are alive in one process with one "
        "allocator and take turns; ratios are paired per round, with quartiles in brackets.",
    ),
    "host": ("Host time", "A hundred tiny units on the fake group: how long the host needs to enqueue a step."),
    "overlap": (
        "Overlap",
        "Rank 0 of 8 on a [modelled network](../design/modelled_network.md), whose messages are kernels that spin, "
        "together planned for 0.8 of the plain model's step; nothing is written on arrival. Hidden is the time of "
        "messages during which a kernel of the computation runs, by the profiler's trace of a step.",
    ),
    "tests": (
        "Tests",
        "`FULLSHARD_TEST_DEVICE=cuda`, on NCCL. NCCL 2.30 and newer let ranks share a GPU if "
        "`NCCL_MULTI_RANK_GPU_ENABLE=1` is set; else tests of more ranks than GPUs are skipped. A newer `libnccl.so.2` "
        "than torch's own can be named in `LD_PRELOAD`.",
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
