"""State dicts: DTensors on the live shards, without communication; loading by copy and by assignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from compare import assert_equal, assert_models_equal
from front_ends import CLOSE, assert_same_gradients, build
from fullshard import fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import batch
from ranks import Rank, on_ranks


class Encoder(nn.Module):
    """Takes state dicts of itself inside of its forward, if ``taken`` is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 7), nn.BatchNorm1d(7)
        self.down = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 6))
        self.taken: list[dict[str, Any]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.taken is not None:
            self.taken.append(self.state_dict())
        x = self.norm(self.up(x))
        if self.taken is not None:
            self.taken.append(self.state_dict())
        return self.down(x)


def sharded(rank: Rank, seed: int = 1) -> Any:
    model = build(Encoder, seed=seed)
    fully_shard(model.down, mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def inputs() -> torch.Tensor:
    """The same on every rank, so that batch statistics equal the plain module's."""
    return batch(0, 0, 8, 6)


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def assert_on_live_shards(state: dict[str, Any], model: nn.Module) -> None:
    """Every parameter's entry is a DTensor whose memory is a piece of some unit's shard buffer."""
    live = {id(p.sharded): p.local for u in nested_units(model) for p in u.parameters}
    parameters = dict(model.named_parameters())
    assert len(live) == len(parameters)
    for fqn, parameter in parameters.items():
        assert isinstance(state[fqn], DTensor), fqn
        assert state[fqn].placements == (Shard(0),)
        assert state[fqn].to_local().data_ptr() == live[id(parameter)].data_ptr(), fqn


@on_ranks(2)
def test_needs_no_communication(rank: Rank) -> None:
    """At any moment the state dict consists of sharded DTensors and is made without a collective."""
    model, reference = sharded(rank), build(Encoder, seed=1)

    def check() -> None:
        with record() as collectives:
            state = model.state_dict()
            assert_on_live_shards(state, model)
        assert collectives == []

    check()
    for unit in (model, model.down):
        unit.unshard()
    check()
    with torch.no_grad():
        for module in (model, reference):
            module(inputs())
    check()
    model.taken = []
    output = model(inputs())
    check()
    output.square().mean().backward()
    reference(inputs()).square().mean().backward()
    check()
    parameters = dict(model.named_parameters())
    assert len(model.taken) == 2
    assert all(isinstance(taken[fqn], DTensor) for taken in model.taken for fqn in parameters)
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_model_trains_on(rank: Rank, assign: bool) -> None:
    """After a load, by copy or by assignment, the model has the loaded values and trains like the plain one."""
    for when in ("fresh", "after steps", "unsharded"):
        reference, model = build(Encoder, seed=2), sharded(rank, seed=3)
        optimizers = sgd(model, reference)
        if when == "after steps":
            model(inputs()).sum().backward()
            model.zero_grad()
        elif when == "unsharded":
            model.unshard()
        before = {fqn: (id(p), p.data_ptr()) for fqn, p in model.state_dict().items()}
        assert list(before) == list(reference.state_dict())
        state = {key: value.clone() for key, value in sharded(rank, seed=2).state_dict().items()}
        if when == "fresh":
            for fqn, value in reference.named_parameters():
                state[fqn] = distribute_tensor(value.detach(), rank.mesh, [Shard(0)])
        assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert_models_equal(model, reference)
        if assign:
            optimizers = sgd(model, reference)  # from the parameters as they are after the load
        else:
            assert [pointer for _, pointer in before.values()] == [p.data_ptr() for p in model.state_dict().values()]
        loaded = list(model.parameters())
        for _ in range(2):
            for module, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                module(inputs()).square().mean().backward()
                optimizer.step()
        assert all(new is old for new, old in zip(model.parameters(), loaded, strict=True))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_on_live_shards(model.state_dict(), model)


@on_ranks(2)
def test_model_around_units_that_is_no_unit_itself(rank: Rank) -> None:
    """A plain module around units gives and loads sharded state dicts too, also while a unit is unsharded."""
    model, other = build(Encoder, seed=1), build(Encoder, seed=2)
    for module in (model, other):
        fully_shard(module.up, mesh=rank.mesh)
    model.up.unshard()
    state = model.state_dict()
    assert isinstance(state["up.weight"], DTensor) and type(state["down.0.weight"]) is torch.Tensor
    other.load_state_dict(state)
    assert_equal(other.up.weight.full_tensor().detach(), model.up.weight.full_tensor().detach(), "up.weight")


@on_ranks(2)
@pytest.mark.parametrize("loads", [False, True])
def test_parameters_that_were_put_in_the_place_of_unsharded_ones(rank: Rank, loads: bool) -> None:
    """State dicts have them sharded, as the next forward sees them, and they can be loaded into."""
    model, other = sharded(rank), sharded(rank, seed=2)
    for each in (model, other):
        with torch.no_grad():
            each(inputs())
        assert not isinstance(each.up.weight, DTensor)
        each.up.weight = nn.Parameter(torch.full((7, 6), 0.25))
    if loads:
        expected = {name: value.clone() for name, value in sharded(rank, seed=3).state_dict().items()}
        model.load_state_dict(expected)
    state = model.state_dict()
    assert isinstance(state["up.weight"], DTensor) and isinstance(model.up.weight, DTensor)
    if not loads:
        assert_equal(state["up.weight"].full_tensor(), torch.full((7, 6), 0.25), "up.weight")
    other.load_state_dict(state)
    assert_equal(other.eval()(inputs()), model.eval()(inputs()), "output")
