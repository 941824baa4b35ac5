"""State dicts: DTensors on the live shards, without communication; loading by copy and by assignment."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import fully_shard, register_fsdp_forward_method
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from ranks import Rank, on_ranks


def build(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3)))


def shard(rank: Rank, model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0], mesh=rank.mesh)
    fully_shard(model[2], mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def sharded(rank: Rank, seed: int = 1) -> nn.Sequential:
    return shard(rank, build(seed))


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int = 0) -> None:
    """One step on the same batch on every rank, so that batch statistics equal the plain module's."""
    optimizer.zero_grad()
    model(inputs(index)).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_on_live_shards(state: dict[str, Any], model: nn.Module) -> None:
    """Every parameter's entry is a DTensor whose memory is a piece of some unit's shard buffer."""
    live = {p.fqn if u is None else id(p.sharded): p.local for u in nested_units(model) for p in u.parameters}
    parameters = dict(model.named_parameters())
    assert len(live) == len(parameters)
    for fqn, parameter in parameters.items():
        assert isinstance(state[fqn], DTensor), fqn
        assert state[fqn].placements == (Shard(0),)
        assert state[fqn].to_local().data_ptr() == live[id(parameter)].data_ptr(), fqn


@on_ranks(1, 4)
def test_keys_and_values_equal_those_of_the_plain_module(rank: Rank) -> None:
    """Keys, their order and the gathered values are the plain module's; buffers are plain tensors."""
    reference = build()
    state = shard(rank, copy.deepcopy(reference)).state_dict()
    assert list(state) == list(reference.state_dict())
    for fqn, value in reference.state_dict().items():
        full = state[fqn].full_tensor() if isinstance(state[fqn], DTensor) else state[fqn]
        assert_equal(full, value, fqn)
        assert isinstance(state[fqn], DTensor) == (fqn in dict(reference.named_parameters()))


@on_ranks(1, 4)
def test_values_share_memory_with_the_live_shards(rank: Rank) -> None:
    """A state dict is a view: training changes what a state dict taken before shows."""
    model = sharded(rank)
    state = model.state_dict()
    assert_on_live_shards(state, model)
    before = {fqn: value.full_tensor().clone() for fqn, value in state.items() if isinstance(value, DTensor)}
    step(model, sgd(model))
    assert_on_live_shards(model.state_dict(), model)
    for fqn, value in before.items():
        assert_equal(state[fqn].full_tensor(), model.get_parameter(fqn).full_tensor().detach(), fqn)
        assert (state[fqn].full_tensor() != value).any() or fqn == "0.bias", fqn


@on_ranks(2)
@pytest.mark.parametrize("when", ["at rest", "unsharded", "after forward", "after no-grad forward", "after backward"])
def test_needs_no_communication(rank: Rank, when: str) -> None:
    """At any moment the state dict consists of sharded DTensors and is made without a collective."""
    model = sharded(rank)
    if when == "unsharded":
        for unit in (model, model[0], model[2]):
            unit.unshard()
    elif when == "after no-grad forward":
        with torch.no_grad():
            model(inputs())
    elif when != "at rest":
        output = model(inputs())
        if when == "after backward":
            output.sum().backward()
    with record() as collectives:
        state = model.state_dict()
        assert_on_live_shards(state, model)
    assert collectives == []
    if when == "after forward":
        output.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


class Snapshotting(nn.Module):
    """Takes a state dict of itself inside its forward, before and after it computes with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.taken: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.taken.append(self.state_dict())
        hidden = self.linear(x)
        self.taken.append(self.state_dict())
        return hidden.tanh()


@on_ranks(2)
def test_can_be_taken_inside_forward(rank: Rank) -> None:
    """Inside a forward it is sharded as well; what the forward computes then, and its backward, are right."""
    reference = Snapshotting()
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)
    model(inputs()).sum().backward()
    reference(inputs()).sum().backward()
    assert all(isinstance(value, DTensor) for taken in model.taken for value in taken.values())
    assert_models_equal(model, reference, grads=True, rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["fresh", "after steps", "unsharded"])
def test_loaded_model_trains_on(rank: Rank, assign: bool, when: str) -> None:
    """After a load, by copy or by assignment, the model has the loaded values and trains like the plain one."""
    reference = build(seed=2)
    source = shard(rank, copy.deepcopy(reference))
    model = sharded(rank, seed=3)
    if when == "after steps":
        step(model, sgd(model))
        model.zero_grad()
    elif when == "unsharded":
        model[0].unshard()
    state = {key: value.clone() for key, value in source.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert_models_equal(model, reference)
    loaded = list(model.parameters())
    optimizers = sgd(model), sgd(reference)  # from the parameters as they are after the load
    for index in range(2):
        step(model, optimizers[0], index)
        step(reference, optimizers[1], index)
    assert all(new is old for new, old in zip(model.parameters(), loaded, strict=True))
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)
    assert_on_live_shards(model.state_dict(), model)


@on_ranks(2)
def test_load_by_copy_keeps_memory_and_optimizer(rank: Rank) -> None:
    """Loading by copy changes values only: an optimizer built before it still trains the model."""
    reference = build(seed=2)
    model = sharded(rank, seed=3)
    optimizers = sgd(model), sgd(reference)
    before = {fqn: (id(p), p.to_local().data_ptr()) for fqn, p in model.named_parameters()}
    model.load_state_dict(shard(rank, copy.deepcopy(reference)).state_dict())
    assert before == {fqn: (id(p), p.to_local().data_ptr()) for fqn, p in model.named_parameters()}
    step(model, optimizers[0])
    step(reference, optimizers[1])
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_full_tensors_of_the_plain_module_can_be_distributed_and_loaded(rank: Rank, assign: bool) -> None:
    """A plain module's state dict, each parameter distributed like ours, loads strictly."""
    reference = build(seed=2)
    model = sharded(rank, seed=3)
    state = {
        fqn: distribute_tensor(value, rank.mesh, [Shard(0)]) if fqn in dict(model.named_parameters()) else value.clone()
        for fqn, value in reference.state_dict().items()
    }
    assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert_models_equal(model, reference)
    assert_close(model(inputs()).detach(), reference(inputs()).detach(), "output", rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_strict_loading_names_missing_and_unexpected_keys(rank: Rank) -> None:
    """Keys that do not fit are reported by their FQNs on every rank; strict=False returns them."""
    model = sharded(rank)
    state = dict(model.state_dict())
    state["2.other.weight"] = state.pop("2.0.weight")
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*\"2\.0\.weight\".*Unexpected key.*\"2\.other\.weight\""):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["2.0.weight"] and result.unexpected_keys == ["2.other.weight"]


@on_ranks(2)
def test_wrong_shape_is_named(rank: Rank) -> None:
    """A value of another shape is reported by its FQN on every rank."""
    model = sharded(rank)
    state = dict(model.state_dict())
    state["0.weight"] = distribute_tensor(torch.ones(9, 6), rank.mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(state)


@on_ranks(2)
def test_prefix_and_hooks_of_the_user_are_respected(rank: Rank) -> None:
    """state_dict's own arguments and hooks work as in the plain module."""
    model = sharded(rank)
    model.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(extra=prefix))
    state = model.state_dict(prefix="model.")
    assert state["extra"] == "model." and "model.2.1.bias" in state


@on_ranks(2)
def test_model_around_units_that_is_no_unit_itself(rank: Rank) -> None:
    """A plain module around units gives and loads sharded state dicts too, also while a unit is unsharded."""
    model, other = build(1), build(2)
    for module in (model, other):
        fully_shard(module[0], mesh=rank.mesh)
        fully_shard(module[2], mesh=rank.mesh)
    model[0].unshard()
    state = model.state_dict()
    assert isinstance(state["0.weight"], DTensor) and isinstance(state["2.0.weight"], DTensor)
    other.load_state_dict(state)
    assert_equal(other[0].weight.full_tensor().detach(), model[0].weight.full_tensor().detach(), "0.weight")


# ---------------------------------------------------------------- other methods as forwards


class Encoder(nn.Module):
    """Has a second way to be run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """The inner representation."""
        return self.up(x) * scale


@on_ranks(1, 4)
def test_registered_method_gathers_and_reduces_like_forward(rank: Rank) -> None:
    """A registered method gives the plain module's outputs and gradients, and leaves nothing gathered."""
    torch.manual_seed(1)
    reference = Encoder()
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh)
    register_fsdp_forward_method(model, "encode")
    own = inputs().chunk(rank.world_size)[rank.rank]
    for _ in range(2):
        model.encode(own, scale=2.0).square().mean().backward()
        reference.encode(inputs(), scale=2.0).square().mean().backward()
    model(own).square().mean().backward()
    reference(inputs()).square().mean().backward()
    assert_models_equal(model, reference, grads=True, rtol=2e-5, atol=1e-6)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model.encode.__doc__ == reference.encode.__doc__
    assert type(model).__name__ == "FSDPEncoder"


@on_ranks(2)
def test_registering_concerns_one_module_and_may_be_repeated(rank: Rank) -> None:
    """Registering twice is harmless, other modules of the class are not touched, plain ones are ignored."""
    model = fully_shard(Encoder(), mesh=rank.mesh)
    other = fully_shard(Encoder(), mesh=rank.mesh)
    plain = Encoder()
    register_fsdp_forward_method(plain, "encode")
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "encode")
    assert type(plain) is Encoder and type(other) is not type(model)
    assert isinstance(model, Encoder) and model.encode(inputs()).shape == (8, 8)
    with pytest.raises(ValueError, match="expected the name of a method of Encoder, found 'decode'"):
        register_fsdp_forward_method(model, "decode")


@on_ranks(2)
def test_registered_method_of_a_copy_runs_on_the_copy(rank: Rank) -> None:
    """A deep copy's registered method uses the copy's parameters."""
    model = fully_shard(Encoder(), mesh=rank.mesh)
    register_fsdp_forward_method(model, "encode")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
        assert not copied.encode(inputs()).any()
        assert model.encode(inputs()).any()
