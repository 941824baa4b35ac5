"""What optimizers were given: sharded parameters, or objects that get no gradients, which are replaced or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fullshard.ragged  # noqa: F401 # adds the layout
from compare import assert_equal
from front_ends import assert_same_values
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.errors import FullshardError
from fullshard.optim import localize
from pairwise import each_value
from ranks import Rank, on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


def a_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 6), nn.Linear(6, 2))
    model[2].weight = nn.Parameter(model[1].weight.detach().t().clone())
    return model


def shard(model: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=rank.mesh, **options)
    return fully_shard(model, mesh=rank.mesh, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().sum().backward()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def dtensors(parameters: Any) -> torch.optim.Optimizer:
    return localize(torch.optim.SGD(parameters, lr=0.1), enable=False)


@on_ranks(1, 2)
@each_value(make=[adamw, dtensors], when=["before", "unsharded", "ragged"])
def test_the_first_step_takes_the_sharded_ones(rank: Rank, make: Make, when: str) -> None:
    """Also beside parameters of others, in several groups; it says so once, and trains as if it had been given them."""
    other = nn.Parameter(torch.ones(2))

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [*model[0].parameters(), other]}, {"params": [*model[1:].parameters()], "lr": 0.05}]

    options = {"layout": "ragged"} if when == "ragged" else {}
    expected = shard(a_model(), rank, **options)
    reference = make(groups(expected))
    model = a_model()
    if when == "unsharded":
        shard(model, rank)
        for layer in (model, model[0], model[3]):
            layer.unshard()
        optimizer = make(groups(model))
        for layer in (model, model[0], model[3]):
            layer.reshard()
    else:
        optimizer = make(groups(model))
        shard(model, rank, **options)
    for number in range(3):
        for each, stepped in ((expected, reference), (model, optimizer)):
            backward(each)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                stepped.step()
            found = [str(one.message) for one in caught if "steps the sharded" in str(one.message)]
            assert len(found) == (each is model and number == 0)
            assert not found or ("0.weight" in found[0] or "weight (" in found[0])
            stepped.zero_grad()
    assert_same_values(model, expected)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in own} == {id(p) for p in (*model.parameters(), other)}


def with_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = with_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def without_anything(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters())


def with_gradients(model: nn.Module) -> torch.optim.Optimizer:
    backward(model)
    return without_anything(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("given", "wrapped", "reason"),
    [
        (with_state, False, "it has state for 0.weight"),
        (with_gradients, False, "0.weight has a gradient of its own"),
        (without_anything, True, "is a part of a flat parameter .use_orig_params=False"),
    ],
    ids=["state", "gradients", "flat"],
)
def test_what_is_not_certain_is_refused(rank: Rank, given: Make, wrapped: bool, reason: str) -> None:
    """An error says which parameter, why, and what to build the optimizer from, at every step."""
    model = a_model()
    optimizer = given(model)
    model = FSDP(model, use_orig_params=False, device_mesh=rank.mesh) if wrapped else shard(model, rank)
    for _ in range(2):
        backward(model)
        with pytest.raises(FullshardError, match=rf"AdamW was given .*{reason}.*Build the optimizer from"):
            optimizer.step()


@on_ranks(2)
def test_the_wrapper_keeps_original_parameters(rank: Rank) -> None:
    """With use_orig_params=True an optimizer of them steps without a warning."""
    model = a_model()
    optimizer = adamw(model.parameters())
    backward(FSDP(model, use_orig_params=True, device_mesh=rank.mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@on_ranks(2)
def test_both_kinds(rank: Rank) -> None:
    """An old object is left alone where the optimizer was given the sharded parameter, too, which it steps once."""
    model = a_model()
    optimizer = adamw(model.parameters())
    shard(model, rank)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    backward(model)
    with pytest.warns(UserWarning, match="given parameters that get no gradients"):
        optimizer.step()
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    assert {id(p) for p in stepped} == {id(p) for p in model.parameters()} and len(stepped) == len(set(stepped))


@on_ranks(2)
def test_sharded_after_steps_of_others(rank: Rank) -> None:
    """An optimizer that has stepped before is looked at again once something was sharded, and left alone else."""
    model, other = a_model(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.25)
    other.grad = torch.ones(2)
    optimizer.step()
    shard(model, rank)
    optimizer.step()
    assert_equal([other], [torch.full((2,), 0.5)], "plain")
    late = a_model()
    optimizer.add_param_group({"params": list(late.parameters())})
    optimizer.step()
    shard(late, rank)
    backward(late)
    before = [p.full_tensor() for p in late.parameters()]
    with pytest.warns(UserWarning, match="The optimizer steps the sharded parameters instead"):
        optimizer.step()
    assert not any(torch.equal(p.full_tensor(), old) for p, old in zip(late.parameters(), before, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_a_step_before_the_forward_that_shards_them(rank: Rank, layout: Any) -> None:
    """A parameter put in the place of an unsharded one is stepped, also if the first step found no gradients."""
    models = [a_model(), shard(a_model(), rank, layout=layout)]
    optimizers = []
    for model in models:
        with torch.no_grad():
            model(torch.ones(2, 4))
        model[1].weight = nn.Parameter(torch.full((4, 6), 0.1))
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizers[-1].step()
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    for plain, sharded in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), plain)
