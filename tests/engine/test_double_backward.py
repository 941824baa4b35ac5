"""Gradients of gradients: penalties, forces, products with the Hessian, meta-learning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard, replicate, unsharded
from ranks import Rank, on_ranks

WIDTH = 6


class Critic(nn.Module):
    """Blocks that are called several times in a step, with parameters of the root before and behind them."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(depth)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def data(rank: int, step: int, kind: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * rank + kind)).double()


def gradient_of_input(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return gradient


def penalty(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss that is nothing but a gradient penalty."""
    return (gradient_of_input(module, data(rank, step)).norm(dim=1) - 1).square().mean()


def wasserstein(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The critic's loss of WGAN-GP: outputs for two batches, and a penalty between them."""
    real, fake = data(rank, step, 1), data(rank, step, 2)
    return module(fake).mean() - module(real).mean() + 10 * penalty(module, rank, step)


def penalty_first(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The same with the penalty computed ahead of the batches."""
    between = penalty(module, rank, step)
    return between + module(data(rank, step, 1)).square().mean()


def force(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A force that is to match a target."""
    return (-gradient_of_input(module, data(rank, step)) - data(rank, step, 3)).square().mean()


def two_penalties(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A penalty on the second derivative."""
    x = data(rank, step).requires_grad_()
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean() + first.square().mean()


LOSSES: list[Callable[[nn.Module, int, int], torch.Tensor]] = [
    penalty,
    wasserstein,
    penalty_first,
    force,
    two_penalties,
]
FRONT_ENDS = ["composed", "kept", "one unit", "replicated", "wrapped", "wrapped flat", "NO_SHARD"]


def build(front_end: str, model: Critic) -> Any:
    model = copy.deepcopy(model)
    if front_end == "one unit":
        return fully_shard(model)
    if front_end in ("composed", "kept", "replicated"):
        shard: Callable[..., Any] = replicate if front_end == "replicated" else fully_shard
        options = {"reshard_after_forward": False} if front_end == "kept" else {}
        for block in model.blocks:
            shard(block, **options)
        root: Any = shard(model, **options)
        if front_end == "kept":  # what docs/differences.md recommends
            root.set_reshard_after_backward(False)
        return root
    options = {"use_orig_params": front_end != "wrapped flat"}
    if front_end == "NO_SHARD":
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, **options)
    return FSDP(model, **options)


def train_and_compare(rank: Rank, model: Any, reference: nn.Module, loss_of: Any, backwards: int = 1) -> None:
    optimizer, expected = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, reference))
    for step in range(3):
        loss = loss_of(model, rank.rank, step)
        for index in range(backwards):
            loss.backward(retain_graph=index + 1 < backwards)
        losses = [loss_of(reference, each, step) for each in range(rank.world_size)]
        assert_close(loss.detach(), losses[rank.rank].detach(), f"loss of step {step}", rtol=1e-9)
        (torch.stack(losses).mean() * backwards).backward()
        assert all(p.grad is not None for p in reference.parameters() if p is not list(reference.parameters())[-1])
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()


@on_ranks(1, 2)
@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_training_on_gradients(rank: Rank, front_end: str, loss_of: Any) -> None:
    """Losses of three steps of Adam are those of the unsharded model, with default settings too."""
    reference = Critic().double()
    model = build(front_end, reference)
    train_and_compare(rank, model, reference, loss_of)


@on_ranks(2)
@pytest.mark.parametrize("front_end", ["composed", "wrapped"])
def test_backward_twice(rank: Rank, front_end: str) -> None:
    """The graph of gradients can be run again: parameters are unsharded for it each time."""
    reference = Critic().double()
    train_and_compare(rank, build(front_end, reference), reference, wasserstein, backwards=2)


@on_ranks(2)
def test_accumulation(rank: Rank) -> None:
    """A penalty-only loss in a microbatch without sync, then one with."""
    reference = Critic().double()
    model = build("composed", reference)
    for index, loss_of in enumerate([penalty, force, wasserstein]):
        model.set_requires_gradient_sync(index == 2)
        loss_of(model, rank.rank, index).backward()
        torch.stack([loss_of(reference, each, index) for each in range(2)]).mean().backward()
    for name, parameter in reference.named_parameters():
        found = model.get_parameter(name).grad
        assert isinstance(found, DTensor), name
        assert_close(found.full_tensor(), parameter.grad, name, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_product_with_the_hessian(rank: Rank) -> None:
    """Derivatives by parameters, inside of ``unsharded``, where the full parameters are at hand and stay."""
    reference = Critic().double()
    model = build("composed", reference)

    def product(module: nn.Module) -> list[torch.Tensor]:
        parameters = list(module.parameters())
        loss = module(data(0, 0)).square().mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = torch.stack([(g * torch.ones_like(g)).sum() for g in gradients]).sum()
        return list(torch.autograd.grad(inner, parameters))

    with unsharded(model):
        found = product(model)
    for actual, expected in zip(found, product(reference), strict=True):
        assert_close(actual, expected, "product with the Hessian", rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_gradient_norm_in_unsharded(rank: Rank) -> None:
    """A loss on derivatives by parameters trains them, although no output of a unit is in it."""
    reference = Critic().double()
    model = build("composed", reference)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        loss = module(data(number, 0)).square().mean()
        return torch.stack(
            [g.square().sum() for g in torch.autograd.grad(loss, list(module.parameters()), create_graph=True)]
        ).sum()

    with unsharded(model):
        loss_of(model, rank.rank).backward()
    torch.stack([loss_of(reference, each) for each in range(2)]).mean().backward()
    for name, parameter in reference.named_parameters():
        found = model.get_parameter(name).grad
        assert isinstance(found, DTensor), name
        assert_close(found.full_tensor(), parameter.grad, name, rtol=1e-9, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("front_end", ["composed", "kept", "one unit", "wrapped"])
def test_graph_of_gradients_entered_inside_a_unit(rank: Rank, front_end: str) -> None:
    """A penalty on the gradient of an activation inside a unit: its parameters are there for the second backward."""
    reference = Critic().double()
    model = build(front_end, reference)

    def loss_of(module: Any, number: int, step: int) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        norm = next(m for m in module.modules() if isinstance(m, nn.LayerNorm))
        handle = norm.register_forward_hook(lambda *args: kept.append(args[2]))
        loss = module(data(number, step)).square().mean()
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, kept[0], create_graph=True)
        return gradient.square().mean() * 100

    train_and_compare(rank, model, reference, loss_of)
