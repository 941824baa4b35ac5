"""``with unsharded(module)``: parameters are gathered once and stay, whatever runs inside."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_equal, assert_models_equal
from failing import fail, fail_in_backward
from fullshard import fully_shard, unsharded
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import (
    Stack,
    assert_at_rest,
    batch,
    gathered,
    reference_backward,
    square_loss,
    with_reference,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
DIM = 6
ALL = ["", "blocks.0", "blocks.1", "blocks.2"]


def train(rank: Rank, model: Any, reference: Any, steps: int = 2, first: int = 0) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(first, first + steps):
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_output(model: nn.Module, reference: nn.Module, step: int = 0) -> None:
    x = batch(0, step, 2, DIM)
    assert torch.allclose(model(x), reference(x), atol=1e-6)


def pointers(model: nn.Module) -> list[int]:
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return [p.data_ptr() for p in model.parameters()]


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "trained"])
def test_gathers_once(rank: Rank, ran: bool, context: Any) -> None:
    """Loops inside gather nothing, with parameters at addresses that stay; afterwards all is as before."""
    model, reference = with_reference(Stack(), rank)
    if ran:
        train(rank, model, reference)
    with context():
        with record() as entering, unsharded(model) as same:
            assert same is model
            assert {c.kind for c in entering} <= {"all_gather"}
            assert [c.unit for c in entering] == (ALL if rank.world_size > 1 else [])
            before = pointers(model)
            with record() as seen:
                for step in range(3):
                    check_output(model, reference, step)
                    assert pointers(model) == before
            assert seen == []
            assert gathered(model) == (ALL if rank.world_size > 1 else [])
    assert_at_rest(model) if rank.world_size > 1 else None
    train(rank, model, reference)


@on_ranks(2)
def test_values_are_the_full_parameters(rank: Rank) -> None:
    """Inside, parameters are plain and full; what is written to them is gone afterwards."""
    model, reference = with_reference(Stack(), rank)
    with unsharded(model):
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert type(ours) is nn.Parameter
            assert_equal(ours.detach(), theirs.detach(), name)
        with torch.no_grad():
            model.first.weight.zero_()
            reference.first.weight.data, kept = torch.zeros(DIM, DIM), reference.first.weight.data
            check_output(model, reference)
            reference.first.weight.data = kept
    check_output(model, reference)
    assert_models_equal(model, reference)


@on_ranks(2)
def test_nested(rank: Rank) -> None:
    """Contexts may be nested, over the same and over parts; only the outermost of a unit frees it."""
    model, reference = with_reference(Stack(), rank)
    train(rank, model, reference, steps=1)
    with torch.no_grad():
        with unsharded(model.blocks[1]):
            assert gathered(model) == ["blocks.1"]
            check_output(model, reference)
            with unsharded(model), unsharded(model):
                with unsharded(model.blocks[0]), record() as seen:
                    check_output(model, reference)
                assert seen == [] and gathered(model) == ALL
            assert gathered(model) == ["blocks.1"]
            assert type(model.blocks[1].up.weight) is nn.Parameter
            check_output(model, reference)
    assert_at_rest(model)
    train(rank, model, reference)


@on_ranks(2)
def test_parts(rank: Rank) -> None:
    """A part, or a plain module with sharded ones in it, or one without any, can be unsharded as well."""
    model, reference = with_reference(Stack(), rank)
    train(rank, model, reference, steps=1)
    with torch.no_grad():
        with unsharded(model.blocks):
            assert gathered(model) == ALL[1:]
            with record() as seen:
                check_output(model, reference)
            assert [c.unit for c in seen] == [""]
        with unsharded(nn.Linear(2, 2)) as plain:
            plain(torch.ones(2))
        with unsharded(model.first):
            assert gathered(model) == []
    others = nn.ModuleList([model, with_reference(Stack(depth=1), rank)[0]])
    with unsharded(others):
        assert sum(bool(gathered(one)) for one in others) == 2
    assert_at_rest(others)
    train(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("zeroed", ["optimizer", "model"])
@pytest.mark.parametrize("setting", [True, None, False], ids=["reshard", "default", "keep"])
def test_training_inside(rank: Rank, setting: bool | None, zeroed: str) -> None:
    """Training inside is right: gradients are reduced, and a forward after an optimizer step gathers anew."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    sharded = dict(model.named_parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with unsharded(model):
        for step in range(3):
            with record() as seen:
                square_loss(step)(model, rank.rank).backward()
            assert [c.unit for c in seen if c.kind == "all_gather"] == (ALL if step == 1 else [])
            assert len([c for c in seen if c.kind == "reduce_scatter"]) == 4
            reference_backward(reference, rank.world_size, square_loss(step))
            for name, theirs in reference.named_parameters():
                gradient = sharded[name].grad.full_tensor()
                assert torch.allclose(gradient, theirs.grad, **CLOSE), name
            for optimizer in optimizers:
                optimizer.step()
            if zeroed == "model":
                model.zero_grad()
                reference.zero_grad()
            else:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if step == 0:
                continue
            with torch.no_grad():
                with record() as seen:
                    check_output(model, reference, step)
                assert [c.unit for c in seen] == ALL
                before = pointers(model)
                check_output(model, reference, step)
                assert pointers(model) == before
    assert_at_rest(model)
    assert_models_equal(model, reference, grads=True, **CLOSE)
    train(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, None], ids=["reshard", "default"])
def test_after_a_forward_without_backward(rank: Rank, setting: bool | None) -> None:
    """What an evaluation with gradients left gathered is not taken over: values written since are seen."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    square_loss(7)(model, rank.rank)
    with torch.no_grad():
        for one in (model, reference):
            one.first.weight.mul_(2)
        with unsharded(model):
            assert_equal(model.first.weight.detach(), reference.first.weight.detach(), "first.weight")
            before = pointers(model)
            with record() as seen:
                check_output(model, reference)
            assert seen == [] and pointers(model) == before


@on_ranks(2)
def test_between_forward_and_backward(rank: Rank) -> None:
    """Entering and leaving between a forward and its backward, or with a backward inside only, is fine."""
    model, reference = with_reference(Stack(), rank)
    loss = square_loss(0)(model, rank.rank)
    with unsharded(model), torch.no_grad():
        check_output(model, reference)
    loss.backward()
    loss = square_loss(1)(model, rank.rank)
    with unsharded(model):
        loss.backward()
        loss = square_loss(2)(model, rank.rank)
    loss.backward()
    for step in range(3):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_accumulation_inside(rank: Rank) -> None:
    """Microbatches without sync inside, the last one outside."""
    model, reference = with_reference(Stack(), rank)
    model.set_requires_gradient_sync(False)
    with unsharded(model), record() as seen:
        for step in range(2):
            square_loss(step)(model, rank.rank).backward()
            assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert seen == []
    model.set_requires_gradient_sync(True)
    square_loss(2)(model, rank.rank).backward()
    for step in range(3):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_inside(rank: Rank, set_to_none: bool) -> None:
    """``zero_grad`` of the model inside clears the reduced gradients as well, so that nothing adds up unseen."""
    model, reference = with_reference(Stack(), rank)
    square_loss(0)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(0))
    with unsharded(model):
        for step in range(1, 3):
            model.zero_grad(set_to_none)
            reference.zero_grad(set_to_none)
            square_loss(step)(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    with unsharded(model):
        model.zero_grad(set_to_none)
    reference.zero_grad(set_to_none)
    assert_models_equal(model, reference, grads=True)


@on_ranks(2)
@pytest.mark.parametrize("caught", ["inside", "outside"])
@pytest.mark.parametrize("where", ["body", "forward", "backward"])
def test_exception_inside(rank: Rank, where: str, caught: str) -> None:
    """After an exception in the body, in a forward or in a backward everything is freed, and training goes on."""
    model, reference = with_reference(Stack(), rank)
    hooks = {"forward": fail, "backward": fail_in_backward}
    for _ in range(2):
        handle = model.blocks[1].up.register_forward_hook(hooks[where]) if where in hooks else None

        def body(handle: Any = handle) -> None:
            if handle is None:
                raise ZeroDivisionError
            square_loss()(model, rank.rank).backward()

        if caught == "outside":
            with pytest.raises(ZeroDivisionError), unsharded(model):
                body()
        else:
            with unsharded(model):
                with pytest.raises(ZeroDivisionError):
                    body()
                if handle is not None:
                    handle.remove()
                with torch.no_grad():
                    check_output(model, reference)
                    with record() as seen:
                        check_output(model, reference)
                    assert seen == []
        if handle is not None:
            handle.remove()
        if where == "backward":
            model.reset_iter_state()
        assert_at_rest(model)
        model.zero_grad()
        train(rank, model, reference)


@on_ranks(2)
def test_state_dict_inside(rank: Rank) -> None:
    """Saving inside gives the live shards and leaves the full parameters; the next forward sees what is loaded."""
    model, reference = with_reference(Stack(), rank)
    with unsharded(model), torch.no_grad():
        before = pointers(model)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert pointers(model) == before
        for name, value in reference.state_dict().items():
            assert_equal(state[name].full_tensor(), value, name)
        doubled = {name: value.clone() * 2 for name, value in state.items()}
        model.load_state_dict(doubled)
        reference.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
        check_output(model, reference)
        with record() as seen:
            check_output(model, reference)
        assert seen == []
    assert_at_rest(model)
    assert_models_equal(model, reference)
    train(rank, model, reference)


@on_ranks(2)
def test_copy_inside(rank: Rank) -> None:
    """A deepcopy made inside is at rest and on its own; the original computes on."""
    model, reference = with_reference(Stack(), rank)
    with unsharded(model), torch.no_grad():
        twin = copy.deepcopy(model)
        assert_at_rest(twin)
        check_output(model, reference)
        check_output(twin, reference)
    assert_at_rest(model)
    train(rank, twin, copy.deepcopy(reference))
    train(rank, model, reference)


@on_ranks(2)
def test_dtype_changed_inside(rank: Rank) -> None:
    """``to(dtype)`` inside takes effect and does not break what holds the module."""
    model, reference = with_reference(Stack(), rank)
    with unsharded(model), torch.no_grad():
        model.double()
        reference.double()
        x = batch(0, 0, 2, DIM).double()
        assert torch.allclose(model(x), reference(x))
    assert_at_rest(model)
    assert_models_equal(model, reference)


@on_ranks(2)
def test_reshard_inside(rank: Rank) -> None:
    """A unit that is freed by hand inside is gathered by the next forward and held again."""
    model, reference = with_reference(Stack(), rank)
    with unsharded(model), torch.no_grad():
        model.blocks[0].reshard()
        assert gathered(model) == ["", "blocks.1", "blocks.2"]
        with record() as seen:
            check_output(model, reference)
            check_output(model, reference)
        assert [c.unit for c in seen] == ["blocks.0"]
        assert gathered(model) == ALL
    assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, False], ids=["reshard", "keep"])
def test_group_inside(rank: Rank, setting: bool) -> None:
    """A unit of several modules is held once, also if only a part of it runs."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    reference = copy.deepcopy(model)
    fully_shard([model[0], model[2]], mesh=rank.mesh, reshard_after_forward=setting)
    fully_shard(model, mesh=rank.mesh)
    with unsharded(model), torch.no_grad(), record() as seen:
        check_output(model, reference)
        check_output(model[2], reference[2])
        check_output(model[:2], reference[:2])
    assert seen == []
    assert_at_rest(model)
    train(rank, model, reference)


@on_ranks(4)
def test_on_two_axes(rank: Rank) -> None:
    """On a (replicate, shard) mesh it gathers over the shard axis alone, and trains right afterwards."""
    model = Stack()
    reference = copy.deepcopy(model)
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=1)
    fully_shard(model, mesh=mesh)
    with torch.no_grad(), record() as seen, unsharded(model):
        check_output(model, reference)
    assert [c.kind for c in seen] == ["all_gather"] * 4
    assert_at_rest(model)
    train(rank, model, reference)


@on_ranks(2)
def test_leaves_nothing_behind(rank: Rank) -> None:
    """If gathering fails half-way nothing stays held."""
    model, reference = with_reference(Stack(), rank)
    model(batch(0, 0, 2, DIM)).sum().backward()
    model.zero_grad()
    kept = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(torch.ones(2, 2))  # the wrong shape: its adoption raises
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight"), unsharded(model):
        raise AssertionError("not reached")
    model.blocks[1].up.weight = kept
    assert gathered(model) == []
    assert all(unit.user_unshards == 0 for unit in nested_units(model))
    train(rank, model, reference)


@on_ranks(2)
@pytest.mark.parametrize("by", ["unshard", "unsharded"])
def test_prefetched_unit_that_a_forward_unshards_and_does_not_run(rank: Rank, by: str) -> None:
    """What the user unshards inside of a forward stays, although the prefetch that came before it was in vain."""
    model, reference = with_reference(Stack(), rank)
    train(rank, model, reference, steps=1)
    held = contextlib.ExitStack()

    def hold(*_: Any) -> None:
        if by == "unshard":
            model.blocks[1].unshard()
        else:
            held.enter_context(unsharded(model.blocks[1]))

    handle = model.blocks[0].register_forward_hook(hold)
    with torch.no_grad():
        model(batch(0, 0, 2, DIM), run=[0])
    handle.remove()
    assert gathered(model) == ["blocks.1"]
    assert_equal(model.blocks[1].up.weight.detach(), reference.blocks[1].up.weight.detach(), "held weight")
    held.close()
    model.blocks[1].reshard()
    train(rank, model, reference, first=1)
