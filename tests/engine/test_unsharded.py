"""``with unsharded(module)``: parameters are unsharded once and stay, whatever runs inside."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_close, assert_equal
from failing import fail, fail_in_backward
from front_ends import (
    CLOSE,
    COMPOSABLE,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    gathered,
    sgd,
    sharded_with_reference,
)
from fullshard import fully_shard, unsharded
from fullshard.comm import Collective, record
from fullshard.engine.ownership import nested_units
from models import Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks

ALL = ["", "blocks.0", "blocks.1", "blocks.2"]


def made(rank: Rank, **settings: Any) -> tuple[Any, Any]:
    return sharded_with_reference(COMPOSABLE, rank, build(Stack), **settings)


def check_output(model: nn.Module, reference: nn.Module, step: int = 0) -> list[Collective]:
    """Require the same output; the collectives that it took."""
    x = batch(0, step, 2, 6).to(next(reference.parameters()).dtype)
    with record() as seen:
        output = model(x)
    assert_close(output, reference(x), "output", rtol=1e-4, atol=1e-6)
    return seen


def pointers(model: nn.Module) -> list[int]:
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return [p.data_ptr() for p in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_unshards_once(rank: Rank, context: Any) -> None:
    """Loops inside all-gather nothing, with parameters at addresses that stay; afterwards all is as before."""
    model, reference = made(rank)
    for _ in range(2):
        with context(), record() as entering, unsharded(model) as same:
            assert same is model
            assert [(c.kind, c.unit) for c in entering] == [("all_gather", unit) for unit in ALL]
            before = pointers(model)
            for step in range(3):
                assert check_output(model, reference, step) == []
                assert pointers(model) == before
            assert gathered(model) == ALL
        assert_at_rest(model)
        assert_trains_alike(model, reference, rank, steps=1)
    several = build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    reference = copy.deepcopy(several)
    fully_shard([several[0], several[2]], mesh=rank.mesh)
    fully_shard(several, mesh=rank.mesh)
    with unsharded(several), torch.no_grad():
        for ours, theirs in ((several, reference), (several[2], reference[2]), (several[:2], reference[:2])):
            assert check_output(ours, theirs) == []
    assert_at_rest(several)


@on_ranks(2)
def test_nested_and_of_parts(rank: Rank) -> None:
    """Contexts nest, over the same, over parts and over what has no units; only the outermost of a unit frees it."""
    model, reference = made(rank)
    assert_trains_alike(model, reference, rank, steps=1)
    with torch.no_grad():
        with unsharded(model.blocks[1]):
            assert gathered(model) == ["blocks.1"]
            check_output(model, reference)
            with unsharded(model), unsharded(model):
                with unsharded(model.blocks[0]):
                    assert check_output(model, reference) == [] and gathered(model) == ALL
            assert gathered(model) == ["blocks.1"] and type(model.blocks[1].up.weight) is nn.Parameter
            check_output(model, reference)
        assert_at_rest(model, "")  # as after any forward
        with unsharded(model.blocks):
            assert gathered(model) == ALL
            assert [c.unit for c in check_output(model, reference)] == [""]
            model.blocks[0].reshard()  # by hand: the next forward unshards it, and it stays so
            assert [c.unit for c in check_output(model, reference)] == ["", "blocks.0"]
            assert [c.unit for c in check_output(model, reference)] == [""]
        with unsharded(nn.Linear(2, 2)) as plain:
            plain(torch.ones(2))
            assert_at_rest(model, "")
        with unsharded(model.first):  # in the middle of a unit
            assert gathered(model) == [""] and model.first.weight.shape == (6, 6)
        assert_at_rest(model)
    others = nn.ModuleList([model, made(rank)[0]])
    with unsharded(others):
        assert [gathered(one) for one in others] == [ALL, ALL]
    assert_at_rest(others)
    assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("setting", [None, False])
def test_training_inside(rank: Rank, setting: bool | None) -> None:
    """Training inside is right: gradients are reduced, and a forward after an optimizer step all-gathers anew."""
    model, reference = made(rank, reshard_after_forward=setting)
    sharded = dict(model.named_parameters())
    optimizers = [sgd(m, 0.1) for m in (model, reference)]
    with unsharded(model):
        for step in range(3):
            with record() as seen:
                square_loss(step)(model, rank.rank).backward()
            assert [c.unit for c in seen if c.kind == "all_gather"] == (ALL if step == 1 else [])
            assert len([c for c in seen if c.kind == "reduce_scatter"]) == 4
            reference_backward(reference, rank.world_size, square_loss(step))
            for name, theirs in reference.named_parameters():
                assert_close(sharded[name].grad.full_tensor(), theirs.grad, name, **CLOSE)
            for optimizer, module in zip(optimizers, (model, reference), strict=True):
                optimizer.step()
                module.zero_grad() if setting is False else optimizer.zero_grad()
            if step:
                with torch.no_grad():
                    assert [c.unit for c in check_output(model, reference, step)] == ALL
                    before = pointers(model)
                    assert check_output(model, reference, step) == [] and pointers(model) == before
    assert_at_rest(model)
    square_loss()(model, rank.rank).backward()
    model.set_requires_gradient_sync(False)
    with unsharded(model), record() as seen:
        model.zero_grad()
        square_loss(0)(model, rank.rank).backward()
    assert not any(c.kind == "reduce_scatter" for c in seen)
    model.set_requires_gradient_sync(True)
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("caught", ["outside", "inside"])
def test_exception_inside(rank: Rank, where: str, caught: str) -> None:
    """After an exception in a forward or a backward everything is freed, and training goes on."""
    model, reference = made(rank)
    handle = model.blocks[1].up.register_forward_hook({"forward": fail, "backward": fail_in_backward}[where])
    if caught == "outside":
        with pytest.raises(ZeroDivisionError), unsharded(model):
            square_loss()(model, rank.rank).backward()
        handle.remove()
    else:
        with unsharded(model):
            with pytest.raises(ZeroDivisionError):
                square_loss()(model, rank.rank).backward()
            handle.remove()
            with torch.no_grad():
                check_output(model, reference)
                assert check_output(model, reference) == []
    if where == "backward":
        model.reset_iter_state()
    assert_at_rest(model)
    model.zero_grad()
    assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
def test_parameter_that_cannot_be_unsharded(rank: Rank) -> None:
    """A replaced parameter that does not fit is an error on entry, after which nothing stays unsharded."""
    model, reference = made(rank)
    square_loss()(model, rank.rank).backward()
    model.zero_grad()
    kept = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight"), unsharded(model):
        raise AssertionError("not reached")
    model.blocks[1].up.weight = kept
    assert gathered(model) == [] and all(unit.user_unshards == 0 for unit in nested_units(model))
    assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(2)
def test_states_copies_and_moves_inside(rank: Rank) -> None:
    """Saving gives the live shards, loading and ``to`` take effect, a copy is at rest and on its own."""
    model, reference = made(rank)
    with unsharded(model), torch.no_grad():
        before = pointers(model)
        state = model.state_dict()
        assert pointers(model) == before
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert type(ours) is nn.Parameter
            assert_equal(ours.detach(), theirs.detach(), name)
            assert_equal(state[name].full_tensor(), theirs.detach(), name)
            ours.zero_()  # what is written to full parameters is gone afterwards
        twin = copy.deepcopy(model)
        assert_at_rest(twin)
        model.load_state_dict({name: value.clone() * 2 for name, value in state.items()})
        doubled = copy.deepcopy(reference)
        doubled.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
        check_output(model, doubled)
        assert check_output(model, doubled) == []
        for module in (model, doubled):
            module.double()
        check_output(model, doubled)
        model.float()
        doubled.float()
    assert_at_rest(model)
    assert_same_values(model, doubled)
    assert_trains_alike(twin, reference, rank, steps=1)
    assert_trains_alike(model, doubled, rank, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("by", ["unshard", "unsharded"])
def test_prefetched_unit_that_a_forward_unshards_and_does_not_run(rank: Rank, by: str) -> None:
    """What the user unshards inside of a forward stays, although the prefetch that came before it was in vain."""
    model, reference = made(rank)
    assert_trains_alike(model, reference, rank, steps=1)
    held = contextlib.ExitStack()

    def hold(*_: Any) -> None:
        if by == "unshard":
            model.blocks[1].unshard()
        else:
            held.enter_context(unsharded(model.blocks[1]))

    handle = model.blocks[0].register_forward_hook(hold)
    with torch.no_grad():
        model(batch(0, 0, 2, 6), run=[0])
    handle.remove()
    assert gathered(model) == ["", "blocks.1"]
    assert_equal(model.blocks[1].up.weight.detach(), reference.blocks[1].up.weight.detach(), "weight")
    held.close()
    for module in (model, model.blocks[1]):
        module.reshard()
    assert_trains_alike(model, reference, rank, steps=1)
