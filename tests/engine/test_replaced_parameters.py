"""Parameters that users replace after sharding: taken over before the next forward, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compare import assert_models_equal
from fullshard import fully_shard
from fullshard.engine.runtime import runtime_of
from fullshard.frontend.sharded_module import unit_at
from models import Mlp, assert_at_rest, batch, reference_backward, square_loss, tiny_units, with_reference
from ranks import Rank, on_ranks


def build(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def shard(rank: Rank, model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0], mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch.to(next(model.parameters()).dtype)).square().mean().backward()


def steps_of_both(rank: Rank, model: nn.Module, reference: nn.Module, count: int = 2) -> None:
    """Train both, this rank on its own rows."""
    optimizers = sgd(model), sgd(reference)
    for index in range(count):
        for module, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            batch = inputs(index)
            backward(module, batch.chunk(rank.world_size)[rank.rank] if module is model else batch)
            optimizer.step()


@on_ranks(1, 2)
def test_to_empty_on_a_model_that_has_values(rank: Rank) -> None:
    """to_empty keeps the parameters sharded; what is written to them afterwards is what the forward uses."""
    reference = build()
    model = shard(rank, build(seed=2))
    steps_of_both(rank, model, build(seed=2), count=1)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, plain in zip(model.parameters(), reference.parameters(), strict=True):
            p.copy_(distribute_tensor(plain, rank.mesh, p.placements))
    model.zero_grad()
    steps_of_both(rank, model, reference)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full tensor", "DTensor"])
@pytest.mark.parametrize("when", ["before the first forward", "after steps"])
def test_reassigned_parameter_is_used_and_trained(rank: Rank, when: str, kind: str) -> None:
    """A parameter assigned at any time is what the next forward uses; an optimizer built after it trains it."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    if when == "after steps":
        steps_of_both(rank, model, reference)
    for layer in (0, 2):
        value = torch.randn(reference[layer].weight.shape, generator=torch.Generator().manual_seed(layer))
        new = distribute_tensor(value, rank.mesh, [Shard(0)]) if kind == "DTensor" else value.clone()
        model[layer].weight = nn.Parameter(new)
        reference[layer].weight = nn.Parameter(value.clone())
    model.zero_grad()
    reference.zero_grad()
    model(inputs())  # takes the new ones over
    steps_of_both(rank, model, reference)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("layer", [0, 2])
def test_wrong_shape_names_the_parameter(rank: Rank, layer: int) -> None:
    """A replacement of another shape is refused on every rank, with the FQN and both shapes."""
    model = shard(rank, build())
    model(inputs())
    expected = tuple(model[layer].weight.shape)
    model[layer].weight = nn.Parameter(torch.ones(9, 9))
    words = rf"{layer}\.weight \(shape \({expected[0]}, {expected[1]}\).*replaced by a parameter of shape \(9, 9\)"
    with pytest.raises(ValueError, match=words):
        model(inputs())


@on_ranks(2)
def test_wrong_placement_names_the_parameter(rank: Rank) -> None:
    """A replacement that is a DTensor with other placements is refused with the remedy."""
    model = shard(rank, build())
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(7, 6), rank.mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"0\.weight.*Replicate.*expected.*Shard.*redistribute it first"):
        model(inputs())


@on_ranks(2)
def test_removed_parameter_is_named(rank: Rank) -> None:
    """A managed parameter that was set to None or deleted is named in the error."""
    model = shard(rank, build())
    model[0].bias = None
    with pytest.raises(ValueError, match=r"0\.bias.*was removed from its module"):
        model(inputs())


@on_ranks(2)
@pytest.mark.parametrize("how", ["together", "forward"])
def test_unit_gathered_beside_one_that_cannot_adopt(rank: Rank, how: str) -> None:
    """If the second unit of one launch refuses a replaced parameter, the first is gathered anew after the repair.

    It had been told to gather and nothing was issued: taken for gathered, it would compute with unfilled memory.
    """
    with tiny_units(2**16):
        model, reference = with_reference(Mlp(6, 6, 6, 6), rank)
    x = batch(rank.rank, 0, 4, 6)
    model(x)  # attaches the units, and records their order
    good = model.layers[1].weight
    model.layers[1].weight = nn.Parameter(torch.ones(9, 9))
    words = r"layers\.1\.weight.*replaced by a parameter of shape \(9, 9\)"
    units = [unit_at(layer) for layer in model.layers]
    with pytest.raises(ValueError, match=words):
        model(x) if how == "forward" else runtime_of(units[0]).begin_unshard(units)
    assert not any(unit.is_unsharded for unit in units)
    model.layers[1].weight = good
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, rtol=1e-5, atol=1e-7)
        assert_at_rest(model)
