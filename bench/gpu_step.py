"""fullshard beside FSDP2 on one CUDA device: step time, memory, and the copies that sharding adds.

    python -m bench.gpu_step
    python -m bench.gpu_step --device cpu --size tiny --rounds 2 --results /tmp/x    # rehearsal without a GPU

Two parts, each with GPTs of several sizes in fp32 (matrix products in TF32 with ``--tf32``, the default):

``one-rank``
    World size 1 on NCCL. Sharding has nothing to do here, so whatever a step costs beyond the plain model is
    overhead: copies, kernels, host time.
``fake-8``
    Rank 0 of 8 on c10d's fake process group: the shapes of a real run, with collectives that return at once
    and move nothing. What remains is memory (shards, buffers, lifetimes) and the copies in and out of them.

A part and size runs in a process of its own. In it every contestant is first measured alone (memory, profiled
copies), built and thrown away; then all are built and take turns, timed by CUDA events. Ratios are paired per
round. Memory is what the allocator gave out beyond what was there before the model was built; "reserved" is
what it took from the device. Without CUDA this prints one line and succeeds.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from bench import report
from bench.contestants import FSDP2, FULLSHARD, UNSHARDED, distribute, start_fake_group
from bench.environment import Environment, current_environment
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.statistics import Spread, largest_difference, paired_spread, round_medians, spread, turn_order

PLAIN = UNSHARDED
SYSTEMS = (PLAIN, FSDP2, FULLSHARD)
ONE_RANK, FAKE_8 = "one-rank", "fake-8"
PARTS = {ONE_RANK: 1, FAKE_8: 8}
SIZES = {
    "tiny": GPTShape(width=64, blocks=2, tokens=64),
    "small": GPTShape(width=768, blocks=12, tokens=2048),
    "medium": GPTShape(width=1280, blocks=24, tokens=2048),
    "large": GPTShape(width=2048, blocks=24, tokens=2048),
}
DEFAULT_SIZES = ("small", "medium", "large")
MEMORY_FIELDS = ("resting_bytes", "peak_allocated_bytes", "peak_reserved_bytes")

# Kernels (CUDA) and operators (CPU) that only move data. A plain step has some of its own, which are
# subtracted from everyone's.
COPY_KERNELS = re.compile(
    r"Memcpy|direct_copy_kernel|CatArrayBatchedCopy|split_with_sizes|chunk_cat|\bCopy<|copy_device_to_device"
)
COPY_OPERATORS = frozenset(
    {
        "aten::copy_",
        "aten::_foreach_copy_",
        "aten::cat",
        "aten::_chunk_cat",
        "aten::split_with_sizes_copy",
        "fsdp::all_gather_copy_in",
        "fsdp::split_with_sizes_copy",
        "fsdp::chunk_cat",
    }
)

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    """What one child process measures."""

    part: str
    size: str
    device: str
    systems: tuple[str, ...]
    rounds: int
    steps_per_round: int
    warmup_steps: int
    tf32: bool

    @property
    def shape(self) -> GPTShape:
        return SIZES[self.size]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Trainer:
    """One contestant's model and optimizer on the device."""

    def __init__(self, system: str, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device("cuda", 0) if settings.on_gpu else torch.device("cpu")
        torch.manual_seed(0)
        with self.device:
            model = GPT(settings.shape)
        self.model: nn.Module = distribute(system, model, Block, self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = batch_of(settings.shape, 0, 0, self.device)

    def step(self) -> torch.Tensor:
        loss = next_token_loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(self, count: int) -> list[torch.Tensor]:
        return [self.step() for _ in range(count)]

    def timed_steps(self, count: int) -> list[float]:
        """Seconds of each step. On a GPU by events, so that launches of consecutive steps may run ahead."""
        if not self.settings.on_gpu:
            return [_wall_seconds(self.step) for _ in range(count)]
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def _wall_seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _start_group(settings: Settings) -> None:
    ranks = PARTS[settings.part]
    if settings.part == FAKE_8:
        start_fake_group(ranks)
        return
    backend = "nccl" if settings.on_gpu else "gloo"
    device = torch.device("cuda", 0) if settings.on_gpu else None
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # port 0: any free one
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks, device_id=device)


def measure(settings: Settings) -> dict[str, Any]:
    """Everything about one part and size; runs in a process of its own."""
    if settings.on_gpu:
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    _start_group(settings)
    contestants: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    try:
        # Library workspaces and lazily loaded kernels are nobody's own.
        Trainer(PLAIN, replace(settings, size="tiny")).steps(2)
        for system in settings.systems:
            try:
                contestants[system] = _measure_alone(system, settings)
            except Exception as error:
                failures[system] = f"{type(error).__name__}: {error}".splitlines()[0]
            _forget_freed(settings)
        try:
            for name, seconds in _interleave(list(contestants), settings).items():
                contestants[name]["seconds"] = seconds
        except Exception as error:  # all at once may not fit where each alone did
            failures["interleaved timing"] = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        dist.destroy_process_group()
    return {"contestants": contestants, "not_run": failures}


def _forget_freed(settings: Settings) -> None:
    """Return what is no longer used to the device, so that the next measurement starts from nothing."""
    gc.collect()
    if settings.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _measure_alone(system: str, settings: Settings) -> dict[str, Any]:
    """Losses, memory and copies of one contestant with nobody else on the device."""
    _forget_freed(settings)
    before = torch.cuda.memory_allocated() if settings.on_gpu else 0
    reserved_before = torch.cuda.memory_reserved() if settings.on_gpu else 0
    trainer = Trainer(system, settings)
    # Built unsharded by this benchmark: forget that, then measure steps only.
    _forget_freed(settings)
    if settings.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses = [loss.item() for loss in trainer.steps(settings.warmup_steps + settings.steps_per_round)]
    # Collectives that move nothing gather no parameters: the losses mean nothing then.
    real = settings.part != FAKE_8
    measured: dict[str, Any] = {"losses": losses if real else None, "memory": None, "seconds": None}
    if settings.on_gpu:
        torch.cuda.synchronize()
        figures = (
            torch.cuda.memory_allocated() - before,
            torch.cuda.max_memory_allocated() - before,
            torch.cuda.max_memory_reserved() - reserved_before,
        )
        measured["memory"] = dict(zip(MEMORY_FIELDS, figures, strict=True))
    measured["profile"] = _profile(trainer, settings)
    return measured


def _profile(trainer: Trainer, settings: Settings) -> dict[str, Any]:
    """Seconds per step in kernels (or operators) that only move data, by name, and in all of them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if settings.on_gpu else [])]
    steps = max(2, settings.steps_per_round)
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.steps(steps)
        if settings.on_gpu:
            torch.cuda.synchronize()
    if settings.on_gpu:
        spans = [(event.name, event.time_range.elapsed_us()) for event in profiler.events() if _is_kernel(event)]
        copies, total = sum_copies(spans, COPY_KERNELS.search)
    else:
        operators = [(entry.key, entry.self_cpu_time_total) for entry in profiler.key_averages()]
        copies, total = sum_copies(operators, COPY_OPERATORS.__contains__)
    scale = 1e-6 / steps
    by_name = {name: us * scale for name, us in sorted(copies.items(), key=lambda item: -item[1])}
    return {
        "copy_seconds": sum(by_name.values()),
        "all_seconds": total * scale,
        "copies_by_name": by_name,
    }


def _is_kernel(event: Any) -> bool:
    """Whether a profiler event is work on the device, and not a named range that spans such work."""
    if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
        return False
    # Annotations of FSDP2, of c10d and of the profiler itself, where they are not marked as such.
    return not re.match(r"FSDP::|nccl:|Optimizer\.|ProfilerStep|## |Activity Buffer|Context Sync", event.name)


def sum_copies(spans: Iterable[tuple[str, float]], is_copy: Callable[[str], object]) -> tuple[dict[str, float], float]:
    """Time per copying kernel (names shortened to what tells them apart) and of all spans together."""
    copies: dict[str, float] = {}
    total = 0.0
    for name, time_spent in spans:
        total += time_spent
        if is_copy(name):
            found = COPY_KERNELS.search(name)
            short = name if name.startswith(("Memcpy", "aten::", "fsdp::")) or not found else found.group()
            copies[short] = copies.get(short, 0.0) + time_spent
    return copies, total


def _interleave(names: Sequence[str], settings: Settings) -> dict[str, list[list[float]]]:
    """Seconds per contestant, round and step, all contestants alive and taking turns."""
    trainers = {name: Trainer(name, settings) for name in names}
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    for trainer in trainers.values():
        trainer.steps(settings.warmup_steps)
    for index in range(settings.rounds if names else 0):
        for name in turn_order(names, index):
            seconds[name].append(trainers[name].timed_steps(settings.steps_per_round))
    return seconds


def _in_own_process(settings: Settings) -> dict[str, Any]:
    """``measure`` in a fresh process: one that runs out of memory takes no other size with it."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, settings).result()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            console.print(f"[yellow]{settings.part} {settings.size} cannot run: {reason}")
            return {"contestants": {}, "not_run": dict.fromkeys(settings.systems, reason)}


def add_ratios(measured: Mapping[str, dict[str, Any]]) -> None:
    """Add to each contestant its median step, and its ratios to FSDP2 of time, memory and copies."""
    base, plain = measured.get(FSDP2), measured.get(PLAIN)
    for entry in measured.values():
        timed = entry["seconds"] is not None
        entry["median_step_seconds"] = spread(round_medians(entry["seconds"])).median if timed else None
        if plain is not None:
            # The plain model's own copies happen in everyone's step.
            extra = entry["profile"]["copy_seconds"] - plain["profile"]["copy_seconds"]
            entry["copy_seconds_beyond_plain"] = extra
        if base is None:
            continue
        if timed:
            times, reference = round_medians(entry["seconds"]), round_medians(base["seconds"])
            entry["time_ratio_to_fsdp2"] = paired_spread(times, reference).as_json()
        if entry["losses"] is not None:
            entry["largest_loss_difference_to_fsdp2"] = largest_difference(entry["losses"], base["losses"])
        if entry["memory"] is not None:
            entry["memory_ratio_to_fsdp2"] = {
                field: entry["memory"][field] / base["memory"][field] for field in MEMORY_FIELDS
            }


def _number(value: float | None, spec: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, spec)


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    header = [
        "part, size, contestant",
        "step, ms",
        "step / FSDP2",
        "peak allocated, MiB",
        "/ FSDP2",
        "peak reserved, MiB",
        "/ FSDP2",
        "copies beyond plain, ms",
        "largest loss difference",
    ]
    rows = []
    for case in cases:
        label = f"{case['part']}, {case['size']}"
        for name, entry in case["contestants"].items():
            ratio, memory = entry.get("time_ratio_to_fsdp2"), entry["memory"]
            shares = entry.get("memory_ratio_to_fsdp2", {})
            row = [
                f"{label}, {'plain' if name == PLAIN else name}",
                _number(entry["median_step_seconds"], ".2f", 1e3),
                "-" if ratio is None else f"{Spread(**ratio):.2f}",
            ]
            for field in MEMORY_FIELDS[1:]:
                row.append(_number(memory and memory[field], ".0f", 2**-20))
                row.append(_number(shares.get(field), ".2f"))
            row.append(_number(entry.get("copy_seconds_beyond_plain"), ".2f", 1e3))
            row.append(_number(entry.get("largest_loss_difference_to_fsdp2"), ".1e"))
            rows.append(row)
        rows += [[f"{label}, {name}", "cannot run", *["-"] * (len(header) - 2)] for name in case["not_run"]]
    return report.markdown_table(header, rows)


def _document_block(
    settings: Settings,
    text: str,
    cases: Sequence[Mapping[str, Any]],
    environment: Environment,
    image: Path,
    page: Path,
) -> str:
    sizes = {case["size"]: SIZES[case["size"]] for case in cases}
    lines = [
        f"fp32 with {'TF32' if settings.tf32 else 'full-precision'} matrix products, AdamW; "
        f"{settings.rounds} rounds of {settings.steps_per_round} steps. "
        + "; ".join(f"{n}: {s.blocks} blocks of width {s.width}, {s.tokens} tokens" for n, s in sizes.items())
        + ".",
        "",
        text,
        "",
        "`one-rank` is world size 1 on NCCL, `fake-8` rank 0 of 8 with collectives that move nothing. Copies "
        "are the device time of kernels that only move data, minus those of the plain model's step.",
        *(
            f"`{name}` could not run in {c['part']}, {c['size']}: {why}."
            for c in cases
            for name, why in c["not_run"].items()
        ),
        "",
        report.provenance(environment),
        "",
        report.image_link(image, page, "Step time and memory on one GPU"),
    ]
    return "\n".join(lines)


def _plot(path: Path, cases: Sequence[Mapping[str, Any]]) -> None:
    times: dict[str, float | Spread] = {}
    memory: dict[str, float | Spread] = {}
    for case in cases:
        entry = case["contestants"].get(FULLSHARD)
        label = f"{case['part']}, {case['size']}"
        if entry is not None and "time_ratio_to_fsdp2" in entry:
            times[label] = Spread(**entry["time_ratio_to_fsdp2"])
        if entry is not None and "memory_ratio_to_fsdp2" in entry:
            memory[label] = entry["memory_ratio_to_fsdp2"]["peak_allocated_bytes"]
    panels = [
        report.Panel("step time / FSDP2", times, 1.0),
        report.Panel("peak allocated / FSDP2", memory, 1.0),
    ]
    panels = [panel for panel in panels if panel.values]
    if panels:
        report.plot_bars(path, "fullshard on one device (whiskers: quartiles)", panels, highlight="")


def _device_name(device: str) -> str | None:
    return torch.cuda.get_device_name(0) if device == "cuda" else None


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(PARTS)} [both].")] = None,
    size: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SIZES)} [all but tiny]; repeat.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only this of {', '.join(SYSTEMS)}; repeat.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a rehearsal.")] = "cuda",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of turns.")] = 10,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 5,
    warmup_steps: Annotated[int, typer.Option(min=1, help="First steps, not timed.")] = 3,
    tf32: Annotated[bool, typer.Option(help="TF32 matrix products.")] = True,
    results: Annotated[Path | None, typer.Option(help="Folder of JSON and plot [bench/results, on cuda].")] = None,
    document: Annotated[Path, typer.Option(help="Markdown page with the table.")] = report.DOCUMENT,
    write_document: Annotated[
        bool | None,
        typer.Option(help="Write the table into the page [only on cuda, and when everything runs]."),
    ] = None,
) -> None:
    """Compare fullshard and FSDP2 on one device: step time, memory and copies."""
    for chosen, known, option in (
        (part, PARTS, "--part"),
        (size, SIZES, "--size"),
        (only, SYSTEMS, "--only"),
    ):
        for name in chosen or ():
            if name not in known:
                raise typer.BadParameter(f"unknown {name!r}; known are {', '.join(known)}", param_hint=option)
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"unknown device {device!r}; known are cuda, cpu", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        console.print("bench.gpu_step: no CUDA device here, nothing measured (--device cpu rehearses the code)")
        return
    cases: list[dict[str, Any]] = []
    settings: Settings | None = None
    for chosen_part in part or list(PARTS):
        for chosen_size in size or list(DEFAULT_SIZES):
            settings = Settings(
                part=chosen_part,
                size=chosen_size,
                device=device,
                systems=tuple(name for name in SYSTEMS if not only or name in only),
                rounds=rounds,
                steps_per_round=steps_per_round,
                warmup_steps=warmup_steps,
                tf32=tf32,
            )
            console.print(f"{chosen_part}, {chosen_size} ...")
            case = _in_own_process(settings)
            add_ratios(case["contestants"])
            cases.append({"part": chosen_part, "size": chosen_size, "shape": asdict(settings.shape), **case})
    assert settings is not None
    environment = current_environment(_device_name(device))
    text = table(cases)
    console.print(f"\n{text}\n", markup=False, soft_wrap=True)
    folder = results or (report.RESULTS if device == "cuda" else None)
    if folder is None:
        return
    path = folder / f"gpu_step_{environment.name}.json"
    recorded = {key: value for key, value in asdict(settings).items() if key not in ("part", "size")}
    result = {
        "benchmark": "gpu_step",
        "settings": recorded,
        "environment": environment.as_json(),
        "cases": cases,
    }
    report.write_json(path, result)
    image = path.with_suffix(".png")
    _plot(image, cases)
    everything = device == "cuda" and not (only or part or size)
    if write_document if write_document is not None else everything:
        block = _document_block(settings, text, cases, environment, image, document)
        report.update_document(document, "gpu_step", block)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    typer.run(main)
