"""Gradients that are still being reduced when backward returns. See [Note: Overlap with the optimizer]."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import front_ends
from compare import assert_equal
from front_ends import COMPOSABLE
from fullshard import CommQuantization, fully_shard
from fullshard.engine.optimizer_overlap import GradientInFlight
from fullshard.errors import PhaseError
from fullshard.frontend.sharded_module import unit_at
from models import Branch, Stack, square_loss, tiny_units
from ranks import Rank, on_ranks


def build(rank: Rank, *mesh: int) -> tuple[Any, Any]:
    """A model whose last reductions are left under way, and the same one that waits for them."""
    over = rank.make_mesh(*mesh, names=("replicate", "shard")) if mesh else None
    with tiny_units(up_to=0):
        late, plain = (COMPOSABLE.wrap(front_ends.build(Stack), rank, mesh=over) for _ in range(2))
    unit_at(late).settings.overlap_optimizer = True
    return late, plain


def backward(rank: Rank, *models: nn.Module, step: int = 0) -> None:
    for model in models:
        square_loss(step)(model, rank.rank).backward()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor() for p in nn.Module.parameters(model)]


def list_late(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradients have not landed."""
    found = nn.Module.named_parameters(model)  # the sharded module's own settles
    return [name for name, p in found if isinstance(p.grad, GradientInFlight)]


def assert_same_gradients(model: nn.Module, other: nn.Module) -> None:
    assert_equal(gradients(model), gradients(other), "gradients")


@on_ranks(2)
def test_the_last_reduction_is_left_under_way(rank: Rank) -> None:
    """After backward the root's gradients have not landed; any use of one lands them all, and they are right."""
    model, other = build(rank)
    backward(rank, model, other)
    assert set(late_names := list_late(model)) == {"first.weight", "first.bias", "last.weight", "last.bias"}, late_names
    held = model.first.weight.grad
    assert held.shape == model.first.weight.shape and held.dtype is torch.float32
    assert isinstance(held.full_tensor(), torch.Tensor)  # what a DTensor has
    assert not list_late(model)
    assert isinstance(model.first.weight.grad, DTensor)
    assert_equal((held * 1).to_local(), model.first.weight.grad.to_local(), "held")
    assert_same_gradients(model, other)


def _clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.1)


def _foreach(model: nn.Module) -> None:
    torch._foreach_mul_([p.grad for p in nn.Module.parameters(model)], 0.5)


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "use"),
    [
        ({"foreach": True}, _foreach),
        ({"fused": True}, _clip),
    ],
)
def test_any_optimizer(rank: Rank, options: dict[str, bool], use: Any) -> None:
    """Steps of an optimizer that knows nothing of it, with what programs do to gradients first: the same bits."""
    model, other = build(rank)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **options) for m in (model, other)]
    for step in range(2):
        backward(rank, model, other, step=step)
        assert list_late(model)
        for each, optimizer in zip((model, other), optimizers, strict=True):
            use(each)
            optimizer.step()
            optimizer.zero_grad()
    weights = [[p.full_tensor() for p in each.parameters()] for each in (model, other)]
    assert_equal(weights[0], weights[1], "weights")


@on_ranks(2)
def test_gradients_that_are_dropped_stay_dropped(rank: Rank) -> None:
    """What a user does to ``.grad`` while its reduction is under way is not undone when that lands."""

    def drop_by_hand() -> None:
        for parameter in nn.Module.parameters(model):
            parameter.grad = None

    model, other = build(rank)
    optimizer = torch.optim.SGD(nn.Module.parameters(model), lr=0.1)
    drops = [
        optimizer.zero_grad,
        model.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        drop_by_hand,
    ]
    for step, drop in enumerate(drops):
        model.zero_grad()
        other.zero_grad()
        backward(rank, model, step=0)
        drop()
        backward(rank, model, other, step=step + 1)
        assert_same_gradients(model, other)


@on_ranks(2)
def test_gradients_that_only_other_ranks_have(rank: Rank) -> None:
    """Where a parameter gets a gradient on some ranks only, nothing is left under way on those without."""
    models = [fully_shard(front_ends.build(Branch), mesh=rank.mesh) for _ in range(2)]
    unit_at(models[0]).settings.overlap_optimizer = True
    for model in models:
        model.rank = rank.rank
    backward(rank, *models)
    assert_same_gradients(*models)
    assert all(p.grad is not None for name, p in models[0].named_parameters() if not name.startswith("never"))


def _save(model: Any) -> None:
    file = io.BytesIO()
    torch.save(model.first.weight.grad, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(loaded.to_local(), model.first.weight.grad.to_local(), "loaded")


def _copy(model: Any) -> None:
    assert all(p.grad is None for p in copy.deepcopy(model).parameters())  # a copy has no gradients


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 6))


WHAT_COMES_NEXT: dict[str, Callable[[Any], object]] = {
    "copy": _copy,
    "move": lambda model: model.float(),
    "synchronize": lambda model: model.synchronize_gradients(),
    "pending": lambda model: model.get_pending_gradients() == {} or pytest.fail("some pend"),
    "another root": lambda model: fully_shard(nn.Sequential(model))(torch.ones(2, 6)),
    "evaluate": _evaluate,
    "save": _save,
}


@on_ranks(2)
@pytest.mark.parametrize("then", WHAT_COMES_NEXT)
def test_whatever_comes_next(rank: Rank, then: str) -> None:
    """Copies, moves, files and forwards find the gradients landed."""
    model, other = build(rank)
    backward(rank, model, other)
    assert list_late(model)
    WHAT_COMES_NEXT[then](model)
    assert not list_late(model)
    model.reshard()
    assert_same_gradients(model, other)


@on_ranks(2)
def test_after_a_failure(rank: Rank) -> None:
    """A forward that raises leaves gradients in place; a failed backward drops what was under way with it."""
    model, other = build(rank)
    backward(rank, model, other)
    held = model.first.weight.grad
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert_same_gradients(model, other)
    assert_equal(held.full_tensor(), other.first.weight.grad.full_tensor(), "held")
    model.zero_grad()
    other.zero_grad()
    output = model(torch.ones(4, 6))
    output.register_hook(lambda g: g.new_ones(()).expand(3) @ g)  # shapes do not fit
    with pytest.raises(RuntimeError):
        output.sum().backward()
    backward(rank, model, other, step=2)
    assert_same_gradients(model, other)


@pytest.mark.cpu_only("what gloo does")
@on_ranks(2, 4)
def test_sums_that_are_sent_when_waited_for(rank: Rank) -> None:
    """All-reduces of more than two ranks over gloo send twice, so nothing of them is left under way.

    Rounded ones send a second time as well when they are waited for, which has to be in backward on all ranks.
    """
    model, other = build(rank, rank.world_size, 1)
    backward(rank, model, other)
    assert bool(list_late(model)) == (rank.world_size == 2)
    assert_same_gradients(model, other)
    model.zero_grad()
    model.set_comm_quantization(replicate=CommQuantization(reduce="int8", min_bytes=1))
    backward(rank, model)
    assert not list_late(model)


@on_ranks(2)
def test_a_model_is_freed_with_gradients_in_flight(rank: Rank) -> None:
    """Gradients in flight do not keep a model alive, and say so if they outlive it, or the step that was given up."""
    model, _ = build(rank)
    backward(rank, model)
    dropped = model.first.weight.grad
    unit_at(model).runtime.recover()
    assert model.first.weight.grad is None
    with pytest.raises(PhaseError, match="was discarded"):
        dropped.sum()
    backward(rank, model)
    held, schedule = model.first.weight.grad, weakref.ref(unit_at(model).runtime)
    del model
    end = time.monotonic() + 5
    while schedule() is not None and time.monotonic() < end:  # autograd's thread may still be letting go of backward
        gc.collect()
        time.sleep(0.01)
    assert schedule() is None
    with pytest.raises(PhaseError, match="model was deleted"):
        held.sum()
