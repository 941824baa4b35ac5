"""One rank that trains contestants one after another, each with every allocation recorded."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from bench.contestants import UNSHARDED, distribute, prepare, start_fake_group
from bench.memory_limit.ledger import Ledger, mark, range_of, recorded
from bench.memory_limit.reading import BOUNDARY, GRADIENT, MEASURED, read
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.turns import reason_of
from bench.worker import join_group

WARMUP_STEPS = 2


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
        parameter.register_post_accumulate_grad_hook(
            lambda p, unit=unit: mark(f"{GRADIENT}|{unit}|{p.grad.untyped_storage().data_ptr()}")
        )


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


def train(system: str, mode: str, shape: GPTShape, rank: int) -> tuple[Ledger, float]:
    """Build and train in the contestant's way; the last step is the measured one. The ledger and its loss."""
    batches = [batch_of(shape, step, rank) for step in range(WARMUP_STEPS + 1)]
    with recorded() as ledger:
        with range_of("build"):
            torch.manual_seed(0)
            model = distribute(system, GPT(shape), Block, torch.device("cpu"), mode)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            gc.collect()
        for batch in batches[:-1]:
            with range_of("warm-up step"):
                step(model, optimizer, batch)
        gc.collect()
        if isinstance(model, GPT) and system == UNSHARDED:
            watch_units(model)
        with range_of(MEASURED):
            loss = step(model, optimizer, batches[-1])
        loss_value = loss.item()
    return ledger, loss_value


class Worker:
    """Measures systems in modes.

    Args:
        shape: Of the model.
        rank: Of this process.
    """

    def __init__(self, shape: GPTShape, rank: int) -> None:
        self.shape, self.rank = shape, rank

    def measure(self, system: str, mode: str) -> dict[str, Any]:
        """A reading; or why there is none, after which other ranks may wait in vain."""
        try:
            prepare(system)
            return {"reading": asdict(read(*train(system, mode, self.shape, self.rank)))}
        except Exception as error:
            return {"error": reason_of(error)}
        finally:
            gc.collect()


def build(width: int, blocks: int, tokens: int, ranks: int, rank: int = 0, store: str = "", threads: int = 1) -> Worker:
    """Make rank 0 of a fake group if there is no file where ranks meet."""
    torch.set_flush_denormal(True)
    if store:
        join_group(rank, ranks, store)
    else:
        start_fake_group(ranks)
    return Worker(GPTShape(width, blocks, tokens), rank)
