"""Modules of wrapped models that run twice or not at all, in unusual order, or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_models import (
    CLOSE,
    adam,
    assert_at_rest,
    assert_like,
    assert_trains_alike,
    backward,
    with_reference,
)

from fullshard import ShardingStrategy
from models import LossOf, Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
STRATEGIES = pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
FEWER = pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
BLOCKS = ["blocks.0", "blocks.1"]


# -------------------------------------------------------------------- called twice, or not at all


Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def twice_in_a_row(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Blocks run twice in one forward."""
    return model(x, [0, 1, 1, 0])


def two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two forwards of the root for one backward."""
    return model(x) + model(2 * x)


def evaluated_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward without grad between forward and backward."""
    output = model(x)
    with torch.no_grad():
        model(-x)
    return output


def one_of_two(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward whose output is not used, then one whose output is."""
    model(-x)
    return model(x)


def missing_blocks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A block that does not run."""
    return model(x, [1])


def no_blocks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """None of the blocks runs."""
    return model(x, [])


FORWARDS: list[Forward] = [
    twice_in_a_row,
    two_forwards,
    evaluated_between,
    one_of_two,
    missing_blocks,
    no_blocks,
]


@on_ranks(2)
@BOTH
@FEWER
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda function: function.__name__)
def test_unusual_forwards(rank: Rank, original: bool, strategy: ShardingStrategy, forward: Forward) -> None:
    """Modules that run twice, or not, have the gradients of the unsharded model, and rest afterwards."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original, sharding_strategy=strategy)

    def loss(step: int) -> LossOf:
        return lambda of, number: forward(of, batch(number, step, 4, 6)).square().mean()

    assert_trains_alike(model, reference, rank, loss=loss)
    assert_at_rest(model)


@on_ranks(2)
@BOTH
def test_unusual_forwards_after_each_other(rank: Rank, original: bool) -> None:
    """Every step may run other modules than the one before."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)

    def loss(step: int) -> LossOf:
        forward = FORWARDS[step % len(FORWARDS)]
        return lambda of, number: forward(of, batch(number, step, 4, 6)).square().mean()

    assert_trains_alike(model, reference, rank, loss=loss, steps=2 * len(FORWARDS))
    assert_at_rest(model)


class Both(nn.Module):
    """Returns the outputs of two units, of which the loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        return {"left": self.left(x), "right": self.right(x)}


@on_ranks(2)
@BOTH
@STRATEGIES
def test_outputs_that_the_loss_does_not_use(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """A unit whose output is not used has no gradient, and is at rest after the backward of the others."""
    model, reference = with_reference(
        Both(), rank, ["left", "right"], use_orig_params=original, sharding_strategy=strategy
    )

    def loss(step: int) -> LossOf:
        key = "left" if step == 1 else "right"
        return lambda of, number: of(batch(number, step, 4, 6))[key].square().mean()

    assert_trains_alike(model, reference, rank, loss=loss)
    assert_at_rest(model)


# -------------------------------------------------------------------- exceptions


class BrokenError(Exception):
    """What the fragile module raises."""


class _BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise BrokenError("in backward")


class Fragile(nn.Module):
    """A linear layer that raises if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise BrokenError("in forward")
        x = self.linear(x)
        return _BreaksInBackward.apply(x) if self.fails == "backward" else x


class Chain(nn.Module):
    """Units around a fragile one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.fragile, self.after = nn.Linear(6, 6), Fragile(), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.after(torch.tanh(self.fragile(torch.tanh(self.before(x))))))


@on_ranks(2)
@BOTH
@FEWER
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1], ids=["first step", "later step"])
def test_recovery_after_an_exception(
    rank: Rank, original: bool, strategy: ShardingStrategy, where: str, step: int
) -> None:
    """After an exception in forward or backward the next step is as if it had not been."""
    plain = Chain()
    fragile = plain.fragile
    model, reference = with_reference(
        plain, rank, ["before", "fragile", "after"], use_orig_params=original, sharding_strategy=strategy
    )
    optimizers = adam(model.parameters()), adam(reference.parameters())
    registered = [id(p) for p in model.parameters()]
    if step:
        assert_trains_alike(model, reference, rank, optimizers, steps=1)
    model.zero_grad()
    reference.zero_grad()
    fragile.fails = where
    with pytest.raises(BrokenError):
        square_loss()(model, rank.rank).backward()
    fragile.fails = ""
    model.zero_grad()
    assert [id(p) for p in model.parameters()] == registered
    assert_trains_alike(model, reference, rank, optimizers)
    assert_at_rest(model)


@on_ranks(2)
@BOTH
@STRATEGIES
def test_backward_twice_through_one_graph(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """A graph that is retained can be gone through again: twice the gradient."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original, sharding_strategy=strategy)
    loss = square_loss()(model, rank.rank)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        reference_backward(reference, rank.world_size, square_loss())
    assert_like(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@BOTH
def test_inner_wrapper_alone(rank: Rank, original: bool) -> None:
    """After an iteration of the root, a wrapper inside can be run, and trained, by itself."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    backward(model, reference, rank, square_loss())
    inner, plain = model.module.blocks[1], reference.blocks[1]
    inner(batch(rank.rank, 7, 4, 6)).square().mean().backward()
    reference_backward(plain, rank.world_size, square_loss(7))
    assert_like(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)
    model.zero_grad()
    reference.zero_grad()
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@BOTH
@STRATEGIES
def test_looking_between_forward_and_backward(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """Full parameters, or a state dict, between two forwards do not disturb what comes after."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original, sharding_strategy=strategy)
    model(batch(0, 0, 4, 6))
    assert_like(model, reference)
    model(batch(0, 1, 4, 6))
    model.state_dict()
    assert_trains_alike(model, reference, rank)
