"""Parameters that are frozen, at any time, ignored, or put into a sharded model: only trainable ones are reduced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as composable_ddp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from compare import assert_equal
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FLAT,
    FRONT_ENDS,
    ORIGINAL,
    FrontEnd,
    assert_same_gradients,
    assert_same_values,
    both_backward,
    build,
    each_front_end,
    sharded_with_reference,
    step_and_clear,
    token_loss,
    unwrapped,
)
from fullshard import fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import unit_of
from models import Language, Mlp, Stack, batch, reference_backward, square_loss, tokens
from pairwise import each_value
from ranks import Rank, on_ranks

LAYERS, WIDTH = 4, 32

Choice = Callable[[Any], list[nn.Parameter]]


def layers() -> nn.Sequential:
    return build(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))))


def layer_loss(step: int) -> Any:
    return square_loss(step, 8, WIDTH)


@on_ranks(2)
@pytest.mark.parametrize(("front_end", "early"), [(COMPOSABLE, False), (ORIGINAL, True), (FLAT, True)], ids=str)
def test_only_trainable_elements_are_reduced(rank: Rank, early: bool, front_end: FrontEnd) -> None:
    """With frozen weights the biases' elements are reduced, plus presence numbers and padding."""
    plain = layers()
    for layer in plain if early else ():
        layer[0].weight.requires_grad_(False)
    model = front_end.wrap(plain, rank)
    for layer in () if early else model:
        layer[0].weight.requires_grad_(False)
    with record() as seen:
        layer_loss(0)(model, rank.rank).backward()
    reduced = [c for c in seen if c.kind == "reduce_scatter"]
    assert list(dict.fromkeys(c.unit for c in reduced)) == ["3", "2", "1", "0"]
    assert LAYERS * WIDTH <= sum(c.numel for c in reduced) <= LAYERS * (WIDTH + 8 * rank.world_size)


class Ends(nn.ModuleDict):
    """An embedding and a head, called one at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["head" if x.is_floating_point() else "embedding"](x)


class Sandwich(nn.Module):
    """A layer between the two, in whose backward the head is frozen if ``freezes``."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = Ends({"embedding": nn.Embedding(13, 6), "head": nn.Linear(6, 13)})
        self.middle, self.freezes = nn.Linear(6, 6), False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.ends(ids))
        x.register_hook(lambda _: self.ends["head"].requires_grad_(not self.freezes) and None)
        return self.ends(x)


@on_ranks(2)
def test_freezing_between_the_parts_of_an_open_ended_backward(rank: Rank) -> None:
    """A gradient of the first part of a unit's backward is reduced although its parameter is frozen before the end.

    The ids tell no end, so the unit rests after the head's part, holding its gradient, until backward is over.
    Were the head not noted then, it would not take part in the reduction and have no gradient, or one too late.
    """
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Sandwich), ["ends", "middle"])
    for step, freezes in enumerate((False, True, False)):
        model.freezes = freezes
        both_backward(model, reference, rank, lambda m, r, step=step: m(tokens(r, step, 4, 5)).square().mean())
        assert model.ends["head"].weight.requires_grad != freezes
        assert_same_gradients(model, reference)
        model.ends["head"].requires_grad_(True)
        model.zero_grad()
        reference.zero_grad()


# -------------------------------------------------------------------- ignored parameters


def a_block(model: Any) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


IGNORED: dict[str, Choice] = {
    "biases": lambda model: [p for p in model.parameters() if p.ndim == 1],
    "a block": a_block,
    "of the root": lambda model: [*model.first.parameters(), model.last.bias],
    "everything": lambda model: list(model.parameters()),
}


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
@each_value(front_end=FRONT_ENDS, which=IGNORED, strategy=["FULL_SHARD", "SHARD_GRAD_OP"])
def test_ignored_parameters_stay_what_they_are(rank: Rank, front_end: FrontEnd, which: str, strategy: str) -> None:
    """The same plain objects, with this rank's gradients; averaged by hand, the whole model trains right."""
    model, reference, ignored = ignoring(front_end, rank, IGNORED[which], strategy=strategy)
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
        step_and_clear(*optimizers)
    assert_same_values(model, reference, **CLOSE)
    present = {id(p): p for p in model.parameters()}
    assert all(type(present[each]) is nn.Parameter and present[each].shape == held[each].shape for each in held)
    if front_end.composable:
        assert all(isinstance(p, DTensor) == (key not in held) for key, p in present.items())
    assert list(model.state_dict()) == list(reference.state_dict())


@on_ranks(2)
@each_front_end
def test_ignored_parameters_are_never_sent(rank: Rank, front_end: FrontEnd) -> None:
    """They get this rank's own gradient; their owner may write to, replace and freeze them at any time."""
    model, reference, ignored = ignoring(front_end, rank, a_block)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert "blocks.1" not in {c.unit for c in seen} and {c.kind for c in seen} == {"all_gather", "reduce_scatter"}
    square_loss()(reference, rank.rank).backward()
    for ours, theirs in zip(ignored, reference.blocks[1].parameters(), strict=True):
        assert_equal(ours.grad, theirs.grad, "gradient of this rank")
    assert model.state_dict()["blocks.1.up.weight"].data_ptr() == ignored[0].data_ptr()
    for each in (model, reference):
        block = unwrapped(each.blocks[1])
        block.up.weight = nn.Parameter(torch.full_like(block.up.weight, 0.1))
        block.down.requires_grad_(False)
        each.zero_grad()
    square_loss(1)(model, rank.rank).backward()
    average(a_block(unwrapped(model)), rank)
    reference_backward(reference, rank.world_size, square_loss(1))
    assert unwrapped(model.blocks[1]).down.weight.grad is None
    assert_same_gradients(model, reference)


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
def test_ignored_parameters_keep_their_dtype(rank: Rank, front_end: FrontEnd) -> None:
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
def test_ignoring_a_tied_parameter(rank: Rank, front_end: FrontEnd) -> None:
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
def test_one_call_alone_ignores(rank: Rank) -> None:
    """A unit above need not repeat it; a lazy parameter may be ignored, and gets its shape in the first forward."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4)), nn.LazyLinear(3))
    fully_shard(model[0], mesh=rank.mesh, ignored_params=model[0].parameters())
    fully_shard(model, mesh=rank.mesh, ignored_params=model[1].parameters())
    assert type(model[0][0].bias) is nn.Parameter and unit_of(model).parameters == []
    assert model(torch.ones(2, 6)).shape == (2, 3)
    assert model[1].weight.shape == (3, 4) and not isinstance(model[1].weight, DTensor)


# -------------------------------------------------------------------- parameters that are added after sharding


class Adapter(nn.Module):
    """A layer with a low-rank addition."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def warnings_of(model: nn.Module, rank: Rank) -> list[str]:
    """Those about parameters, of two steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model(batch(rank.rank, step, 4, 6)).square().mean().backward()
            step_and_clear(optimizer)
    return [str(each.message) for each in caught if "were put into a sharded model" in str(each.message)]


def with_adapter(model: Any) -> Adapter:
    """Put an adapter around the first layer."""
    layers = unwrapped(model).layers
    layers[0] = Adapter(layers[0])
    return layers[0]


@on_ranks(1, 2)
@each_value(front_end=FRONT_ENDS, frozen=[False, True], steps=[0, 1, 1, 0])
def test_added_parameters_are_reported_once(rank: Rank, front_end: FrontEnd, frozen: bool, steps: int) -> None:
    """A warning at the first step names those that the optimizer trains, by their FQNs in the user's model."""
    model = front_end.wrap(build(Mlp, 6, 7, 3), rank)
    assert not steps or not warnings_of(model, rank)
    model.requires_grad_(not frozen)
    with_adapter(model)
    found = warnings_of(model, rank)
    assert len(found) == (rank.world_size > 1)
    assert all("layers.0.down.weight, layers.0.up.weight;" in each for each in found)


def all_reduce(parameter: Any) -> None:
    dist.all_reduce(parameter.grad)


AVERAGED: dict[str, Callable[[nn.Module], Any]] = {
    "frozen": lambda m: m.requires_grad_(False),
    "DistributedDataParallel": DistributedDataParallel,
    "composable DistributedDataParallel": composable_ddp,
    "sharded": fully_shard,
    "hooks": lambda m: m.weight.register_post_accumulate_grad_hook(all_reduce),
}


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, how=AVERAGED)
def test_parameters_that_are_averaged_otherwise_are_not_reported(rank: Rank, front_end: FrontEnd, how: str) -> None:
    """No warning where gradients are averaged by other means, or where there are none."""
    model = front_end.wrap(build(Mlp, 6, 7, 3), rank)
    adapter = with_adapter(model)
    for name in ("down", "up"):
        made = AVERAGED[how](getattr(adapter, name))
        if isinstance(made, nn.Module):
            setattr(adapter, name, made)
    assert not warnings_of(model, rank)


@on_ranks(2)
@each_front_end
def test_ignored_parameters_are_not_reported(rank: Rank, front_end: FrontEnd) -> None:
    """Parameters that sharding was told to ignore are left to their owner without a word, in copies too."""
    plain = build(Mlp, 6, 7, 3)
    model = front_end.wrap(plain, rank, [], **front_end.ignoring(plain.layers[1].parameters()))
    for each in (copy.deepcopy(model), model):
        assert not warnings_of(each, rank)
