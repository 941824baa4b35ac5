"""Step time and memory of the plain model, FSDP2 and fullshard, and the copies that sharding adds.

One rank on the device's own back end: sharding has nothing to do, so what a step costs beyond the plain model is
overhead. Rank 0 of 8 on c10d's fake group: the shapes of a real run, with collectives that only copy the own piece;
what remains is memory (shards, buffers, lifetimes), copies in and out of messages, and host time.

Every contestant is first measured alone (memory, profiled copies), built and thrown away; then all are built and take
turns in one process, with one allocator and its settings, timed by events. Ratios are paired per round. Memory is what
the allocator gave out beyond what was there before the model was built; "reserved" is what it took from the device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from bench import report
from bench.contestants import FSDP2
from bench.gpu.device import CUDA, forget_freed, group_of, memory_of, use
from bench.gpu.models import PLAIN, SHAPES, SHARDED, Trainer
from bench.gpu.parts import Settings
from bench.report import column, mebibytes
from bench.statistics import largest_difference, paired_spread, round_medians, spread
from bench.turns import each_that_runs, reason_of, take_turns

ROUNDS, STEPS, WARM_UP = 6, 5, 3
MEMORY_FIELDS = ("resting_bytes", "peak_allocated_bytes", "peak_reserved_bytes")

# Kernels that only move data. A plain step has some of its own, the same for all.
COPY_KERNELS = re.compile(
    r"Memcpy|direct_copy_kernel|CatArrayBatchedCopy|split_with_sizes|chunk_cat|\bCopy<|copy_device_to_device"
)


def measure(settings: Settings, *, ranks: int, dtype: str, size: str) -> dict[str, Any]:
    """Everything about one number of ranks, dtype and size."""
    device = use(settings.device)
    torch.set_float32_matmul_precision("high")  # TF32, for all
    size = "tiny" if settings.small else size
    rounds, steps = (1, 2) if settings.small else (ROUNDS, STEPS)

    def make(system: str) -> Trainer:
        return Trainer(system, SHAPES[size], device, dtype)

    with group_of(ranks, device):
        Trainer(PLAIN, SHAPES["tiny"], device).steps(2)  # workspaces and lazily loaded kernels are nobody's own
        # A plain model in bf16 would train bf16 weights: no peer for bf16 computation on fp32 shards.
        names = (*((PLAIN,) if dtype == "fp32" else ()), *SHARDED)
        contestants, failures = each_that_runs(names, lambda name: _alone(make, name, ranks, steps, device))
        try:
            for name, seconds in _interleaved(make, list(contestants), rounds, steps, device).items():
                contestants[name]["step_seconds"] = seconds
        except Exception as error:  # all at once may not fit where each alone did
            failures["interleaved timing"] = reason_of(error)
    add_ratios(contestants)
    return {"ranks": ranks, "dtype": dtype, "size": size, "contestants": contestants, "not_run": failures}


def _alone(make: Any, name: str, ranks: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Losses, memory and copies of one contestant with nobody else on the device."""
    forget_freed()
    memory = memory_of(device)
    before, reserved = memory.memory_allocated(), memory.memory_reserved()
    trainer = make(name)
    forget_freed()  # built unsharded by this benchmark: forget that, then measure steps only
    torch.accelerator.reset_peak_memory_stats()
    losses = [loss.item() for loss in trainer.steps(WARM_UP + steps)]
    torch.accelerator.synchronize()
    figures = (
        memory.memory_allocated() - before,
        memory.max_memory_allocated() - before,
        torch.accelerator.max_memory_reserved() - reserved,
    )
    measured = {
        "losses": losses if ranks == 1 else None,  # a fake group gathers no parameters: losses mean nothing
        "memory": dict(zip(MEMORY_FIELDS, figures, strict=True)),
        "copy_seconds": _copies(trainer, steps) if device.type == CUDA else None,
        "step_seconds": None,
    }
    del trainer
    forget_freed()
    return measured


def _copies(trainer: Trainer, steps: int) -> float:
    """Seconds per step in kernels that only move data."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trainer.steps(steps)
        torch.accelerator.synchronize()
    spans = [(event.name, event.time_range.elapsed_us()) for event in profiler.events() if _is_kernel(event)]
    return copy_time(spans) * 1e-6 / steps


def _is_kernel(event: Any) -> bool:
    """Whether a profiler event is work on the device, and not a named range that spans such work."""
    if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
        return False
    # Annotations of FSDP2, of c10d and of the profiler itself, where they are not marked as such.
    return not re.match(r"FSDP::|nccl:|Optimizer\.|ProfilerStep|## |Activity Buffer|Context Sync", event.name)


def copy_time(spans: Iterable[tuple[str, float]]) -> float:
    """Of the named spans, the time of those that only move data."""
    return sum(time_spent for name, time_spent in spans if COPY_KERNELS.search(name))


def _interleaved(
    make: Any, names: Sequence[str], rounds: int, steps: int, device: torch.device
) -> dict[str, list[list[float]]]:
    """Seconds per contestant, round and step, all contestants alive and taking turns."""
    trainers = {name: make(name) for name in names}
    for trainer in trainers.values():
        trainer.steps(WARM_UP)
    turns = {name: partial(_timed, trainer, steps, device) for name, trainer in trainers.items()}
    return take_turns(turns, rounds)


def _timed(trainer: Trainer, count: int, device: torch.device) -> list[float]:
    """Seconds of each step, by events, so that launches of consecutive steps may run ahead."""
    torch.accelerator.synchronize()
    if device.type != CUDA:  # a rehearsal: any time will do
        begun = time.perf_counter()
        trainer.steps(count)
        return [(time.perf_counter() - begun) / count] * count
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        trainer.step()
        mark.record()
    torch.accelerator.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def add_ratios(measured: Mapping[str, dict[str, Any]]) -> None:
    """Add to each contestant its median step, and its ratios to FSDP2 of time and memory."""
    base = measured.get(FSDP2)
    for entry in measured.values():
        timed = entry["step_seconds"] is not None
        entry["median_step_seconds"] = spread(round_medians(entry["step_seconds"])).median if timed else None
        if base is None:
            continue
        if timed and base["step_seconds"] is not None:
            times, reference = round_medians(entry["step_seconds"]), round_medians(base["step_seconds"])
            entry["time_ratio_to_fsdp2"] = paired_spread(times, reference).as_json()
        if entry["losses"] is not None:
            entry["largest_loss_difference_to_fsdp2"] = largest_difference(entry["losses"], base["losses"])
        entry["memory_ratio_to_fsdp2"] = {
            field: entry["memory"][field] / base["memory"][field] for field in MEMORY_FIELDS if base["memory"][field]
        }


def table(result: Mapping[str, Any]) -> str:
    columns = [column("step, ms", "median_step_seconds", scale=1e3), column("/ FSDP2", "time_ratio_to_fsdp2")]
    for field, label in zip(MEMORY_FIELDS[1:], ("peak allocated, MiB", "peak reserved, MiB"), strict=True):
        columns += [mebibytes(label, "memory", field), column("/ FSDP2", "memory_ratio_to_fsdp2", field)]
    columns.append(column("copies, ms", "copy_seconds", scale=1e3))
    columns.append(column("largest loss difference", "largest_loss_difference_to_fsdp2", spec=".1e"))
    named = {"plain" if name == PLAIN else name: entry for name, entry in result["contestants"].items()}
    return report.table("contestant", named, columns, result["not_run"])
