"""Optimizer state of wrapped models: every form equals the unwrapped optimizer's, and every model loads every form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.tensor import DTensor
from wrapped import assert_states_close, both_forms, built

from checkpoint.kinds import KINDS, Model, adam, build, shared_folder, train
from checkpoint.optimizers import OPTIMIZERS, held_by, joined, map_leaves, trained
from compare import assert_equal, fqn_of
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.checkpoint.state.optimizer.state import optimizer_state
from fullshard.checkpoint.state.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from fullshard.wrapper.state_dict.optimizer_conversion import gather_sharded_tensor
from ranks import Rank, on_ranks

State = dict[str, Any]
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


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


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "original", "no_shard", "mixture"])
def test_saved(rank: Rank, kind: str) -> None:
    """State under the plain model's names, its values, and the groups' options: whole, in rows, on the first rank.

    What was saved does not change when training goes on. Converting changes nothing, and runs no step.
    """
    model, expected = build(rank, kind), full_reference()
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    steps: list[int] = []
    hook = optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before = copy.deepcopy(own(model, optimizer))
    saved = {form: save(model, optimizer, form) for form in (FULL, SHARDED)}
    for state in saved.values():
        assert_states_close(whole(state["state"]), expected["state"])
        devices = {values["exp_avg"].device for values in state["state"].values()}
        assert devices == {torch.device("cpu")}, "offload_to_cpu"
        (group,) = state["param_groups"]
        assert sorted(group["params"]) == sorted(expected["param_groups"][0]["params"])
        assert group["lr"] == 0.01 and group["betas"] == (0.9, 0.999)
    if kind == "original":  # every trained parameter of the model's state dict, in its order
        assert list(saved[FULL]["state"]) == [name for name, p in Model().named_parameters() if p.requires_grad]
    assert_same_specs(model, kind, saved[SHARDED]["state"])
    with as_form(model, FULL, rank0_only=True):
        first = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, first)
    assert first == {} if rank.rank else first["param_groups"] == saved[FULL]["param_groups"]
    assert_states_close(first.get("state", {}), {} if rank.rank else saved[FULL]["state"], exact=True)
    assert_states_close(own(model, optimizer), before, exact=True)
    assert steps == []
    hook.remove()
    kept = copy.deepcopy(saved[FULL])
    train(model, optimizer, 3, 5)
    assert_states_close(saved[FULL]["state"], kept["state"], exact=True)


def assert_same_specs(model: nn.Module, kind: str, state: State) -> None:
    """DTensors over rows with the spec of the model's own sharded state dict; numbers of steps are plain tensors."""
    with as_form(model, SHARDED):
        parameters = {fqn_of(name): value for name, value in model.state_dict().items()}
    for fqn, values in state.items():
        assert type(values["step"]) is torch.Tensor
        spec, parameter = values["exp_avg"], parameters[fqn]
        if kind == "no_shard" or (kind == "mixture" and not fqn.startswith("blocks")):  # nothing is cut
            assert type(spec) is torch.Tensor
            continue
        assert isinstance(spec, DTensor) and isinstance(parameter, DTensor), fqn
        assert spec.placements == parameter.placements and spec.device_mesh == parameter.device_mesh, fqn
        assert spec._local_tensor.shape == parameter._local_tensor.shape, fqn


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "kind", "form"), [("custom", "flat", FULL), ("custom", "original", SHARDED), ("asgd", "flat", SHARDED)]
)
def test_optimizers_there_and_back(rank: Rank, name: str, kind: str, form: StateDictType) -> None:
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


# ---------------------------------------------------------------- loading


@on_ranks(2)
@pytest.mark.parametrize(
    ("source", "form", "kind"),
    [
        ("flat", FULL, "fully_shard"),
        ("flat", SHARDED, "original"),
        ("original", SHARDED, "mixture"),
        ("fully_shard", SHARDED, "flat"),
        ("no_shard", SHARDED, "ddp"),
        ("mixture", FULL, "no_shard"),
    ],
)
def test_loaded_by_another_kind(rank: Rank, source: str, form: StateDictType, kind: str) -> None:
    """What one kind saved, another loads, an unwrapped optimizer's state, and goes on as the undisturbed run does."""
    model = build(rank, source)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    state = save(model, optimizer, form)
    reference, unwrapped = of_reference()
    target = KINDS[kind](rank, copy.deepcopy(reference))
    new = adam(target)
    load(target, new, state, form)
    assert_states_close(own(target, new), held_by(reference, unwrapped))
    assert_states_close(own(target, new), whole(state["state"]), exact=True)
    assert {float(values["step"]) for values in new.state.values()} == {3.0}
    losses = [train(m, o, 3, 6) for m, o in ((target, new), (reference, unwrapped))]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)


@on_ranks(4)
@pytest.mark.parametrize(("form", "orig"), [(FULL, False), (SHARDED, True)])
def test_half_the_ranks_and_replicas(rank: Rank, form: StateDictType, orig: bool) -> None:
    """What two ranks saved, or four with replicas, four ranks load, wrapped otherwise; and the other way round."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    four = FSDP(Model(), device_mesh=mesh, sharding_strategy=hybrid, use_orig_params=orig)
    two = Model()
    for index, block in enumerate(two.blocks):
        two.blocks[index] = FSDP(block, device_mesh=mesh["shard"], use_orig_params=not orig)
    two = FSDP(two, device_mesh=mesh["shard"], use_orig_params=not orig)
    source, target = (four, two) if form is FULL else (two, four)
    optimizer = adam(source)
    train(source, optimizer, 0, 3)
    state = save(source, optimizer, form)
    new = adam(target)
    load(target, new, state, form)
    assert_states_close(own(target, new), full_reference()["state"])
    assert_states_close(own(target, new), whole(state["state"]), exact=True)
    first = FSDP.full_optim_state_dict(four, optimizer if source is four else new)
    assert_states_close(first.get("state", {}), full_reference()["state"] if rank.rank == 0 else {})


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "mixture"])
def test_from_the_first_rank(rank: Rank, kind: str) -> None:
    """With ``rank0_only`` the other ranks pass nothing, and get what the first one has; ``load_directly`` loads."""
    expected = full_reference()
    state: Any = full_reference() if rank.rank == 0 else {}
    model = build(rank, kind)
    optimizers = [adam(model, lr=3.0) for _ in range(3)]
    with as_form(model, FULL, rank0_only=True):
        FSDP.optim_state_dict_to_load(model, optimizers[0], state, load_directly=True)
    for optimizer, given in zip(
        optimizers[1:], ({"optim": optimizers[1]}, {"optim_input": trained(model)}), strict=True
    ):
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(state or None, model, **given))
    for optimizer in optimizers:
        assert_states_close(own(model, optimizer), expected["state"], exact=True)
        assert optimizer.param_groups[0]["lr"] == 0.01


# ---------------------------------------------------------------- older names and forms


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "original"])
def test_older_names(rank: Rank, kind: str) -> None:
    """The functions for each form do what the current form does; without input, numbers are all parameters'."""
    model = build(rank, kind)
    optimizer = adam(model)
    train(model, optimizer, 0, 3)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    for state in (full, sharded):
        assert_states_close(whole(state["state"]), full_reference()["state"])
    for to_load in (
        FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
        FSDP.shard_full_optim_state_dict(full, model, [{"params": trained(model)}]),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    ):
        new = adam(model)
        new.load_state_dict(to_load)
        assert_states_close(own(model, new), full["state"], exact=True)
    if kind == "original":
        every = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, every, 3, 4)
        full = FSDP.full_optim_state_dict(model, every, rank0_only=False)
        again = torch.optim.Adam(model.parameters())
        again.load_state_dict(FSDP.shard_full_optim_state_dict(full, model))
        assert_states_close(own(model, again), full["state"], exact=True)


def small(orig: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FSDP(built(lambda: nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))), use_orig_params=orig)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank) -> None:
    torch.manual_seed(rank.rank)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(3)
@both_forms
def test_sharded_tensors_that_torch_has_read(rank: Rank, orig: bool) -> None:
    """torch's loader of sharded optimizer state makes ShardedTensors: uneven rows, ranks without any; the next step is
    that of the optimizer that was saved, bit by bit.

    With rank0_only a ShardedTensor or a DTensor is the same error on all ranks; nobody waits for a message.
    """
    model, optimizer = small(orig)
    step(model, optimizer, rank)
    folder = str(shared_folder(rank) / "older")
    with FSDP.state_dict_type(model, SHARDED):
        state = FSDP.optim_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
        again, fresh = small(orig)
        FSDP.set_state_dict_type(again, SHARDED)
        sharded = {"model": again.state_dict()}
        dcp.load(sharded, checkpoint_id=folder)
        again.load_state_dict(sharded["model"])
        reader = dcp.FileSystemReader(folder)
        read = load_sharded_optimizer_state_dict(sharded["model"], "optimizer", reader)["optimizer"]
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, read))
    for kept, loaded in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert_equal(loaded, kept, "state")
    step(model, optimizer, rank)
    step(again, fresh, rank)
    for new, old in zip(again.parameters(), model.parameters(), strict=True):
        assert_equal(new.detach(), old.detach(), "parameter")
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, *configs):
        for given, found in ((read, "found ShardedTensors"), (state, "found DTensors")):
            with pytest.raises(ValueError, match=found):
                FSDP.optim_state_dict_to_load(model, optimizer, given)


@on_ranks(2)
def test_sharded_tensors_of_several_regions(rank: Rank) -> None:
    """Every shard of a rank has its own values, in whatever order they lie."""
    value = torch.arange(16.0).view(8, 2)
    shards = [
        LocalShard.from_tensor_and_offsets(value[start : start + 2].clone(), [start, 0], rank.rank)
        for start in (2 * rank.rank, 2 * rank.rank + 4)
    ]
    assert_equal(gather_sharded_tensor(init_from_local_shards(shards, 8, 2)), value, "tensor")


# ---------------------------------------------------------------- optimizers that have not stepped


@on_ranks(2)
@both_forms
def test_fresh_optimizers_can_be_loaded_into(rank: Rank, orig: bool) -> None:
    """torch's functions load into what is there: the sharded form has the first state; the optimizer stays fresh."""
    model, optimizer = small(orig)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    folder = str(shared_folder(rank) / "fresh")
    with FSDP.state_dict_type(model, SHARDED):
        first = FSDP.optim_state_dict(model, optimizer)
        assert len(first["state"]) == 4 and not optimizer.state
        assert all(not value.to_local().any() for value in (s["exp_avg"] for s in first["state"].values()))
        step(model, optimizer, rank)
        dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
        again, fresh = small(orig)
        FSDP.set_state_dict_type(again, SHARDED)
        read = {"optimizer": FSDP.optim_state_dict(again, fresh)}
        dcp.load(read, checkpoint_id=folder)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, read["optimizer"]))
    for kept, loaded in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert_equal(loaded, kept, "state")


@on_ranks(1)
def test_first_states_draw_no_random_numbers(rank: Rank) -> None:
    """Optimizers that round at random draw in their next step what they would have drawn."""

    class Noisy(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            torch.rand(3)
            super().step()

    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    optimizer = Noisy(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with FSDP.state_dict_type(model, SHARDED):
        FSDP.optim_state_dict(model, optimizer)
    assert_equal(torch.rand(2), expected, "numbers")
