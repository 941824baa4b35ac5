"""Forwards without gradients between steps, and parameters that users write to: the next forward sees the last word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compare import assert_close
from front_ends import (
    CLOSE,
    EXACT_RATE,
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    both_backward,
    build,
    each_front_end,
    sgd,
    sharded_with_reference,
)
from fullshard.engine.ownership import nested_units
from models import Stack, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_evaluation_between_steps(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """In eval mode, under no_grad and in inference mode forwards see the last step, agree, and change nothing.

    Also before the first step, and between a forward and its backward.
    """
    model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    optimizers = [sgd(m, EXACT_RATE) for m in (model, reference)]
    x = batch(7, 7, 4, 6)
    for step in range(4):
        outputs: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            expected = reference(x)
            outputs["training"] = model(x)
            outputs["eval"] = model.eval()(x)
        with torch.inference_mode():
            outputs["inference"] = model(x).clone()
        seen = {unit.name for unit in nested_units(model) if unit.registration.unsharded}
        kept = {unit.name for unit in nested_units(model)} if strategy == "SHARD_GRAD_OP" else {""}
        assert seen == (kept if front_end.composable or front_end.flat else set())
        outputs["with graph"] = model(x).detach()
        model.train()
        for name, output in outputs.items():
            assert_close(output, expected, name, **CLOSE)
        loss = square_loss(step)(model, rank.rank)
        with torch.inference_mode():
            model(x)
        loss.backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, context=[torch.no_grad, torch.inference_mode])
def test_inference_first(rank: Rank, context: Callable[[], Any], front_end: FrontEnd) -> None:
    """Sharding where gradients are off, and a first forward without them, do not spoil the training that follows."""
    plain = build(Stack)
    with torch.no_grad():
        model, reference = sharded_with_reference(front_end, rank, plain)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    for _ in range(2):
        with context():
            model(batch(0, 0, 4, 6))
        assert_trains_alike(model, reference, rank)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS, strategy=STRATEGIES, before=["nothing", "no-grad forward", "abandoned forward", "step"]
)
def test_edits_in_place_are_seen(rank: Rank, front_end: FrontEnd, strategy: str, before: str) -> None:
    """What is written to parameters in place, whatever ran before, the next forward computes with, and trains on.

    What a forward with gradients keeps for its backward is not gathered again by a wrapper: an optimizer's step is.
    """
    model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    optimizers = [sgd(m, 0.5) for m in (model, reference)]
    x = batch(0, 1, 4, 6)
    for _ in range(2):
        both_backward(model, reference, rank, square_loss())
        if before in ("no-grad forward", "abandoned forward"):
            with torch.set_grad_enabled(before == "abandoned forward"):
                model(x)
        if before in ("step", "abandoned forward"):
            for optimizer in optimizers:
                optimizer.step()
        else:
            with torch.no_grad():
                for parameter in (*model.parameters(), *reference.parameters()):
                    parameter.mul_(1.25)
        assert_close(model(x), reference(x), "output", rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@each_front_end
@pytest.mark.parametrize("trainable", [True, False])
def test_zeroed_parameters_compute_zeros(rank: Rank, trainable: bool, front_end: FrontEnd) -> None:
    """Frozen parameters may be edited in place as well; composed, also those that a forward has kept for backward."""
    model = front_end.wrap(build(Stack), rank)
    model.requires_grad_(trainable)
    with torch.set_grad_enabled(front_end.composable):
        model(batch(0, 0, 4, 6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert not model(batch(0, 0, 4, 6)).any()
