"""A small model, its data, and runs of it: through Lightning on fullshard, and without either."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
import fullshard.dropin

RATE = 1e-2
HALF = 4  # samples of one rank in one step

Pair = tuple[torch.Tensor, torch.Tensor]
Clip = Callable[[list[nn.Parameter]], object]


class Block(nn.Module):
    """A residual block, whose inputs and weights it remembers the dtypes of."""

    seen: set[tuple[torch.dtype, torch.dtype]]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.seen = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((x.dtype, self.up.weight.dtype))
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class FSDPOnCpu(FSDPStrategy):
    """Lightning turns an FSDPStrategy away where there is no GPU; a subclass it lets pass."""


def net() -> nn.Sequential:
    """The same for every call: (*, 6) -> (*, 3). Sizes that two ranks cannot share evenly are among them."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), Block(7), Block(7), nn.Linear(7, 3))


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def batch(rank: int, step: int) -> Pair:
    """What ``rank`` trains on in ``step``."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(HALF, 6, generator=generator), torch.randn(HALF, 3, generator=generator)


def loss_of(model: nn.Module, pair: Pair) -> torch.Tensor:
    return (model(pair[0]).float() - pair[1]).square().mean()


def unsharded(
    model: nn.Module,
    steps: Sequence[int],
    world: int = 2,
    accumulate: int = 1,
    clip: Clip | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[list[float]]:
    """Train a plain model on the batches of all ranks, summing gradients in the order in which ranks' are summed.

    Returns:
        The loss of every rank, by step.
    """
    optimizer, losses = optimizer or adam(model), []
    for step in steps:
        losses.append([])
        for rank in range(world):
            loss = loss_of(model, batch(rank, step))
            (loss / (world * accumulate)).backward()
            losses[-1].append(loss.item())
        if (step + 1) % accumulate == 0:
            if clip is not None:
                clip(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(fabric: Fabric, model: Any, optimizer: Any, steps: Sequence[int]) -> list[float]:
    """This rank's part in the same training, through Fabric."""
    losses = []
    for step in steps:
        loss = loss_of(model, batch(fabric.global_rank, step))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """fullshard in the place of torch's FSDP, and Lightning told that torchrun has started this rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    with fullshard.dropin.install(quiet=True):
        yield


def fabric_on(strategy: Any, **options: Any) -> Fabric:
    """Fabric on the ranks of the pool."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **options)
    fabric.launch()
    return fabric


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters of a model that is sharded in either way, on every rank, as in the plain model."""

    def taken() -> dict[str, torch.Tensor]:
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.named_parameters()
        }
        return {
            name.replace("_fsdp_wrapped_module.", "").replace("_forward_module.", ""): value.detach().clone()
            for name, value in whole.items()
        }

    if not any(isinstance(m, fullshard.FullyShardedDataParallel) for m in model.modules()):
        return taken()
    with fullshard.FullyShardedDataParallel.summon_full_params(model):
        return taken()
