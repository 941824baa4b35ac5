"""Gradients that functions and hooks put into ``.grad`` of unsharded parameters, or look at there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close
from fullshard import fully_shard, replicate
from ranks import Rank, on_ranks


class FusedWeightGradient(torch.autograd.Function):
    """Adds the gradient of a weight to its ``.grad`` itself; the weight is none of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return x @ module.weight.detach().t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.module.weight
        mine = gradient.t() @ x
        weight.grad = mine if weight.grad is None else weight.grad + mine
        return gradient @ weight.detach(), None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedWeightGradient.apply(x, self)


class Hooked(nn.Linear):
    """Scales the gradient of its weight where it is accumulated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def double(parameter: torch.Tensor) -> None:
            parameter.grad.mul_(2.0)

        weight = self.weight
        if not getattr(weight, "has_hook", False):
            weight.has_hook = True
            weight.register_post_accumulate_grad_hook(double)
        return super().forward(x)


class Lookup(nn.Module):
    """An embedding whose gradients are sparse in one microbatch and dense in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.dense = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dense:
            return x @ self.table.weight.t()
        return self.table(torch.arange(3)) * x[:3].sum()


MODULES: dict[str, Callable[[], nn.Module]] = {"fused": Fused, "hooked": lambda: Hooked(4, 5), "lookup": Lookup}


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("shard", [fully_shard, replicate], ids=["sharded", "replicated"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_by_hand(rank: Rank, kind: str, shard: Callable[..., Any], microbatches: int) -> None:
    """They are reduced, and added to those of other microbatches."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), MODULES[kind]())
    reference = copy.deepcopy(model)
    shard(model[1])
    shard(model)

    def loss_of(module: nn.Module, number: int, step: int) -> torch.Tensor:
        if kind == "lookup":
            module[1].dense = step % 2 == 1
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + number))
        return module(x).square().mean()

    for step in range(microbatches):
        model.set_requires_gradient_sync(step == microbatches - 1)
        loss_of(model, rank.rank, step).backward()
    total: dict[str, torch.Tensor] = {}
    for step in range(microbatches):
        for number in range(rank.world_size):
            (loss_of(reference, number, step) / rank.world_size).backward()
            for name, parameter in reference.named_parameters():
                gradient, parameter.grad = parameter.grad.to_dense(), None
                total[name] = total[name] + gradient if name in total else gradient
    for name, expected in total.items():
        found = model.get_parameter(name).grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert_close(found, expected, name, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_memory_that_users_write_to(rank: Rank) -> None:
    """The gradient of an input shares its memory with that of a parameter; clearing it changes only its own."""
    position = nn.Parameter(torch.randn(16, 1024))
    model = nn.Module()
    model.position = position
    model.forward = lambda x: torch.tanh(x + model.position)
    before = position.detach().clone()
    fully_shard(model)
    expected = torch.zeros_like(before)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(rank.rank)).requires_grad_()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(x).sum().backward()
        x.grad.zero_()
    for number in range(2):
        at = torch.randn(16, 1024, generator=torch.Generator().manual_seed(number))
        expected += 3 * (1 - torch.tanh(at + before).square()) / 2
    assert_close(model.position.grad.full_tensor(), expected, "gradient of position", rtol=1e-5, atol=1e-6)
