"""Corner cases that a review found, each with the model that showed it."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn

from compare import assert_close, assert_models_equal
from failing import fail_in_backward
from fullshard import fully_shard, register_fsdp_forward_method
from fullshard.comm import record
from fullshard.engine.ownership import unit_of
from models import tiny_units
from ranks import Rank, RankPool, on_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(torch.tanh(self.a(x)))


@on_ranks(1, 2)
def test_forward_method_that_calls_the_module_itself(rank: Rank) -> None:
    """A forward inside a forward of the same unit ends the unit's backward only once, after both."""
    model = Scorer()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh)
    register_fsdp_forward_method(model, "score")
    for _ in range(2):
        x = torch.ones(3, 4, requires_grad=True)
        model.score(x).square().sum().backward()
        reference.score(torch.ones(3, 4)).square().sum().backward()
        assert_models_equal(model, reference, grads=True, **CLOSE)


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.block(x).tanh().sum(), x)
        return self.head(force)


@on_ranks(1, 2)
def test_gradient_taken_inside_a_forward(rank: Rank) -> None:
    """autograd.grad through a unit inside the root's forward leaves the root able to go on."""
    model = Forces()
    reference = copy.deepcopy(model)
    fully_shard(model.block, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    for _ in range(2):
        model(torch.ones(3, 4)).square().sum().backward()
        reference(torch.ones(3, 4)).square().sum().backward()
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_another_optimizer_on_one_rank_changes_nothing(rank: Rank) -> None:
    """Steps of an optimizer that holds none of our parameters, on one rank only, do not change what is gathered."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with tiny_units():
        for unit in (model[0], model[1], model):
            fully_shard(unit, mesh=rank.mesh)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(2):
        with record() as seen:
            output = model(torch.ones(3, 4))
            if rank.rank == 0:
                other.param_groups[0]["params"][0].grad = torch.ones(2)
                other.step()
            output.sum().backward()
    assert [c.unit for c in seen if c.kind == "all_gather"] == ["", "0", "1", "0"]


@on_ranks(2)
@pytest.mark.parametrize(("setting", "gathers"), [(True, 10), (None, 5)])
def test_optimizer_in_backward_keeps_what_was_gathered_ahead(rank: Rank, setting: bool | None, gathers: int) -> None:
    """Stepping a unit's optimizer during backward does not gather other units twice, or those that were kept again."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    for layer in (*model, model):
        fully_shard(layer, mesh=rank.mesh, reshard_after_forward=setting)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        with record() as seen:
            model(torch.ones(3, 4)).sum().backward()
    assert sum(c.kind == "all_gather" for c in seen) == gathers


@on_ranks(1, 2)
def test_parameter_hook_may_remove_itself(rank: Rank) -> None:
    """A gradient hook that removes its own handle runs once."""
    model = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
    calls = []

    def hook(parameter: torch.Tensor) -> None:
        calls.append(tuple(parameter.shape))
        handle.remove()

    handle = model.weight.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert calls == [(4, 4)]


class ComplexBranch(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.odd = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.odd if self.rank % 2 else self.even)


@on_ranks(2)
def test_complex_parameter_used_on_one_rank_only(rank: Rank) -> None:
    """Complex parameters take part in a reduction although this rank has no gradient for them."""
    model = fully_shard(ComplexBranch(rank.rank), mesh=rank.mesh)
    model(torch.ones(3, 4)).abs().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad.full_tensor(), torch.full((4,), 1.5 + 0j), "gradient", rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_model_is_freed_after_a_failed_backward(rank: Rank) -> None:
    """A backward that raised leaves no reference cycle that keeps the model."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    handle = model[2].register_forward_hook(fail_in_backward)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            model(torch.ones(3, 4)).sum().backward()
        handle.remove()
        unit = weakref.ref(unit_of(model[0]))
        del model, handle
        until = time.monotonic() + 5  # on accelerators, a thread of autograd's lets go of the exception a moment later
        while unit() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert unit() is None
    finally:
        gc.enable()


def fail_at_different_units(rank: Rank) -> list[float]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    for number, layer in enumerate(model):
        nn.init.constant_(layer.weight, number + 1.0)
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    handle = model[rank.rank].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError()))
    try:
        model(torch.ones(1, 2))
    except ZeroDivisionError:
        handle.remove()
    return model(torch.ones(1, 2)).flatten().tolist()


def test_ranks_out_of_step_never_take_each_others_units(ranks: RankPool) -> None:
    """Ranks that failed in different units end with an error or the right result, never with mixed-up weights."""
    outcomes = ranks(2, fail_at_different_units, fresh=True, expect_failure=True, timeout=50)
    for outcome in outcomes:
        if outcome.kind == "returned":
            assert outcome.value == [24.0 * 16, 24.0 * 16]
        else:
            assert outcome.kind in ("raised", "died")
