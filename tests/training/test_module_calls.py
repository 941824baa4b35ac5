"""Modules used any number of times, in any order and graph: losses and gradients are those of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from front_ends import (
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_trains_alike,
    both_backward,
    build,
    gathered,
    sharded_with_reference,
    unwrapped,
)
from fullshard import full_tensors, fully_shard, register_fsdp_forward_method
from fullshard.comm import record
from models import Block, LossOf, Stack, batch, reference_backward, square_loss, tiny_units
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
    """Registered methods unshard; a unit that runs none can be gathered by hand and saved."""
    model, reference = build(Coder), build(Coder)
    for layer in (model.down, model.up):
        fully_shard(layer, mesh=rank.mesh, layout=layout)
    fully_shard(model, mesh=rank.mesh, layout=layout)
    for _ in range(2):
        model.unshard()
        assert model.scale.shape == (3,)
        model.reshard()
    for name, value in full_tensors(model):
        assert torch.equal(value, reference.state_dict()[name])
    for name in ("encode", "decode"):
        register_fsdp_forward_method(model, name)

    def loss(step: int) -> LossOf:
        def of(coder: Any, r: int) -> torch.Tensor:
            return coder.decode(coder.encode(torch.linspace(-1, 1, 12).view(2, 6) + step + r)).square().mean()

        return of

    assert_trains_alike(model, reference, rank, loss)


# -------------------------------------------------------------------- forwards of one step

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def repeated(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The same block in the middle, in a row and at the end."""
    return model(x, run=[0, 1, 0, 0, 2, 1, 0])


def two_forwards(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two forwards for one backward, of other sizes."""
    return torch.cat([model(x), model(x[:3] + 1)])


def other_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Forwards that run parts of the model, then all of it, then none of the blocks."""
    return sum(model(x + i, run=run) for i, run in enumerate(([0], [2, 1], None, [1, 0], [])))


def no_grad_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A unit without gradients behind one with, and one with behind both."""
    x = model.blocks[0](x)
    with torch.no_grad():
        offset = model.blocks[1](x)
    return model.blocks[1](x + offset)


def output_unused(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward whose output is dropped before another one."""
    model(x + 3)
    return model(x)


def evaluated_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Forwards without gradients, of the model and of a part, between forward and backward."""
    output = model(x)
    with torch.no_grad():
        model(-x)
        model.blocks[2](x)
    return output


def skipped(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A block that does not run."""
    return model(x, run=[0, 2])


def differentiable_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Inputs that require gradients, as those from elsewhere do."""
    return model(x.requires_grad_())


def part_alone(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A unit inside, without its root."""
    return model.blocks[1](x)


def part_and_root(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The unit inside before, and after, the root that has it as well."""
    return torch.cat([model.blocks[1](x)[:, :3], model(x), model.blocks[1](x + 1)[:, :3]])


FORWARDS: list[Forward] = [
    repeated,
    two_forwards,
    other_parts,
    output_unused,
    evaluated_between,
    skipped,
    differentiable_input,
    no_grad_between,
    part_alone,
    part_and_root,
]


def loss_of(forward: Forward, step: int) -> LossOf:
    return lambda model, rank: forward(model, batch(rank, step, 4, 6)).square().mean()


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, forward=FORWARDS)
def test_any_use_of_modules(rank: Rank, front_end: FrontEnd, strategy: str, forward: Forward) -> None:
    """Modules used repeatedly, partly, alone or in vain train as unsharded ones, and each unit is reduced once."""
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    model.zero_grad()
    for step in range(3):
        with record() as seen:
            both_backward(model, reference, rank, loss_of(forward, step))
        reduced = {(c.unit, c.launch) for c in seen if c.kind in ("reduce_scatter", "all_reduce")}
        alone = forward in (part_and_root, no_grad_between)  # what runs without the root is a root of its own
        assert alone or len(reduced) == len({unit for unit, _ in reduced})
        assert_same_gradients(model, reference)
        for one in (model, reference):
            one.zero_grad(set_to_none=step == 1)
        model.blocks[1].reshard() if front_end.composable else None
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@each_value(2, front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_each_step_in_another_way(rank: Rank, strategy: str, front_end: FrontEnd) -> None:
    """Every step may use the model in another way than the one before: prefetches that guess wrong harm nobody."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    uses = [forward for forward in FORWARDS if forward not in (part_and_root, no_grad_between)]
    assert_trains_alike(model, reference, rank, lambda step: loss_of(uses[step % len(uses)], step), steps=len(uses) + 2)


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=STRATEGIES, order=["FFbB", "FFBb", "FFs", "FBB", "FBs"])
def test_graphs_and_backwards(rank: Rank, front_end: FrontEnd, strategy: str, order: str) -> None:
    """Two (F)orwards with (B)ackwards in any order, of the (s)um, or of one graph that is retained."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack), strategy=strategy)
    for _ in range(2):
        if order.startswith("FF"):
            losses = [square_loss(step)(model, rank.rank) for step in range(2)]
            if order == "FFs":
                sum(losses).backward()
            else:
                for loss in losses if order == "FFBb" else losses[::-1]:
                    loss.backward()
            expected = [square_loss(step) for step in range(2)]
        else:
            output = model(batch(rank.rank, 0, 4, 6))
            output.square().mean().backward(retain_graph=True)
            if strategy != "SHARD_GRAD_OP":
                assert [name for name in gathered(model) if "blocks" in name] == []
            (output.sum() if order == "FBs" else output.square().mean()).backward()
            second = (lambda m, r: m(batch(r, 0, 4, 6)).sum()) if order == "FBs" else square_loss(0)
            expected = [square_loss(0), second]
        for each in expected:
            reference_backward(reference, rank.world_size, each)
        assert_same_gradients(model, reference)
        assert_at_rest(model)


class Recursive(Block):
    """Calls its unit again, twice."""

    def __init__(self) -> None:
        super().__init__(6)
        self.__dict__["again"] = self

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return x if depth == 0 else self.__dict__["again"](x, depth - 1)


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_recursion(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """A unit that runs inside its own forward trains right."""
    plain = build(Stack)
    plain.blocks = nn.ModuleList(build(Recursive) for _ in range(2))
    model, reference = sharded_with_reference(front_end, rank, plain, strategy=strategy)
    for copied, unit in zip(reference.blocks, model.blocks, strict=True):
        copied.__dict__["again"] = copied
        unwrapped(unit).__dict__["again"] = unit
    assert_trains_alike(model, reference, rank)


class Strange(nn.Module):
    """Units that return their input, take no tensor, have no parameters, or return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Same(6, 6), Constant(), nn.Tanh(), Silent(), nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same, constant, without, silent, last = self.layers
        x = same(self.first(x)) + constant(6)
        silent(x)
        return last(without(x))


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

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.mean = super().forward(x).mean().detach()


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


class ViewChanged(nn.Module):
    """Changes in place the view that a unit returned, or a view of that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList([View(), View(), View()]), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.layers:
            x = part(x)
            if self.how == "whole":
                x.mul_(2)
            elif self.how == "part":
                x[:, 0].add_(1)
            else:
                x.flatten(1).unbind(0)  # views that nobody changes
            x = x.flatten(1)
        return x


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, how=["whole", "part", "not"], strategy=["FULL_SHARD", "SHARD_GRAD_OP"])
def test_view_of_an_output_changed_in_place(rank: Rank, front_end: FrontEnd, how: str, strategy: str) -> None:
    """An operation in place on a view that a unit returned leaves its collectives where they were in backward."""
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, build(ViewChanged, how), strategy=strategy)
    assert_trains_alike(model, reference, rank)
    loss = square_loss()(model, rank.rank)
    with record() as seen:
        loss.backward()
    assert list(dict.fromkeys(c.unit for c in seen if c.kind == "reduce_scatter")) == [
        "layers.2",
        "layers.1",
        "layers.0",
    ]
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
