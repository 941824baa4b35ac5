"""Modules used any number of times, in any order and graph, with or without gradients, and edited in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from front_ends import (
    CLOSE,
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_trains_alike,
    both_backward,
    build,
    each_front_end,
    gathered,
    sgd,
    sharded_with_reference,
    unwrapped,
)
from fullshard import full_tensors, fully_shard, register_fsdp_forward_method
from fullshard.comm import record
from models import Block, LossOf, Stack, batch, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks

# -------------------------------------------------------------------- modules without forward


class Coder(nn.Module):
    """Two methods and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x) * self.scale

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x / self.scale)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_modules_without_forward(rank: Rank, layout: str) -> None:
    """Registered methods unshard; a unit that runs none can be unsharded by hand and saved."""
    model, reference = build(Coder), build(Coder)
    for module in (model.down, model.up, model):
        fully_shard(module, mesh=rank.mesh, layout=layout)
    for _ in range(2):
        model.unshard()
        assert model.scale.shape == (3,)
        model.reshard()
    for name, value in full_tensors(model):
        assert torch.equal(value, reference.state_dict()[name])
    for name in ("encode", "decode"):
        register_fsdp_forward_method(model, name)

    def loss(step: int) -> LossOf:
        return lambda coder, r: coder.decode(coder.encode(batch(r, step, 2, 6))).square().mean()  # type: ignore[operator]

    assert_trains_alike(model, reference, rank, loss)


# -------------------------------------------------------------------- forwards of one step


def no_grad_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A unit without gradients behind one with, and one with behind both."""
    x = model.blocks[0](x)
    with torch.no_grad():
        offset = model.blocks[1](x)
    return model.blocks[1](x + offset)


def evaluated_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Forwards without gradients, of the model and of a part, between forward and backward."""
    output = model(x)
    with torch.no_grad():
        model(-x)
        model.blocks[2](x)
    return output


FORWARDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "blocks again and again": lambda m, x: m(x, run=[0, 1, 0, 0, 2, 1, 0]),
    "parts, all, no block": lambda m, x: sum(m(x + i, run=r) for i, r in enumerate(([0], [2, 1], None, [1, 0], []))),
    "evaluated between": evaluated_between,
    "no grad between": no_grad_between,
    "part and root": lambda m, x: torch.cat([m.blocks[1](x)[:, :3], m(x), m.blocks[1](x + 1)[:, :3]]),
}
SEVERAL_ROOTS = ("no grad between", "part and root")  # a unit that runs without the root is a root of its own


def loss_of(forward: str, step: int) -> LossOf:
    return lambda model, rank: FORWARDS[forward](model, batch(rank, step, 4, 6)).square().mean()


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, forward=FORWARDS)
def test_any_use_of_modules(rank: Rank, front_end: FrontEnd, strategy: str, forward: str) -> None:
    """Modules used repeatedly, partly, alone or in vain train as unsharded ones, and each unit is reduced once."""
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    for step in range(2):
        with record() as seen:
            both_backward(model, reference, rank, loss_of(forward, step))
        reduced = {(c.unit, c.launch) for c in seen if c.kind in ("reduce_scatter", "all_reduce")}
        assert forward in SEVERAL_ROOTS or len(reduced) == len({unit for unit, _ in reduced})
        assert_same_gradients(model, reference)
        if front_end.composable:
            model.blocks[1].reshard()
    for module in (model, reference):
        module.zero_grad()
    assert_trains_alike(model, reference, rank, steps=2)


class Recursive(Block):
    """Calls its unit again, twice."""

    again: list[Any]

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self.again[0](x, depth - 1) if depth else x


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_recursion(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """A unit that runs inside its own forward trains right."""
    plain = build(Stack)
    plain.blocks = nn.ModuleList(build(Recursive, 6) for _ in range(2))
    model, reference = sharded_with_reference(front_end, rank, plain, strategy=strategy)
    for unit in (*reference.blocks, *model.blocks):
        unwrapped(unit).again = [unit]
    assert_trains_alike(model, reference, rank)


class Same(nn.Linear):
    """Has parameters, and returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Constant(nn.Module):
    """Takes a number; its output depends on parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9))

    def forward(self, size: int) -> torch.Tensor:
        return torch.sin(self.table[:size])


class Silent(nn.Linear):
    """Returns nothing, and remembers the mean of what it saw."""

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.mean = super().forward(x).mean().detach()


class Strange(nn.Module):
    """Units that return their input, take no tensor, have no parameters, or return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Same(6, 6), Constant(), nn.Tanh(), Silent(6, 6), nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same, constant, without, silent, last = self.layers
        x = same(self.first(x)) + constant(6)
        silent(x)
        return last(without(x))


@on_ranks(2)
@each_value(2, front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_units_that_autograd_hardly_sees(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """They are resharded, reduced if they have gradients, and train right; without gradients what users keep stays."""
    model, reference = sharded_with_reference(front_end, rank, build(Strange), strategy=strategy)
    assert_trains_alike(model, reference, rank)
    with torch.no_grad():
        model(batch(0, 0, 4, 6))
    keeps = front_end.composable or front_end.flat
    if not (keeps and strategy == "SHARD_GRAD_OP"):
        assert gathered(model) in ([], [""] * keeps)


# -------------------------------------------------------------------- views and operations in place


class View(nn.Module):
    """Returns a view of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x)).view(-1, 2, 3)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "whole": lambda x: x.mul_(2),
    "part": lambda x: x[:, 0].add_(1),
    "not": lambda x: x.flatten(1).unbind(0),  # views that nobody changes
}


class ViewChanged(nn.Module):
    """Changes in place the view that a unit returned, or a view of that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList([View(), View(), View()]), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.layers:
            x = part(x)
            CHANGES[self.how](x)
            x = x.flatten(1)
        return x


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, how=CHANGES, strategy=["FULL_SHARD", "SHARD_GRAD_OP"])
def test_view_of_an_output_changed_in_place(rank: Rank, front_end: FrontEnd, how: str, strategy: str) -> None:
    """An operation in place on a view that a unit returned leaves its collectives where they were in backward."""
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, build(ViewChanged, how), strategy=strategy)
    assert_trains_alike(model, reference, rank)
    loss = square_loss()(model, rank.rank)
    with record() as seen:
        loss.backward()
    reduced = list(dict.fromkeys(c.unit for c in seen if c.kind == "reduce_scatter"))
    assert reduced == ["layers.2", "layers.1", "layers.0"]
    assert ("layers.0" in {c.unit for c in seen if c.kind == "all_gather"}) == (strategy == "FULL_SHARD")


class InPlace(nn.Module):
    """Changes its first input in place: by itself, or by adding a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x.relu_() if y is None else x.add_(y))


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, inputs=[1, 2])
def test_input_changed_in_place(rank: Rank, inputs: int, front_end: FrontEnd) -> None:
    """A unit that changes a differentiable input in place is refused by autograd, never wrong, and recovers."""
    model, reference = sharded_with_reference(front_end, rank, build(InPlace), [])
    x = batch(rank.rank, 0, 4, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(*[x * 1 for _ in range(inputs)])
    assert_at_rest(model)
    # An input that requires no gradient is the caller's own tensor, as in an unsharded module.
    constant = batch(rank.rank, 0, 4, 6)
    assert_close(model(constant), reference(batch(rank.rank, 0, 4, 6)), "output", rtol=1e-5, atol=1e-6)
    assert constant.min() == 0


# -------------------------------------------------------------------- evaluation, and parameters that users write to


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS, context=[torch.inference_mode, torch.no_grad], strategy=["SHARD_GRAD_OP", "FULL_SHARD"]
)
def test_inference_first(rank: Rank, front_end: FrontEnd, context: Callable[[], Any], strategy: str) -> None:
    """Sharding where gradients are off, and a first forward without them, do not spoil the training that follows."""
    plain = build(Stack)
    with torch.no_grad():
        model, reference = sharded_with_reference(front_end, rank, plain, strategy=strategy)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    for _ in range(2):
        with context():
            model(batch(0, 0, 4, 6))
        assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS, strategy=STRATEGIES, before=["nothing", "no-grad forward", "abandoned forward", "step"]
)
def test_edits_in_place_are_seen(rank: Rank, front_end: FrontEnd, strategy: str, before: str) -> None:
    """What is written to parameters in place, whatever ran before, the next forward computes with, and trains on.

    What a forward with gradients keeps for its backward a wrapper does not unshard again: an optimizer's step is seen.
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
    assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
@each_front_end
def test_edits_after_a_forward_without_a_backward(rank: Rank, front_end: FrontEnd) -> None:
    """Frozen or trainable, edited parameters count; composed, also those that the forward has kept for a backward."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack))
    x = batch(0, 0, 4, 6)
    for trainable in (False, True):
        model.requires_grad_(trainable)
        with torch.set_grad_enabled(front_end.composable):
            model(x)
        with torch.no_grad():
            for module in (model, reference):
                for parameter in unwrapped(module).blocks.parameters():
                    parameter.mul_(-0.5)
            assert_close(model(x), reference(x), "output", **CLOSE)
