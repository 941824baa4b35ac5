"""Ignored parameters: neither sharded, cast nor reduced; what they are told is the business of their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_equal
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FRONT_ENDS,
    FrontEnd,
    assert_same_gradients,
    assert_same_values,
    build,
    each_front_end,
    sharded_with_reference,
    token_loss,
    unwrapped,
)
from fullshard import FSDPModule, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from models import Language, Stack, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks


def biases(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 1]


def a_block(model: Any) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


def of_the_root(model: Any) -> list[nn.Parameter]:
    return [*model.first.parameters(), model.last.bias]


def everything(model: Any) -> list[nn.Parameter]:
    return list(model.parameters())


Choice = Callable[[Any], list[nn.Parameter]]


def average(parameters: Iterable[nn.Parameter], rank: Rank) -> None:
    """What the owner of ignored parameters has to do."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def ignoring(front_end: FrontEnd, rank: Rank, choose: Choice, **options: Any) -> tuple[Any, Any, list[nn.Parameter]]:
    """A model, its reference, and what was ignored."""
    plain = build(Stack)
    ignored = choose(plain)
    model, reference = sharded_with_reference(front_end, rank, plain, **front_end.ignoring(ignored), **options)
    return model, reference, ignored


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS,
    choose=[biases, a_block, of_the_root, everything],
    strategy=["FULL_SHARD", "SHARD_GRAD_OP"],
)
def test_trains_like_the_plain_module(rank: Rank, front_end: FrontEnd, choose: Choice, strategy: str) -> None:
    """They stay the same plain objects with this rank's gradients; averaged by hand, the whole model trains right.

    Microbatches without synchronization add up in their ``.grad`` as autograd leaves them.
    """
    model, reference, ignored = ignoring(front_end, rank, choose, strategy=strategy)
    held = {id(p): p.detach().clone() for p in ignored}
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, eps=1e-4, foreach=False) for m in (model, reference)]
    for step in range(3):
        with front_end.no_sync(model):
            square_loss(10 + step)(model, rank.rank).backward()
        square_loss(step)(model, rank.rank).backward()
        average(ignored, rank)
        for each in (10 + step, step):
            reference_backward(reference, rank.world_size, square_loss(each))
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)
    present = {id(p): p for p in model.parameters()}
    assert all(type(present[each]) is nn.Parameter and present[each].shape == held[each].shape for each in held)
    if front_end.composable:
        assert all(isinstance(p, DTensor) == (key not in held) for key, p in present.items())
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())


@on_ranks(2)
@each_front_end
def test_own_gradients_and_bytes(rank: Rank, front_end: FrontEnd) -> None:
    """They get this rank's own gradient, and are never sent."""
    model, reference, ignored = ignoring(front_end, rank, a_block)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert "blocks.1" not in {c.unit for c in seen} and {c.kind for c in seen} == {"all_gather", "reduce_scatter"}
    square_loss()(reference, rank.rank).backward()
    for ours, theirs in zip(ignored, reference.blocks[1].parameters(), strict=True):
        assert_equal(ours.grad, theirs.grad, "gradient of this rank")
    assert model.state_dict()["blocks.1.up.weight"].data_ptr() == ignored[0].data_ptr()


class Scaled(nn.Linear):
    """A layer with a float64 scale and an integer table; notes the dtypes of all three."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.kinds: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kinds.append((self.weight.dtype, self.scale.dtype, self.table.dtype))
        return super().forward(x).double() * self.scale * self.table


@on_ranks(2)
@each_front_end
def test_dtype_and_trainability_are_kept(rank: Rank, front_end: FrontEnd) -> None:
    """A precision policy does not cast them; frozen, integer and float64 ones are as good as others."""
    plain = build(Scaled)
    scale, table = plain.scale, plain.table
    options = {**front_end.precision(torch.bfloat16, torch.float32), **front_end.ignoring([scale, table])}
    model = front_end.wrap(plain, rank, [], **options)
    model(batch(rank.rank, 0, 2, 4)).sum().backward()
    assert plain.kinds == [(torch.bfloat16, torch.float64, torch.int64)]
    assert plain.scale is scale and plain.table is table
    assert scale.grad.dtype is torch.float64 and table.grad is None
    assert {p.grad.dtype for p in model.parameters() if p is not scale and p is not table} == {torch.float32}


@on_ranks(2)
@each_front_end
def test_tied_parameter(rank: Rank, front_end: FrontEnd) -> None:
    """Ignoring a tied parameter ignores it under all its names."""
    plain = build(Language)
    tied = plain.head.weight
    model, reference = sharded_with_reference(front_end, rank, plain, ["head"], **front_end.ignoring([tied]))
    assert plain.embedding.weight is tied and tied.shape == (13, 6)
    token_loss()(model, rank.rank).backward()
    average([tied], rank)
    reference_backward(reference, 2, token_loss())
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_front_end
def test_replaced_and_edited_between_steps(rank: Rank, front_end: FrontEnd) -> None:
    """They may be written to, replaced and frozen by their owner at any time."""
    model, reference, _ = ignoring(front_end, rank, a_block)
    square_loss()(model, rank.rank).backward()
    blocks = [unwrapped(each.blocks[1]) for each in (model, reference)]
    for block in blocks:
        block.up.weight = nn.Parameter(torch.full_like(block.up.weight, 0.1))
        block.down.requires_grad_(False)
    for each in (model, reference):
        each.zero_grad()
    square_loss(1)(model, rank.rank).backward()
    average(blocks[0].up.parameters(), rank)
    reference_backward(reference, 2, square_loss(1))
    assert blocks[0].down.weight.grad is None
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_methods_of_a_unit_without_parameters(rank: Rank) -> None:
    """Where all parameters are ignored every method still works, and nothing is sent."""
    model, reference, _ = ignoring(COMPOSABLE, rank, everything)
    assert isinstance(model, FSDPModule) and not any(unit.parameters for unit in nested_units(model))
    with record() as seen:
        model.unshard()
        model.reshard()
        model.unshard(async_op=True).wait()
        square_loss()(model, rank.rank).backward()
        model.set_requires_gradient_sync(False)
        model.synchronize_gradients()
        assert model.get_pending_gradients() == {}
    assert seen == []
    square_loss()(reference, rank.rank).backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_one_call_alone_ignores(rank: Rank) -> None:
    """A unit above need not repeat it; a lazy parameter may be ignored, and gets its shape in the first forward."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4)), nn.LazyLinear(3))
    fully_shard(model[0], mesh=rank.mesh, ignored_params=model[0].parameters())
    fully_shard(model, mesh=rank.mesh, ignored_params=model[1].parameters())
    assert type(model[0][0].bias) is nn.Parameter and unit_of(model).parameters == []
    assert model(torch.ones(2, 6)).shape == (2, 3)
    assert model[1].weight.shape == (3, 4) and not isinstance(model[1].weight, DTensor)
