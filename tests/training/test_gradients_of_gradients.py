"""Gradients of gradients, and backwards and whole steps inside of a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compare import assert_close
from front_ends import (
    COMPOSABLE,
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    each_front_end,
    full_gradients,
    sgd,
    sharded_with_reference,
)
from fullshard import unsharded
from models import LossOf, Stack, batch, reference_backward
from pairwise import each_value
from ranks import Rank, on_ranks

EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}


def critic() -> nn.Module:
    return build(Stack, 2).double()


def data(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, 4, 6).double()


def second_derivative(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss that is nothing but penalties on the first and the second derivative."""
    x = data(rank, step).requires_grad_()
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean() + first.square().mean()


def inside_a_unit(module: Any, rank: int, step: int) -> torch.Tensor:
    """A penalty on the gradient of an activation inside a unit, whose parameters the second backward needs."""
    kept: list[torch.Tensor] = []
    inner = next(m for name, m in module.named_modules() if name.endswith("up"))
    handle = inner.register_forward_hook(lambda *args: kept.append(args[2]))
    loss = module(data(rank, step)).square().mean()
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, kept[0], create_graph=True)
    return gradient.square().mean() * 100


Loss = Callable[[Any, int, int], torch.Tensor]
LOSSES: list[Loss] = [second_derivative, inside_a_unit]


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, units=[None, None, None, []], loss=LOSSES)
def test_training_on_gradients(rank: Rank, front_end: FrontEnd, strategy: str, units: Any, loss: Loss) -> None:
    """Losses, gradients and weights are those of the unsharded model, with any strategy, in units or in one."""
    model, reference = sharded_with_reference(front_end, rank, critic(), units, strategy=strategy)

    def loss_at(step: int) -> LossOf:
        return lambda module, number: loss(module, number, step)

    assert_trains_alike(model, reference, rank, loss_at, rtol=1e-7, atol=1e-10)


@on_ranks(2)
def test_derivatives_by_parameters_inside_unsharded(rank: Rank) -> None:
    """A product with the Hessian, and training on a norm of gradients, although no output of a unit is in it."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, critic())

    def product(module: nn.Module) -> list[torch.Tensor]:
        parameters = list(module.parameters())
        loss = module(data(0, 0)).square().mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = torch.stack([(g * torch.ones_like(g)).sum() for g in gradients]).sum()
        return list(torch.autograd.grad(inner, parameters))

    def norm(module: nn.Module, number: int) -> torch.Tensor:
        loss = module(data(number, 0)).square().mean()
        gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    with unsharded(model):
        found = product(model)
    for actual, expected in zip(found, product(copy.deepcopy(reference)), strict=True):
        assert_close(actual, expected, "product with the Hessian", **EXACT)
    with unsharded(model):
        norm(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, norm)
    assert_same_gradients(model, reference, **EXACT)


# -------------------------------------------------------------------- [Note: Steps inside a forward]


class Trainer(nn.Module):
    """A forward that is one or several training steps, if it is given an optimizer."""

    optimizer: torch.optim.Optimizer | None = None
    steps = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.optimizer is None:
            return self.loss(x)[None]
        losses = []
        for _ in range(self.steps):
            loss = self.loss(x)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, units=[["middle"], []], steps=[1, 1, 2, 2])
def test_whole_steps_inside_a_forward(rank: Rank, front_end: FrontEnd, units: list[str], steps: int) -> None:
    """All parameters are trained, those of the unit whose forward is open as well; then steps outside are right.

    Of several steps the second computes with what the first has made. A module that is one unit is trained, although
    no output of a unit tells of the backward.
    """
    trainer = build(Trainer)
    model, reference = sharded_with_reference(front_end, rank, trainer, units)
    optimizer, theirs = (sgd(each, 0.1) for each in (model, reference))
    trainer.steps = steps
    for call in range(3):
        trainer.optimizer = optimizer if call < 2 else None
        found = model(batch(rank.rank, call, 4, 6))
        if trainer.optimizer is None:
            found.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for index, loss in enumerate(found.detach()):
            expected = reference_backward(reference, 2, lambda m, r, call=call: m.loss(batch(r, call, 4, 6)))
            assert_close(loss, expected[rank.rank], f"loss {call}, {index}", rtol=1e-5)
            theirs.step()
            theirs.zero_grad()
    assert_same_values(model, reference, rtol=1e-4, atol=1e-6)


class Uneven(Trainer):
    """Has a layer that is used or not."""

    uses_extra = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x) + (self.extra(torch.ones(3)).square().mean() if self.uses_extra else 0)


@on_ranks(2)
@each_front_end
def test_ranks_that_use_other_parameters_inside(rank: Rank, front_end: FrontEnd) -> None:
    """What is reduced does not depend on which gradients a rank has."""
    trainer = build(Uneven)
    model = front_end.wrap(trainer, rank, ["middle"])
    trainer.uses_extra = rank.rank == 0
    trainer.optimizer = sgd(model, 0.1)
    for step in range(2):
        model(batch(rank.rank, step, 4, 6))
    trainer.optimizer, trainer.uses_extra = None, True
    model(batch(rank.rank, 0, 4, 6)).sum().backward()
    assert full_gradients(model)["extra.weight"] is not None


class Apart(nn.Module):
    """A backward inside the forward that no nested unit takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head(self.inner(x).detach()).sum().backward()
        return x


@on_ranks(2)
@each_front_end
def test_a_backward_that_no_nested_unit_takes_part_in(rank: Rank, front_end: FrontEnd) -> None:
    """Its gradients are averaged, and those of the next forward are added to them."""
    model = front_end.wrap(build(Apart), rank, ["inner"])
    for step in range(1, 3):
        model(torch.full((2, 4), float(1 + rank.rank)))
        found = full_gradients(model)
        assert found["inner.weight"] is None
        assert_close(found["head.bias"], torch.tensor([2.0 * step]), "gradient of bias", rtol=1e-6)


class Forces(nn.Module):
    """Takes gradients by its input inside its own forward, as physics models do."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6)])
        self.head, self.trained = nn.Linear(6, 3), trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.blocks[1](torch.tanh(self.blocks[0](x))).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.trained)
        return self.head(force)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, trained=[True, False])
def test_gradients_of_inputs_inside_a_forward(rank: Rank, front_end: FrontEnd, strategy: str, trained: bool) -> None:
    """Forces are no steps: they leave the root able to go on, whether they are trained through or not."""
    model, reference = sharded_with_reference(front_end, rank, build(Forces, trained), strategy=strategy)
    assert_trains_alike(model, reference, rank)
