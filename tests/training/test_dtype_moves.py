"""``to(dtype)`` and the like on sharded models, at any time: parameters, gradients and optimizers move along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compare import assert_close
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FRONT_ENDS,
    ORIGINAL,
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
    unwrapped,
)
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import LossOf, Mlp, Stack, batch, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

MOVES: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda m: m.to(torch.float64), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "there and back": (lambda m: m.double().float(), torch.float32),
    "nothing": (lambda m: m.to(torch.empty(0).device), torch.float32),
}
WHEN: dict[str, Callable[[Any, Rank], object]] = {
    "before the first forward": lambda model, rank: None,
    "after steps": lambda model, rank: None,
    "after a forward": lambda model, rank: square_loss(5)(model, rank.rank),
    "unsharded": lambda model, rank: getattr(model.blocks[0], "unshard", lambda: None)(),
}


def typed_loss(dtype: torch.dtype) -> Callable[[int], LossOf]:
    """The mean square of outputs for inputs in ``dtype``."""
    return lambda step: lambda model, rank: model(batch(rank, step, 4, 6).to(dtype)).float().square().mean()


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, move=MOVES, when=WHEN)
def test_moves_of_the_whole_model(rank: Rank, front_end: FrontEnd, move: str, when: str) -> None:
    """Parameters stay the same objects; gathers, reductions and training go on in the new dtype."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    optimizers = [sgd(m, 0.05, momentum=0.9) for m in (model, reference)]
    if when == "after steps":
        assert_trains_alike(model, reference, rank, steps=2, optimizers=optimizers)
        optimizers = [sgd(m, 0.05, momentum=0.9) for m in (model, reference)]
    WHEN[when](model, rank)
    function, dtype = MOVES[move]
    before = list(model.parameters()) if when != "unsharded" else []
    assert function(model) is model
    function(reference)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=bool(before)))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_same_values(model, reference, **({"rtol": 1e-2, "atol": 1e-6} if dtype.itemsize < 4 else CLOSE))
    tolerance = CLOSE if dtype.itemsize >= 4 else {"rtol": 5e-2, "atol": 3e-3}
    with record() as seen:
        assert_trains_alike(model, reference, rank, typed_loss(dtype), optimizers=optimizers, **tolerance)
    assert {c.dtype for c in seen} <= {dtype}


@on_ranks(2)
@each_front_end
def test_gradients_move_along(rank: Rank, front_end: FrontEnd) -> None:
    """Gradients that are there move with the parameters, further ones are added, and an old optimizer steps."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 1))
    optimizers = [sgd(m, 0.1) for m in (model, reference)]
    both_backward(model, reference, rank, square_loss())
    for module in (model, reference):
        module.double()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
    assert_same_gradients(model, reference)
    both_backward(model, reference, rank, typed_loss(torch.float64)(1))
    assert_same_gradients(model, reference)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_values(model, reference, **CLOSE)


@on_ranks(3)
@each_value(front_end=[COMPOSABLE, ORIGINAL], frozen=[False, True])
def test_part_of_a_unit(rank: Rank, frozen: bool, front_end: FrontEnd) -> None:
    """Converting part of a unit gives it a second bucket; moved back, or both to one dtype, it keeps every value."""
    model, reference = sharded_with_reference(front_end, rank, build(Mlp, 6, 5, 4), [])
    for module in (unwrapped(model), reference):
        module.layers[0].bias.requires_grad_(not frozen)
        module.layers[1].double()
        module.layers[0].register_forward_hook(lambda _, args, out, m=module: out.to(m.layers[1].weight.dtype))
    assert_trains_alike(model, reference, rank)
    assert {b.shard_buffer.dtype for b in nested_units(model)[0].buckets} == {torch.float32, torch.float64}
    for module in (model, reference):
        module.float()
    assert_trains_alike(model, reference, rank)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_moves_elsewhere_keep_everything(rank: Rank) -> None:
    """A move to where the shards are keeps parameters and memory; one elsewhere keeps values, gradients and device."""
    model = COMPOSABLE.wrap(build(Stack, 1), rank)
    square_loss()(model, rank.rank).backward()
    before = [(id(p), p.to_local().data_ptr(), id(p.grad)) for p in model.parameters()]
    model.to(rank.device).float()
    assert [(id(p), p.to_local().data_ptr()) for p in model.parameters()] == [entry[:2] for entry in before]
    values = [(p.to_local().clone(), p.grad.to_local().clone()) for p in model.parameters()]
    model.cpu()
    for p, (value, gradient) in zip(model.parameters(), values, strict=True):
        assert p.device == p.grad.device == rank.device
        assert_close(p.to_local(), value, "value", rtol=0)
        assert_close(p.grad.to_local(), gradient, "gradient", rtol=0)
    assert [len(unit.buckets) for unit in nested_units(model)] == [1, 1]
    assert_at_rest(model)
