"""Optimizers on flat parameters and on pieces: built before or after wrapping, in groups, several, in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from wrapper_models import CLOSE, adam, assert_like, assert_trains_alike, backward, slice_of, with_reference, wrap

from compare import assert_equal, fqn_of
from fullshard import FullshardError, FullyShardedDataParallel, ShardingStrategy
from models import Branch, LossOf, Stack, batch, reference_backward, square_loss
from pairwise import pairwise
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
BLOCKS = ["blocks.0", "blocks.1"]

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam,
    "sgd": lambda parameters, **more: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, **more),
}


@on_ranks(2)
@pairwise(original=[False, True], kind=list(KINDS), how=["single", "foreach", "fused"])
def test_built_after_wrapping(rank: Rank, original: bool, kind: str, how: str) -> None:
    """An optimizer of the wrapped model's parameters trains as one of the unsharded model's does."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    more = {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
    optimizers = KINDS[kind](model.parameters(), **more), KINDS[kind](reference.parameters(), **more)
    assert_trains_alike(model, reference, rank, optimizers, steps=4)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_built_before_wrapping(rank: Rank, strategy: ShardingStrategy) -> None:
    """With original parameters an optimizer from before wrapping trains the same objects."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    ours, theirs = adam(model.parameters()), adam(reference.parameters())
    mesh = rank.make_mesh(1, 2, names=("replicate", "shard")) if strategy.hybrid else rank.mesh
    wrapped = wrap(model, rank, BLOCKS, use_orig_params=True, sharding_strategy=strategy, device_mesh=mesh)
    assert_trains_alike(wrapped, reference, rank, (ours, theirs), steps=4)
    for parameter in wrapped.parameters():
        assert ours.state[parameter]["exp_avg"].shape == parameter.shape


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not and learn faster. By names: pieces have one dim only."""
    named = [(fqn_of(name), p) for name, p in model.named_parameters()]
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
    ]


@on_ranks(2)
@pytest.mark.parametrize(("before", "foreach"), [(False, False), (True, True)])
def test_parameter_groups(rank: Rank, before: bool, foreach: bool) -> None:
    """Groups with their own settings act on the right elements, whether they were made before or after wrapping."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    early = adam(decay_groups(model), foreach=foreach)
    wrapped = wrap(model, rank, BLOCKS, use_orig_params=True)
    ours = early if before else adam(decay_groups(wrapped), foreach=foreach)
    assert_trains_alike(wrapped, reference, rank, (ours, adam(decay_groups(reference), foreach=foreach)), steps=4)


@on_ranks(2)
@pairwise(original=[False, True], to_none=[True, False], when=["before forward", "before backward"])
def test_time_of_zero_grad(rank: Rank, original: bool, to_none: bool, when: str) -> None:
    """Gradients can be cleared before the forward, or between forward and backward."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    ours, theirs = adam(model.parameters()), adam(reference.parameters())

    def clear(now: str) -> None:
        if now == when:
            ours.zero_grad(set_to_none=to_none)

    for step in range(3):
        clear("before forward")
        loss = square_loss(step)(model, rank.rank)
        clear("before backward")
        loss.backward()
        theirs.zero_grad(set_to_none=to_none)
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_like(model, reference, grads=True, **CLOSE)
        ours.step()
        theirs.step()
    assert_like(model, reference, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_two_optimizers(rank: Rank, before: bool) -> None:
    """Two optimizers, one of which clears gradients to None: where they are None, Adam does not step."""
    model = Stack(2)
    reference = copy.deepcopy(model)

    def optimizers(of: nn.Module) -> list[torch.optim.Optimizer]:
        weights, biases = (group["params"] for group in decay_groups(of))
        return [adam(weights), torch.optim.Adam(biases, lr=0.02, eps=1e-3)]

    early = optimizers(model)
    wrapped = wrap(model, rank, BLOCKS, use_orig_params=True)
    ours, theirs = early if before else optimizers(wrapped), optimizers(reference)
    for step in range(4):
        backward(wrapped, reference, rank, square_loss(step))
        for one in (ours, theirs):
            if step == 2:
                one[1].zero_grad(set_to_none=True)
            for optimizer in one:
                optimizer.step()
            one[0].zero_grad(set_to_none=False)
            one[1].zero_grad(set_to_none=True)
    for one, other in zip(ours, theirs, strict=True):
        steps = [[float(state["step"]) for state in o.state.values()] for o in (one, other)]
        assert steps[0] == steps[1]
    assert {float(state["step"]) for state in ours[1].state.values()} == {3.0}
    assert_like(wrapped, reference, **CLOSE)


# -------------------------------------------------------------------- in backward


def assert_steps_in_backward(wrapped: nn.Module, reference: nn.Module, rank: Rank) -> None:
    """Require backwards of ``wrapped`` to be steps of SGD with momentum, and to leave no gradients."""
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        square_loss(step)(wrapped, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        theirs.step()
        theirs.zero_grad()
        assert all(p.grad is None for p in wrapped.parameters())
        assert_like(wrapped, reference, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize(
    ("original", "when"),
    # Hooks on parameters that are hidden later are on objects that get no gradient.
    [(True, "before"), (True, "after"), (False, "after"), (True, "after a step"), (False, "after a step")],
)
def test_optimizer_in_a_hook(rank: Rank, original: bool, when: str) -> None:
    """A hook after the gradient has been accumulated can step and clear it, which is what an ordinary step does."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    made: dict[int, torch.optim.Optimizer] = {}

    def step_and_clear(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        made[id(parameter)].step()
        parameter.grad = None

    def install(of: nn.Module) -> None:
        for parameter in of.parameters():
            made[id(parameter)] = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(step_and_clear)

    if when == "before":
        install(model)
    wrapped = wrap(model, rank, BLOCKS, use_orig_params=original)
    if when == "after a step":
        square_loss(9)(wrapped, rank.rank).backward()
        wrapped.zero_grad()
    if when != "before":
        install(wrapped)
    assert_steps_in_backward(wrapped, reference, rank)


@on_ranks(2)
@pytest.mark.parametrize(("original", "when"), [(True, "before"), (True, "after"), (False, "after")])
def test_apply_optimizer_in_backward(rank: Rank, original: bool, when: str) -> None:
    """torch's optimizers in backward train as an ordinary optimizer does, and leave no gradients."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    if when == "before":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
    wrapped = wrap(model, rank, BLOCKS, use_orig_params=original)
    if when == "after":
        _apply_optimizer_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.1, "momentum": 0.9})
    assert_steps_in_backward(wrapped, reference, rank)


# -------------------------------------------------------------------- gradients of None, and set by the user


def branch_loss(step: int) -> LossOf:
    """Every rank takes another branch in every step."""

    def loss_of(of: nn.Module, number: int) -> torch.Tensor:
        branch = of.module if isinstance(of, FullyShardedDataParallel) else of
        branch.rank = number + step
        return of(batch(number, step, 4, 6)).square().mean()

    return loss_of


@on_ranks(3)
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
def test_missing_gradients_stay_none(rank: Rank, strategy: ShardingStrategy) -> None:
    """A parameter without gradient on all ranks has None; one with a gradient on some ranks has it on all."""
    model, reference = with_reference(Branch(), rank, use_orig_params=True, sharding_strategy=strategy)
    ours, theirs = adam(model.parameters()), adam(reference.parameters())
    for step in range(3):
        with model.no_sync():
            branch_loss(step)(model, rank.rank).backward()
        branch_loss(step + 4)(model, rank.rank).backward()
        for number in (step, step + 4):  # the same branch twice, which other ranks may not take
            reference_backward(reference, rank.world_size, branch_loss(number))
        assert_like(model, reference, grads=True, **CLOSE)
        none = {fqn_of(name) for name, p in model.named_parameters() if p.grad is None}
        assert none == {"never.weight", "never.bias"}
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(p not in ours.state for p in model.module.never.parameters())
    assert_like(model, reference, **CLOSE)


@on_ranks(4)
@BOTH
def test_missing_gradients_with_replicas(rank: Rank, original: bool) -> None:
    """With both axes, shards and replicas, a gradient that some ranks have is averaged over all."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model, reference = with_reference(
        Branch(), rank, use_orig_params=original, sharding_strategy=strategy, device_mesh=mesh
    )
    optimizers = adam(model.parameters(), weight_decay=0.0), adam(reference.parameters(), weight_decay=0.0)
    assert_trains_alike(model, reference, rank, optimizers, loss=branch_loss, grads=original)


@on_ranks(2)
def test_missing_gradients_in_a_flat_parameter_are_zero(rank: Rank) -> None:
    """In the gradient of a visible flat parameter, what has none is zero."""
    model, reference = with_reference(Branch(), rank)
    backward(model, reference, rank, branch_loss(0))
    (flat,) = model.parameters()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    assert_equal(flat.grad, slice_of(expected, rank), "gradient")


@on_ranks(2)
@BOTH
def test_zeros_stay_zeros(rank: Rank, original: bool) -> None:
    """``zero_grad(set_to_none=False)`` leaves zeros, which the next gradients are added to."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original)
    backward(model, reference, rank, square_loss(0))
    model.zero_grad(set_to_none=False)
    reference.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert_like(model, reference, grads=True)
    kept = [p.grad for p in model.parameters()]
    backward(model, reference, rank, square_loss(1))
    assert all(p.grad is old for p, old in zip(model.parameters(), kept, strict=True))
    assert_like(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pairwise(original=[False, True], how=["none", "assigned", "data"])
def test_gradients_set_by_the_user(rank: Rank, original: bool, how: str) -> None:
    """A gradient that is set to None, assigned, or filled through ``.data`` is what the next backward adds to."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original)
    backward(model, reference, rank, square_loss(0))
    for parameter in (*model.parameters(), *reference.parameters()):
        if how == "none":
            parameter.grad = None
        elif how == "assigned":
            parameter.grad = torch.full_like(parameter, 0.5)
        else:
            parameter.grad.data = torch.full_like(parameter, -0.25)
    backward(model, reference, rank, square_loss(1))
    assert_like(model, reference, grads=True, **CLOSE)
    ours, theirs = adam(model.parameters()), adam(reference.parameters())
    ours.step()
    theirs.step()
    assert_like(model, reference, **CLOSE)


@on_ranks(2)
def test_wrong_assignment_in_flat_mode(rank: Rank) -> None:
    """A parameter put in the place of a hidden one is refused with its name, on all ranks."""
    model = wrap(nn.Linear(5, 3), rank)
    model.module.weight = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(FullshardError, match=r"weight.*use_orig_params"):
        model(batch(0, 0, 2, 5))
