"""Tied parameters: owned once, by the lowest unit that contains all their holders, under all their names."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_equal, fqn_of
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FRONT_ENDS,
    ORIGINAL,
    FrontEnd,
    adam,
    assert_at_rest,
    assert_same_values,
    assert_trains_alike,
    build,
    sharded_with_reference,
    token_loss,
    unwrapped,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import TiedParameterError, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from fullshard.wrap import ModuleWrapPolicy
from models import Block, Language, LossOf, tokens
from pairwise import each_value
from ranks import Rank, on_ranks


def deeper() -> nn.Module:
    """A language model below another module."""
    return nn.Sequential(OrderedDict(model=Language(), last=nn.Linear(13, 5)))


# Which modules become units, innermost first, below the root; and the unit that has to own the weight ("" is the root).
NESTINGS: dict[str, tuple[list[str], str]] = {
    "one unit": ([], ""),
    "blocks": (["model.blocks.0", "model.blocks.1"], ""),
    "sibling units": (["model.embedding", "model.head"], ""),
    "head first": (["model.head", "model.embedding"], ""),
    "embedding alone": (["model.embedding"], ""),
    "head alone": (["model.head"], ""),
    "ancestor in the middle": (["model.embedding", "model.norm", "model.head", "model"], "model"),
    "head and ancestor in the middle": (["model.head", "model"], "model"),
}


def loss_at(step: int) -> LossOf:
    return lambda model, rank: model(tokens(rank, step, 3, 4)).square().mean()


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, nesting=NESTINGS)
def test_lowest_common_unit_owns_it_once(rank: Rank, front_end: FrontEnd, nesting: str) -> None:
    """However its holders are spread over units: one owner, all names, one object, and training as unsharded."""
    units, owner = NESTINGS[nesting]
    model, reference = sharded_with_reference(front_end, rank, build(deeper), units)
    names = ["model.embedding.weight", "model.head.weight"]
    with record() as seen:
        assert_trains_alike(model, reference, rank, loss_at)
    assert all(c.numel for c in seen if c.kind == "all_gather")
    holders = {unit.name: p for unit in nested_units(model) for p in unit.parameters if len(p.fqns) > 1}
    assert list(holders) == [owner] and sorted(holders[owner].fqns) == names
    fqns = [fqn for unit in nested_units(model) for p in unit.parameters for fqn in p.fqns]
    assert len(fqns) == len(list(reference.named_parameters(remove_duplicate=False)))
    if not front_end.flat:
        assert len(list(model.parameters())) == len(list(reference.parameters()))
        visible = {fqn_of(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        assert visible[names[0]] is visible[names[1]]
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    if front_end.composable:
        assert state[names[0]].to_local().data_ptr() == state[names[1]].to_local().data_ptr()
    else:
        with FSDP.summon_full_params(model, writeback=False):
            assert unwrapped(model).model.embedding.weight is unwrapped(model).model.head.weight
            listed = [fqn_of(n) for n, _ in model.named_parameters()]
            assert listed == [n for n, _ in reference.named_parameters()]
    assert_at_rest(model)


@on_ranks(2)
@each_value(order=[("embedding", "head"), ("head", "embedding")], first=["model", "embedding", "head"])
def test_units_without_a_common_unit_are_refused(rank: Rank, order: tuple[str, str], first: str) -> None:
    """Whichever of two units that share a parameter runs first, it raises on every rank; a unit above both helps."""
    reference, model = build(Language), build(Language)
    for name in order:
        fully_shard(getattr(model, name), mesh=rank.mesh)
    inputs = torch.ones(2, 6) if first == "head" else tokens(0, 0, 2, 3)
    with pytest.raises(TiedParameterError, match=r"weight \(shape \(13, 6\).*call fully_shard on a module that"):
        (model if first == "model" else getattr(model, first))(inputs)
    fully_shard(model, mesh=rank.mesh)
    ids = tokens(0, 0, 2, 3)
    assert_close(model(ids).detach(), reference(ids).detach(), "output", **CLOSE)


@on_ranks(2)
def test_separate_wrappers_are_refused(rank: Rank) -> None:
    """A weight that two wrapped models share without a wrapper around both is refused, on all ranks."""
    model = build(Language)
    embedding, head = (ORIGINAL.wrap(each, rank, []) for each in (model.embedding, model.head))
    with pytest.raises(TiedParameterError, match="weight"):
        head(embedding(torch.ones(2, 6, dtype=torch.int64)))


@on_ranks(2)
def test_sharding_layer_by_layer_gives_no_false_ties(rank: Rank) -> None:
    """Layers that are built, sharded and collected one by one never count as tied, though ids are used again."""
    kept = nn.ModuleList()
    for index in range(30):
        layer = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
        if index % 10 == 0:
            kept.append(layer)
        del layer
        gc.collect(0)
    model = fully_shard(nn.Sequential(*kept), mesh=rank.mesh)
    model(torch.ones(2, 4)).sum().backward()
    assert [len(unit.parameters) for unit in nested_units(model)] == [0] + [2] * len(kept)
    assert len({id(p) for p in model.parameters()}) == 2 * len(kept)


# -------------------------------------------------------------------- shared modules


class Twice(nn.Module):
    """One module under two names, which a third module has as well, between layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = Block(6)
        self.again = self.block
        self.left = nn.Sequential(self.block, nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.left(self.again(self.first(self.block(x)))))


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, units=[["block"], ["block"], ["left"], ["left"]])
def test_modules_under_several_names(rank: Rank, front_end: FrontEnd, units: list[str]) -> None:
    """A shared module is one unit, or part of one, and runs several times; each parameter is owned once."""
    plain = build(Twice)
    by_hand = front_end.composable or units != ["block"]  # what is wrapped by hand has to be put in all its places
    policy: dict[str, Any] = {} if by_hand else {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    model, reference = sharded_with_reference(front_end, rank, plain, units if by_hand else [], **policy)
    owned = [fqn for unit in nested_units(model) for p in unit.parameters for fqn in p.fqns]
    assert len(nested_units(model)) == 1 + len(units) and len(owned) == len(set(owned))
    assert_trains_alike(model, reference, rank)
    assert list(model.state_dict()) == list(reference.state_dict())


@on_ranks(1)
def test_hidden_parameters_that_were_frozen_refuse_gradients(rank: Rank) -> None:
    """What the flat parameter hides requires a gradient as it does, also where that was switched on later.

    After a forward the module has the unsharded parameters, whose gradients count wherever they come from; not at rest.
    """
    model = build(Twice)  # a wrapper around it would own what is shared
    model.left.requires_grad_(False)
    model.left = FSDP(model.left)
    model(torch.ones(2, 6)).sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with torch.no_grad():
        model(torch.ones(2, 6))
    model.left(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="outside of its FSDP wrapper"):
        model(torch.ones(2, 6)).sum().backward()


ORDERS = [
    ["", "outer", "outer.head"],
    ["", "outer.head", "embedding"],
    ["outer", "", "outer.head"],
    ["outer", "embedding", "outer.head", ""],
    ["outer", "outer.head", ""],
    ["embedding", "outer.head", "outer", ""],
]


def around() -> nn.Module:
    """An embedding that shares the weight of a head inside of another module."""
    embedding, head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    embedding.weight = head.weight
    outer = nn.Sequential(OrderedDict(body=nn.Linear(6, 6), tanh=nn.Tanh(), head=head))
    return nn.Sequential(OrderedDict(embedding=embedding, outer=outer))


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, order=ORDERS)
def test_units_in_any_order(rank: Rank, front_end: FrontEnd, order: list[str]) -> None:
    """Outer modules may become units before those inside of them, tied ones included: training is as unsharded."""
    model, reference = build(around), build(around)
    whole: nn.Module = model
    for name in order:
        made = front_end.wrap(model.get_submodule(name), rank, [])
        if not name:
            whole = made
        elif not front_end.composable:
            parent, _, last = name.rpartition(".")
            setattr(unwrapped(model.get_submodule(parent)), last, made)
    assert_trains_alike(whole, reference, rank)


# -------------------------------------------------------------------- which object it is


@on_ranks(2)
@each_value(front_end=[COMPOSABLE, ORIGINAL], where=["embedding", "head", "both"])
def test_replaced_under_one_name(rank: Rank, where: str, front_end: FrontEnd) -> None:
    """Replacing a tied parameter in one of its modules, or in all, replaces it in all; it stays tied and trains."""
    model, reference = sharded_with_reference(front_end, rank, build(Language))
    ids = tokens(rank.rank, 0, 2, 3)
    model(ids)
    with torch.no_grad():
        reference.head.weight.mul_(-2)
    new = nn.Parameter(reference.head.weight.detach().clone())
    for name in ("embedding", "head") if where == "both" else (where,):
        getattr(unwrapped(model), name).weight = new
    assert_equal(model(ids), reference(ids), "output")
    assert unwrapped(model).embedding.weight is unwrapped(model).head.weight
    assert_same_values(model, reference)
    assert_trains_alike(model, reference, rank, token_loss)


@on_ranks(2)
def test_original_parameters_stay_the_objects_that_they_were(rank: Rank) -> None:
    """Both modules hold the object from before wrapping, and an optimizer from before trains it."""
    plain, reference = build(Language), build(Language)
    before = plain.embedding.weight
    optimizers = adam(plain.parameters()), adam(reference.parameters())
    model = ORIGINAL.wrap(plain, rank, ["head", "embedding"])
    assert_trains_alike(model, reference, rank, token_loss, optimizers=optimizers)
    assert plain.head.weight is plain.embedding.weight is before
    assert sum(p is before for p in model.parameters()) == 1
