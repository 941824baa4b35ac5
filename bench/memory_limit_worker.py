"""One rank of ``bench.memory_limit``: trains contestants one after another, each with every allocation recorded.

Started by ``bench.memory_limit`` as ``python -m bench.memory_limit_worker``, its assignment as JSON in the first
argument. It writes one line of JSON per contestant to its standard output.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.contestants import (
    COMPOSABLE,
    UNSHARDED,
    WRAPPING,
    prepare,
    shard_units,
    start_fake_group,
    wrap_units,
)
from bench.memory_limit_labels import BOUNDARY, labelled, note_gradient
from bench.memory_limit_ledger import Ledger, mark, range_of, recorded
from bench.memory_limit_reading import MEASURED, Reading, read
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss

FP32, BF16, OFFLOAD = "fp32", "bf16", "offload"
MODES = (FP32, BF16, OFFLOAD)
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Assignment:
    """What one process measures. ``store``: the rendezvous file of its ranks; empty: a fake group of ``ranks``, which
    ``device`` "cuda" needs.
    """

    systems: tuple[str, ...]
    modes: tuple[str, ...]
    width: int
    blocks: int
    tokens: int
    ranks: int
    rank: int = 0
    store: str = ""
    device: str = "cpu"

    @classmethod
    def from_argument(cls, argument: str) -> Assignment:
        given = json.loads(argument)
        return cls(**{**given, "systems": tuple(given["systems"]), "modes": tuple(given["modes"])})

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @property
    def shape(self) -> GPTShape:
        return GPTShape(self.width, self.blocks, self.tokens)


def join(assignment: Assignment) -> None:
    """Make the default group that of the assignment."""
    if not assignment.store:
        start_fake_group(assignment.ranks)
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{assignment.store}",
        rank=assignment.rank,
        world_size=assignment.ranks,
        timeout=timedelta(seconds=300),
    )


def build(system: str, mode: str, model: nn.Module, device: torch.device) -> nn.Module:
    """The model as the contestant trains it in this mode."""
    if system == UNSHARDED:
        return model.to(device, torch.bfloat16 if mode == BF16 else None)
    if system in COMPOSABLE:
        library = importlib.import_module(COMPOSABLE[system])
        options: dict[str, Any] = {}
        if mode == BF16:
            options["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        elif mode == OFFLOAD:
            options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=device.type != "cpu")
        shard_units(system, model, Block, init_device_mesh(device.type, (dist.get_world_size(),)), **options)
        return model
    library = importlib.import_module(WRAPPING[system].library)
    options = {}
    if mode == BF16:
        options["mixed_precision"] = library.MixedPrecision(torch.bfloat16, torch.float32)
    elif mode == OFFLOAD:
        options["cpu_offload"] = library.CPUOffload(offload_params=True)
    return wrap_units(system, model, Block, device, **options)


def watch_units(model: GPT) -> None:
    """Of the unsharded model: mark when units begin and end, and which blocks are gradients of parameters."""
    names = {block: f"blocks.{index}" for index, block in enumerate(model.blocks)}

    def begins(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        mark(f"{BOUNDARY}|forward|{names[module]}")

    def ends(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        mark(f"{BOUNDARY}|forward|")
        output.register_hook(lambda _: mark(f"{BOUNDARY}|backward|{names[module]}"))
        if module is model.blocks[0]:  # inputs of the others are outputs
            inputs[0].register_hook(lambda _: mark(f"{BOUNDARY}|backward|"))

    for block in names:
        block.register_forward_pre_hook(begins)
        block.register_forward_hook(ends)
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        parameter.register_post_accumulate_grad_hook(lambda p, unit=unit: note_gradient(p.grad, unit))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One training step. Returns the loss without its graph."""
    with range_of("forward"):
        loss = next_token_loss(model, batch)
    with range_of("backward"):
        loss.backward()
    with range_of("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(system: str, mode: str, assignment: Assignment) -> tuple[Ledger, float]:
    """Build and train in the contestant's way; the last step is the measured one. The ledger and its loss."""
    shape = assignment.shape
    device = torch.device(assignment.device)
    batches = [batch_of(shape, step, assignment.rank, device) for step in range(WARMUP_STEPS + 1)]
    with recorded(device.type) as ledger:
        with range_of("build"):
            torch.manual_seed(0)
            model = build(system, mode, GPT(shape), device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            gc.collect()
        for batch in batches[:-1]:
            with range_of("warm-up step"):
                step(model, optimizer, batch)
        gc.collect()
        if isinstance(model, GPT) and system == UNSHARDED:
            watch_units(model)
        with labelled(model) if "fullshard" in system else contextlib.nullcontext(), range_of(MEASURED):
            loss = step(model, optimizer, batches[-1])
        loss_value = loss.item()
    return ledger, loss_value


def measure(system: str, mode: str, assignment: Assignment) -> Reading:
    """Train, and read the ledger."""
    ledger, loss = train(system, mode, assignment)
    return read(ledger, loss)


def main() -> None:
    """Measure everything of the assignment, one line each."""
    assignment = Assignment.from_argument(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for system in assignment.systems:
        prepare(system)
    join(assignment)
    for system in assignment.systems:
        for mode in assignment.modes:
            answer: dict[str, object] = {"system": system, "mode": mode}
            try:
                answer["reading"] = asdict(measure(system, mode, assignment))
            except Exception as error:
                traceback.print_exc()
                answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            answers.write(json.dumps(answer) + "\n")
            gc.collect()
            if "error" in answer and assignment.store:
                break  # the ranks may not be in step any more
    answers.flush()
    os._exit(0)  # other ranks may still be in their last step


if __name__ == "__main__":
    main()
