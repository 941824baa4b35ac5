"""Optimizer state of wrapped models: every form equals the unwrapped optimizer's, and every model loads every form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from wrapped import assert_states_close

from checkpoint.kinds import KINDS, Model, adam, build, every_kind, train
from checkpoint.optimizers import OPTIMIZERS, held_by, joined, map_leaves, trained
from compare import assert_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard
from fullshard.checkpoint.state.optimizer.state import optimizer_state
from fullshard.checkpoint.state.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from ranks import Rank, on_ranks

State = dict[str, Any]
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
WRAPPED = ("flat", "original", "whole", "no_shard", "mixture")
wrapped_kinds = pytest.mark.parametrize("kind", WRAPPED)
both_forms = pytest.mark.parametrize("form", [FULL, SHARDED], ids=["full", "sharded"])


def as_form(model: nn.Module, form: StateDictType, *, rank0_only: bool = False) -> Any:
    """The ``with`` block in which state dicts have that form."""
    if form is SHARDED:
        return FSDP.state_dict_type(model, form, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    return FSDP.state_dict_type(model, form, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=rank0_only))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, form: StateDictType, **options: Any) -> State:
    with as_form(model, form):
        return FSDP.optim_state_dict(model, optimizer, **options)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: State, form: StateDictType) -> None:
    with as_form(model, form):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))


def whole(state: State) -> State:
    """DTensors as whole tensors."""
    return map_leaves(state, lambda value: value.full_tensor() if isinstance(value, DTensor) else value)


def of_reference(steps: int = 3, name: str = "adam") -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = OPTIMIZERS[name](trained(model))
    train(model, optimizer, 0, steps)
    return model, optimizer


def full_reference(steps: int = 3, name: str = "adam") -> State:
    """What the unwrapped optimizer holds, by names."""
    model, optimizer = of_reference(steps, name)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {"state": copy.deepcopy(held_by(model, optimizer)), "param_groups": [{**group, "params": names}]}


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What the optimizer holds now, gathered by no function of the wrapper."""
    return joined(optimizer_state(model, optimizer)["state"])


# ---------------------------------------------------------------- saving


@on_ranks(2, 4)
@wrapped_kinds
@both_forms
def test_equals_the_unwrapped_optimizer(rank: Rank, kind: str, form: StateDictType) -> None:
    """State by the names of the plain model, its values, and the groups' options."""
    model = build(rank, kind)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    state, expected = save(model, optimizer, form), full_reference()
    assert_states_close(whole(state["state"]), expected["state"])
    assert {values["exp_avg"].device for values in state["state"].values()} == {torch.device("cpu")}, "offload_to_cpu"
    (group,) = state["param_groups"]
    assert sorted(group["params"]) == sorted(expected["param_groups"][0]["params"])
    assert group["lr"] == 0.01 and group["betas"] == (0.9, 0.999)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "original"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@both_forms
def test_every_optimizer_there_and_back(rank: Rank, kind: str, name: str, form: StateDictType) -> None:
    """State of all sorts is the unwrapped optimizer's, and loads into a new one bit by bit."""
    model = build(rank, kind)
    optimizer = OPTIMIZERS[name](trained(model))
    train(model, optimizer, 0, 2)
    state = save(model, optimizer, form)
    assert_states_close(whole(state["state"]), full_reference(2, name)["state"])
    new = OPTIMIZERS[name](trained(model))
    with as_form(model, form):
        to_load = FSDP.optim_state_dict_to_load(model, new, state)
    # Not with its load_state_dict, which casts everything to the parameters' dtype and makes generators of words.
    parameters = [parameter for group in new.param_groups for parameter in group["params"]]
    for number, values in to_load["state"].items():
        new.state[parameters[number]] = values
    assert_states_close(own(model, new), whole(state["state"]), exact=True)


@on_ranks(2)
@wrapped_kinds
def test_full_tensors_have_their_own_memory(rank: Rank, kind: str) -> None:
    """What was saved does not change when training goes on."""
    model = build(rank, kind)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    state = save(model, optimizer, FULL)
    kept = copy.deepcopy(state)
    train(model, optimizer, 2, 4)
    assert_states_close(state["state"], kept["state"], exact=True)


@on_ranks(2)
@wrapped_kinds
def test_sharded_values(rank: Rank, kind: str) -> None:
    """DTensors over rows with the spec of the model's own sharded state dict; numbers of steps are plain tensors."""
    model = build(rank, kind)
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    state = save(model, optimizer, SHARDED)["state"]
    with as_form(model, SHARDED):
        parameters = model.state_dict()
    for fqn, values in state.items():
        assert type(values["step"]) is torch.Tensor
        spec = values["exp_avg"]
        if kind == "no_shard" or (kind == "mixture" and not fqn.startswith("blocks")):  # nothing is cut
            assert type(spec) is torch.Tensor
            continue
        name = next(name for name in parameters if name.replace("_fsdp_wrapped_module.", "") == fqn)
        assert isinstance(spec, DTensor) and isinstance(parameters[name], DTensor), fqn
        assert spec.placements == parameters[name].placements and spec.device_mesh == parameters[name].device_mesh, fqn
        assert spec._local_tensor.shape == parameters[name]._local_tensor.shape, fqn
        if kind in ("flat", "original", "whole") and spec.dim():
            assert spec.placements == (Shard(0),)


@on_ranks(4)
@wrapped_kinds
def test_on_the_first_rank_only(rank: Rank, kind: str) -> None:
    """With ``rank0_only`` the others get nothing."""
    model = build(rank, kind)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    with as_form(model, FULL, rank0_only=True):
        state = FSDP.optim_state_dict(model, optimizer)
    if rank.rank:
        assert state == {}
    else:
        assert_states_close(state["state"], full_reference()["state"])
        assert len(state["param_groups"]) == 1


@on_ranks(4)
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
def test_replicas(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Hybrid and unsharded models: the same state, on all ranks or the first, and back exactly."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard")) if strategy.hybrid else rank.mesh
    model = FSDP(Model(), sharding_strategy=strategy, use_orig_params=orig, device_mesh=mesh)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    expected = full_reference()["state"]
    for form in (FULL, SHARDED):
        state = save(model, optimizer, form)
        assert_states_close(whole(state["state"]), expected)
        new = adam(model)
        load(model, new, state, form)
        assert_states_close(own(model, new), whole(state["state"]), exact=True)
    first = FSDP.full_optim_state_dict(model, optimizer)
    assert_states_close(first["state"], expected) if rank.rank == 0 else None
    assert rank.rank == 0 or first == {}


@on_ranks(2)
def test_keys_are_those_of_the_model(rank: Rank) -> None:
    """Every trained parameter of the model's state dict, in its order, and nothing else."""
    model = build(rank, "original")
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    state = save(model, optimizer, FULL)
    names = [name for name, p in Model().named_parameters() if p.requires_grad]
    assert list(state["state"]) == names
    assert set(names) <= set(model.state_dict())


@on_ranks(2)
def test_units_of_both_front_ends(rank: Rank) -> None:
    """fully_shard's units among wrappers, and a root that is neither."""
    model = Model()
    fully_shard(model.blocks[0], mesh=rank.mesh)
    model.blocks[1] = FSDP(model.blocks[1], device_mesh=rank.mesh)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    on_device = ShardedOptimStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(), on_device):
        sharded = FSDP.optim_state_dict(model, optimizer)
    assert sharded["state"]["blocks.0.0.weight"]["exp_avg"] is not None
    live = next(p for n, p in model.named_parameters() if n == "blocks.0.0.weight")
    held = optimizer.state[live]["exp_avg"]
    saved = sharded["state"]["blocks.0.0.weight"]["exp_avg"]
    assert saved._local_tensor.data_ptr() == held._local_tensor.data_ptr()
    assert_states_close(whole(sharded["state"]), full_reference()["state"])
    assert_states_close(save(model, optimizer, FULL)["state"], full_reference()["state"])


# ---------------------------------------------------------------- loading


@on_ranks(2)
@pytest.mark.parametrize("source", ["flat", "original", "fully_shard", "no_shard"])
@both_forms
def test_loaded_by_every_kind(rank: Rank, source: str, form: StateDictType) -> None:
    """What one kind saved, every other loads: the same state, and the same training from there."""
    model = build(rank, source)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    state = save(model, optimizer, form)
    expected = full_reference()["state"]
    for kind in KINDS:
        reference, _ = of_reference()
        target = KINDS[kind](rank, reference)
        new = adam(target)
        load(target, new, state, form)
        assert_states_close(own(target, new), expected)
        assert_states_close(own(target, new), whole(state["state"]), exact=True)
        assert {float(values["step"]) for values in new.state.values()} == {3.0}


@on_ranks(2)
@every_kind("low_buffers")
def test_training_goes_on(rank: Rank, kind: str) -> None:
    """Stopped, saved, loaded into another kind of model and resumed: the losses of the undisturbed unwrapped run."""
    reference, unwrapped = of_reference()
    state = full_reference()
    model = KINDS[kind](rank, copy.deepcopy(reference))
    optimizer = adam(model)
    load(model, optimizer, state, FULL)
    losses = [train(m, o, 3, 7) for m, o in ((model, optimizer), (reference, unwrapped))]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)


@on_ranks(4)
@both_forms
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
def test_half_the_ranks(rank: Rank, form: StateDictType, orig: bool) -> None:
    """What four ranks saved, two ranks load, wrapped otherwise; and the other way round."""
    halves = rank.make_mesh(2, 2, names=("halves", "half"))["half"]
    four = FSDP(Model(), device_mesh=rank.mesh, use_orig_params=orig)
    two = Model()
    for index, block in enumerate(two.blocks):
        two.blocks[index] = FSDP(block, device_mesh=halves, use_orig_params=not orig)
    two = FSDP(two, device_mesh=halves, use_orig_params=not orig)
    expected = full_reference()["state"]
    for source, target in ((four, two), (two, four)):
        optimizer = adam(source)
        source.load_state_dict(Model().state_dict())
        train(source, optimizer, 0, 3)
        state = save(source, optimizer, form)
        new = adam(target)
        load(target, new, state, form)
        assert_states_close(own(target, new), expected)
        assert_states_close(own(target, new), whole(state["state"]), exact=True)


@on_ranks(2, 4)
@wrapped_kinds
def test_from_the_first_rank(rank: Rank, kind: str) -> None:
    """With ``rank0_only`` the other ranks pass nothing, and get what the first one has."""
    state = full_reference() if rank.rank == 0 else {}
    model = build(rank, kind)
    optimizer = adam(model, lr=3.0)
    with as_form(model, FULL, rank0_only=True):
        to_load = FSDP.optim_state_dict_to_load(model, optimizer, state)
    optimizer.load_state_dict(to_load)
    expected = full_reference()
    assert_states_close(own(model, optimizer), expected["state"], exact=True)
    assert optimizer.param_groups[0]["lr"] == 0.01
    again = adam(model)
    again.load_state_dict(FSDP.scatter_full_optim_state_dict(state or None, model, optim=again))
    assert_states_close(own(model, again), expected["state"], exact=True)
    by_input = FSDP.scatter_full_optim_state_dict(state or None, model, optim_input=trained(model))
    third = adam(model)
    third.load_state_dict(by_input)
    assert_states_close(own(model, third), expected["state"], exact=True)


@on_ranks(2)
def test_the_optimizer_stays_as_it_is(rank: Rank) -> None:
    """Converting a state dict changes neither the optimizer nor the model, and runs no step."""
    model = build(rank, "flat")
    optimizer = adam(model, lr=0.5)
    train(model, optimizer, 0, 1)
    before, values = copy.deepcopy(own(model, optimizer)), copy.deepcopy(model.state_dict())
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    fresh = adam(model)
    fresh.register_step_post_hook(lambda *_: steps.append(1))
    for one in (optimizer, fresh):
        with as_form(model, FULL):
            FSDP.optim_state_dict(model, one)
            FSDP.optim_state_dict_to_load(model, one, full_reference())
    assert_states_close(own(model, optimizer), before, exact=True)
    assert optimizer.param_groups[0]["lr"] == 0.5 and len(fresh.state) == 0 and steps == []
    assert_equal(dict(model.state_dict()), dict(values), "model")


@on_ranks(2)
@both_forms
def test_loads_directly(rank: Rank, form: StateDictType) -> None:
    """``load_directly`` puts the result into the optimizer, too."""
    model = build(rank, "original")
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    state = save(model, optimizer, form)
    new = adam(model)
    with as_form(model, form):
        FSDP.optim_state_dict_to_load(model, new, state, load_directly=True)
    assert_states_close(own(model, new), whole(state["state"]), exact=True)


# ---------------------------------------------------------------- older names


@on_ranks(2)
@wrapped_kinds
def test_older_names(rank: Rank, kind: str) -> None:
    """The functions for each form do what the current form does."""
    model = build(rank, kind)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    expected = full_reference()["state"]
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_states_close(full["state"], expected)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    assert_states_close(whole(sharded["state"]), expected)
    for to_load in (
        FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
        FSDP.shard_full_optim_state_dict(full, model, [{"params": trained(model)}]),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    ):
        new = adam(model)
        new.load_state_dict(to_load)
        assert_states_close(own(model, new), full["state"], exact=True)


@on_ranks(2)
def test_input_is_all_parameters_by_default(rank: Rank) -> None:
    """Without optimizer and input, numbers are those of ``model.parameters()``."""
    model = build(rank, "original")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 0, 2)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    new = torch.optim.Adam(model.parameters())
    new.load_state_dict(FSDP.shard_full_optim_state_dict(full, model))
    assert_states_close(own(model, new), full["state"], exact=True)
