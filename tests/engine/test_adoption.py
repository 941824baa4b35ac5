"""Parameters that users replace or convert after sharding: taken over before the next forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compare import assert_close, assert_models_equal
from fullshard import fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
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


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("when", ["before the first forward", "after steps", "after forward", "unsharded"])
def test_dtype_move_of_the_sharded_model(rank: Rank, dtype: torch.dtype, when: str) -> None:
    """After model.to(dtype) gathers and reductions run in that dtype, and training equals the plain model's."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    if when == "after steps":
        steps_of_both(rank, model, reference)
        model.zero_grad()
        reference.zero_grad()
    elif when == "after forward":
        model(inputs())
    elif when == "unsharded":
        model[0].unshard()
    for module in (model, reference):
        assert module.to(dtype) is module
    assert all(p.dtype == dtype and isinstance(p, DTensor) for p in model.parameters())
    with record() as collectives:
        steps_of_both(rank, model, reference)
    assert {c.dtype for c in collectives} <= {dtype}
    assert all(p.grad.dtype == dtype for p in model.parameters())
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    assert_models_equal(model, reference, grads=True, **tolerance)


@on_ranks(1, 2, 4)
def test_dtype_move_takes_gradients_along(rank: Rank) -> None:
    """Gradients that are there move with the parameters, further ones are added, and an old optimizer steps."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    optimizers = sgd(model), sgd(reference)
    own = inputs().chunk(rank.world_size)[rank.rank]
    backward(model, own)
    backward(reference, inputs())
    model.to(torch.float64)
    reference.to(torch.float64)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    backward(model, own)
    backward(reference, inputs())
    for optimizer in optimizers:
        optimizer.step()
    assert_models_equal(model, reference, grads=True, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dtype_move_there_and_back(rank: Rank) -> None:
    """Moving to float64 and back changes nothing, and the parameters stay the same objects."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
    objects = [id(p) for p in model.parameters()]
    model.double().float()
    assert [id(p) for p in model.parameters()] == objects
    assert_models_equal(model, reference)
    steps_of_both(rank, model, reference)
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_dtype_move_of_a_submodule(rank: Rank) -> None:
    """Converting part of a unit gives it a second bucket and leaves the rest as it was."""
    model = fully_shard(build(), mesh=rank.mesh)
    model[2].to(torch.float64)
    reference = build()
    reference[2].to(torch.float64)
    reference.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    for module in (model, reference):
        module[1].register_forward_hook(lambda module, args, output: output.double())
    optimizers = sgd(model), sgd(reference)
    for index in range(2):
        for module, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            module(inputs(index)).square().mean().backward()
            optimizer.step()
    assert {b.shard_buffer.dtype for b in unit_of(model).buckets} == {torch.float32, torch.float64}
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


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


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["full tensor", "DTensor"])
def test_reassigned_parameter_is_used_and_trained(rank: Rank, kind: str) -> None:
    """A parameter assigned between steps is what the next forward uses; an optimizer built after it trains it."""
    reference = build()
    model = shard(rank, copy.deepcopy(reference))
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
@pytest.mark.parametrize("gradients", [False, True], ids=["no-grad forward", "forward without backward"])
def test_in_place_edit_is_seen_by_the_next_forward(rank: Rank, gradients: bool) -> None:
    """Writing to the sharded parameters under no_grad, whatever ran before, is seen by the next forward."""
    model = shard(rank, build())
    with torch.set_grad_enabled(gradients):
        model(inputs())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not model(inputs()).any()


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


@on_ranks(2, 4)
def test_tied_parameter_replaced_under_one_name(rank: Rank) -> None:
    """Replacing a tied parameter in one of its modules replaces it in all."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=rank.mesh)
    model(inputs())
    model[1].weight = nn.Parameter(torch.eye(6))
    assert_close(model(inputs()).detach(), inputs(), "output", rtol=1e-6)
    assert model[0].weight is model[1].weight


@on_ranks(2)
def test_cpu_move_is_harmless(rank: Rank) -> None:
    """A move to where the shards are keeps parameters and memory; one elsewhere keeps values, gradients and device."""
    model = shard(rank, build())
    backward(model, inputs())
    before = [(id(p), p.to_local().data_ptr(), id(p.grad)) for p in model.parameters()]
    model.to(rank.device).float()
    assert [(id(p), p.to_local().data_ptr()) for p in model.parameters()] == [entry[:2] for entry in before]
    values = [(p.to_local().clone(), p.grad.to_local().clone()) for p in model.parameters()]
    model.cpu()
    for p, (value, gradient) in zip(model.parameters(), values, strict=True):
        assert p.device == p.grad.device == rank.device
        assert_close(p.to_local(), value, "value", rtol=0)
        assert_close(p.grad.to_local(), gradient, "gradient", rtol=0)
    assert [len(unit.buckets) for unit in nested_units(model)] == [1, 1]
