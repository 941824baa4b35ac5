"""Optimizer state of wrapped models: by names, as of an unwrapped one, in every form; and what does not fit."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.tensor import DTensor
from wrapped import assert_states_close, built, whole

from checkpoint.kinds import KINDS, Model, adam, build, shared_folder, train
from checkpoint.optimizers import OPTIMIZERS, held_by, joined, trained
from compare import assert_equal, fqn_of
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.checkpoint.state.optimizer.state import optimizer_state
from fullshard.checkpoint.state.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from fullshard.engine.parameters.flat import FlatShardedParameter
from fullshard.errors import FullshardError, PhaseError
from fullshard.wrapper.state_dict import optimizer_conversion
from fullshard.wrapper.state_dict.optimizer_conversion import gather_sharded_tensor
from ranks import Rank, on_ranks

State = dict[str, Any]
FULL, SHARDED, LOCAL = (StateDictType[f"{name}_STATE_DICT"] for name in ("FULL", "SHARDED", "LOCAL"))
NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
RANK0 = FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
flat_and_original = pytest.mark.parametrize("kind", ["flat", "original"])


class Small(nn.Module):
    """Two layers, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, *, first: bool = True) -> torch.Tensor:
        return self.one(x) + self.two(x) if first else self.two(x)


def small(rank: Rank, kind: str = "original") -> FSDP:
    """Each layer a unit."""
    model, orig = Small(), kind == "original"
    for name in ("one", "two"):
        setattr(model, name, FSDP(getattr(model, name), use_orig_params=orig, device_mesh=rank.mesh))
    return FSDP(model, use_orig_params=orig, device_mesh=rank.mesh)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1, **options: Any) -> None:
    for index in range(times):
        model(torch.full((2, 3), 1.0 + index), **options).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def stepped(model: nn.Module, times: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, times, **options)
    return model, optimizer


def save(model: nn.Module, optimizer: torch.optim.Optimizer, form: StateDictType, **options: Any) -> State:
    with FSDP.state_dict_type(model, form):
        return FSDP.optim_state_dict(model, optimizer, **options)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: State, form: StateDictType = FULL) -> State:
    """Load a state; what the optimizer holds then."""
    with FSDP.state_dict_type(model, form):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    return own(model, optimizer)


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What the optimizer holds now, unsharded by no function of the wrapper."""
    return joined(optimizer_state(model, optimizer)["state"])


def of_reference(steps: int = 3, name: str = "adam") -> tuple[Model, torch.optim.Optimizer]:
    """The unwrapped model and its optimizer."""
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


# ---------------------------------------------------------------- saving


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "original", "mixture"])
def test_saved_state(rank: Rank, kind: str) -> None:
    """It has the unwrapped optimizer's names, values and options in every form; saving changes nothing."""
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
    with FSDP.state_dict_type(model, *RANK0):
        first = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, first)
    assert first == {} if rank.rank else first["param_groups"] == saved[FULL]["param_groups"]
    assert_states_close(first.get("state", {}), {} if rank.rank else saved[FULL]["state"], exact=True)
    assert_states_close(own(model, optimizer), before, exact=True)
    assert steps == []
    hook.remove()
    kept = copy.deepcopy(saved[FULL])
    train(model, optimizer, 3, 4)
    assert_states_close(saved[FULL]["state"], kept["state"], exact=True)


def assert_same_specs(model: nn.Module, kind: str, state: State) -> None:
    """DTensors over rows with the spec of the model's own sharded state dict; numbers of steps are plain tensors."""
    with FSDP.state_dict_type(model, SHARDED):
        parameters = {fqn_of(name): value for name, value in model.state_dict().items()}
    for fqn, values in state.items():
        assert type(values["step"]) is torch.Tensor
        spec, parameter = values["exp_avg"], parameters[fqn]
        if kind == "mixture" and not fqn.startswith("blocks"):  # not sharded
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
    with FSDP.state_dict_type(model, form):
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
    loaded = load(target, new, state, form)
    assert_states_close(loaded, held_by(reference, unwrapped))
    assert_states_close(loaded, whole(state["state"]), exact=True)
    assert {float(values["step"]) for values in new.state.values()} == {3.0}
    losses = [train(m, o, 3, 5) for m, o in ((target, new), (reference, unwrapped))]
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
    optimizer, new = adam(source), adam(target)
    train(source, optimizer, 0, 3)
    state = save(source, optimizer, form)
    loaded = load(target, new, state, form)
    assert_states_close(loaded, full_reference()["state"])
    assert_states_close(loaded, whole(state["state"]), exact=True)
    first = FSDP.full_optim_state_dict(four, optimizer if source is four else new)
    assert_states_close(first.get("state", {}), full_reference()["state"] if rank.rank == 0 else {})


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "mixture"])
def test_from_the_first_rank(rank: Rank, kind: str) -> None:
    """With ``rank0_only`` the other ranks pass nothing, and get what the first one has; ``load_directly`` loads."""
    expected = full_reference()
    state: Any = full_reference() if rank.rank == 0 else {}
    model = build(rank, kind)
    direct, by_optimizer, by_input = (adam(model, lr=3.0) for _ in range(3))
    with FSDP.state_dict_type(model, *RANK0):
        FSDP.optim_state_dict_to_load(model, direct, state, load_directly=True)
    by_optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(state or None, model, optim=by_optimizer))
    by_input.load_state_dict(FSDP.scatter_full_optim_state_dict(state or None, model, optim_input=trained(model)))
    for optimizer in (direct, by_optimizer, by_input):
        assert_states_close(own(model, optimizer), expected["state"], exact=True)
        assert optimizer.param_groups[0]["lr"] == 0.01


# ---------------------------------------------------------------- older names and forms


@on_ranks(2)
def test_older_names(rank: Rank) -> None:
    """The functions for each form do what the current form does; without input, numbers are all parameters'."""
    model = build(rank, "original")
    optimizer, every = adam(model), torch.optim.Adam(model.parameters(), lr=0.01)
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
    train(model, every, 3, 4)
    full = FSDP.full_optim_state_dict(model, every, rank0_only=False)
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(FSDP.shard_full_optim_state_dict(full, model))
    assert_states_close(own(model, again), full["state"], exact=True)


@on_ranks(3)
@flat_and_original
def test_through_torch_checkpoints(rank: Rank, kind: str) -> None:
    """torch's checkpoints load into a fresh optimizer, in DTensors or ShardedTensors, and its next step is the same."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = FSDP(built(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))), use_orig_params=kind == "original")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    step(model, optimizer)
    folder = str(shared_folder(rank) / "state")
    with FSDP.state_dict_type(model, SHARDED):
        state = FSDP.optim_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    again, fresh = made()
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    with FSDP.state_dict_type(again, SHARDED):
        sharded = {"model": again.state_dict(), "optimizer": FSDP.optim_state_dict(again, fresh)}
        first = sharded["optimizer"]["state"]
        assert len(first) == 4 and not fresh.state
        assert not any(values["exp_avg"].to_local().any() for values in first.values())
        dcp.load(sharded, checkpoint_id=folder)
        again.load_state_dict(sharded["model"])
        reader = dcp.FileSystemReader(folder)
        read = load_sharded_optimizer_state_dict(sharded["model"], "optimizer", reader)["optimizer"]
    load(again, fresh, sharded["optimizer"], SHARDED)
    load(again, other, read, SHARDED)
    for new in (fresh, other):
        for kept, loaded in zip(optimizer.state.values(), new.state.values(), strict=True):
            assert_equal(loaded, kept, "state")
    step(model, optimizer)
    step(again, other)
    for one, two in zip(again.parameters(), model.parameters(), strict=True):
        assert_equal(one.detach(), two.detach(), "parameter")
    with FSDP.state_dict_type(model, *RANK0):
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
    save(model, optimizer, SHARDED)
    assert_equal(torch.rand(2), expected, "numbers")


@on_ranks(2)
def test_local_form(rank: Rank) -> None:
    """The live state of flat parameters under their own names, for the same wrapping on the same ranks only."""
    model, optimizer = stepped(small(rank, "flat"), 2)
    with FSDP.state_dict_type(model, LOCAL):
        state = FSDP.optim_state_dict(model, optimizer)
        assert set(state["state"]) == {"one._flat_param", "two._flat_param"} == set(state["param_groups"][0]["params"])
        flat = next(model.one.parameters())
        assert state["state"]["one._flat_param"]["exp_avg"] is optimizer.state[flat]["exp_avg"]
        new = torch.optim.Adam(model.parameters())
        FSDP.optim_state_dict_to_load(model, new, copy.deepcopy(state), load_directly=True)
        assert_states_close(own(model, new), own(model, optimizer), exact=True)
        assert new.param_groups[0]["lr"] == 0.1
        wrong, other = copy.deepcopy(state), copy.deepcopy(state)
        wrong["state"]["one._flat_param"]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"one\._flat_param: this rank's shard has shape"):
            FSDP.optim_state_dict_to_load(model, new, wrong)
        other["param_groups"][0]["params"][0] = "three._flat_param"
        with pytest.raises(ValueError, match=r"unexpected: \['three\._flat_param'\], missing: \['one\._flat_param'\]"):
            FSDP.optim_state_dict_to_load(model, new, other)
    large = build(rank, "mixture")
    optimizer, new = adam(large), adam(large)
    train(large, optimizer, 0, 2)
    load(large, new, copy.deepcopy(save(large, optimizer, LOCAL)), LOCAL)
    assert_states_close(own(large, new), own(large, optimizer), exact=True)


# ---------------------------------------------------------------- parameters without state, groups and order


@on_ranks(2)
@flat_and_original
def test_parameters_without_state(rank: Rank, kind: str) -> None:
    """Units that were not run have none, before loading and after it; each parameter keeps its own number of steps."""
    model = small(rank, kind)
    for optimizer in (torch.optim.Adam(model.parameters(), lr=0.5), torch.optim.SGD(model.parameters(), lr=0.5)):
        state = FSDP.optim_state_dict(model, optimizer)
        assert state["state"] == {} and state["param_groups"][0]["lr"] == 0.5
        other = type(optimizer)(model.parameters(), lr=1.0)
        assert load(model, other, state) == {} and other.param_groups[0]["lr"] == 0.5
        optimizer.step()
    model, optimizer = stepped(model, 3, first=False)
    state = FSDP.optim_state_dict(model, optimizer)
    assert_states_close(state["state"], held_by(*stepped(Small(), 3, first=False)))
    assert set(state["state"]) == {"two.weight", "two.bias"}
    assert set(state["param_groups"][0]["params"]) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    new = torch.optim.Adam(model.parameters())
    assert_states_close(load(model, new, state), state["state"], exact=True)
    step(model, new, 1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("one" in name)
    step(model, new, 1)
    steps = {fqn: float(values["step"]) for fqn, values in own(model, new).items()}
    assert steps == {"one.weight": 2.0, "one.bias": 2.0, "two.weight": 4.0, "two.bias": 4.0}


@on_ranks(2)
@flat_and_original
def test_given_state_dicts(rank: Rank, kind: str) -> None:
    """A state dict without ``param_groups`` stays one; what was changed in the optimizer's is what is saved."""
    model, optimizer = stepped(small(rank, kind), 2)
    given = copy.deepcopy(optimizer.state_dict())
    state = FSDP.optim_state_dict(model, optimizer, {"state": given["state"]})
    assert list(state) == ["state"]
    assert_states_close(state["state"], held_by(*stepped(Small(), 2)))
    to_load = FSDP.optim_state_dict_to_load(model, optimizer, state)
    assert list(to_load) == ["state"]
    held = [optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"]]
    assert_states_close(to_load["state"], dict(enumerate(held)), exact=True)
    for values in given["state"].values():
        values["exp_avg"].fill_(7.0)
    given["param_groups"][0]["lr"] = 0.75
    state = FSDP.optim_state_dict(model, optimizer, given)
    assert all(bool((values["exp_avg"] == 7.0).all()) for values in state["state"].values())
    assert state["param_groups"][0]["lr"] == 0.75
    assert not any(bool((values["exp_avg"] == 7.0).any()) for values in optimizer.state.values())
    with pytest.raises(ValueError, match="expected 1 parameter groups in the optimizer's state dict, found 2"):
        FSDP.optim_state_dict(model, optimizer, {**given, "param_groups": given["param_groups"] * 2})
    with FSDP.summon_full_params(model), pytest.raises(PhaseError):
        FSDP.optim_state_dict(model, optimizer)


@on_ranks(2)
def test_unknown_keys(rank: Rank) -> None:
    """What users keep in the state under names of their own goes both ways, with a warning."""
    model, optimizer = stepped(small(rank))
    state: Any = optimizer.state
    state.update(phase={"name": "warm-up", "seen": torch.arange(3)}, count=5)
    with pytest.warns(UserWarning, match="the key 'phase', which is not a parameter"):
        saved = FSDP.optim_state_dict(model, optimizer)
    new: Any = torch.optim.Adam(model.parameters())
    new.load_state_dict(FSDP.optim_state_dict_to_load(model, new, saved))
    assert_equal({key: new.state[key] for key in ("phase", "count")}, {k: state[k] for k in ("phase", "count")}, "own")


@on_ranks(2)
def test_groups_are_matched_by_name(rank: Rank) -> None:
    """Options follow the parameters into other groups, also in another order per rank, or the error says why not."""
    model = small(rank)
    named = {fqn_of(name): p for name, p in model.named_parameters()}

    def groups(*names: list[str]) -> list[dict[str, Any]]:
        return [{"params": [named[name] for name in group]} for group in names]

    weights, biases = ["one.weight", "two.weight"], ["one.bias", "two.bias"]
    optimizer = torch.optim.Adam(groups(weights, biases), lr=0.1)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["weight_decay"] = 0.25, 0.5
    step(model, optimizer)
    state = FSDP.optim_state_dict(model, optimizer)
    assert [group["params"] for group in state["param_groups"]] == [weights, biases]
    order = -1 if rank.rank else 1
    new = torch.optim.Adam(groups(biases[::order], ["two.weight"], ["one.weight"]), lr=9.0)
    assert_states_close(load(model, new, state), state["state"], exact=True)
    found = [(group["lr"], group["weight_decay"]) for group in new.param_groups]
    assert found == [(0.1, 0.5), (0.25, 0), (0.25, 0)]
    assert_states_close(FSDP.optim_state_dict(model, new)["state"], state["state"], exact=True)
    mixed = torch.optim.Adam(groups(["one.weight", "one.bias"], ["two.weight", "two.bias"]))
    with pytest.raises(ValueError, match=r"group 0 .*\(lr, weight_decay\): one\.weight and one\.bias"):
        FSDP.optim_state_dict_to_load(model, mixed, state)


@on_ranks(2)
def test_parameters_that_are_not_sharded(rank: Rank) -> None:
    """Of what no unit manages, ignored or outside of wrappers, each rank saves and loads what it has, whole."""
    plain = Small()
    ignored = plain.two.weight
    model = FSDP(plain, ignored_states=[ignored], use_orig_params=True, device_mesh=rank.mesh)
    holder = nn.ModuleDict({"model": model})
    name, extra = f"extra{rank.rank}", nn.Parameter(torch.full((2 + rank.rank,), 1.0))
    holder.register_parameter(name, extra)
    optimizer = torch.optim.Adam(holder.parameters(), lr=0.1)
    extra.grad = torch.ones_like(extra)
    step(model, optimizer)
    state = FSDP.optim_state_dict(holder, optimizer)
    assert state["state"]["model.two.weight"]["exp_avg"] is not optimizer.state[ignored]["exp_avg"]
    new = torch.optim.Adam(holder.parameters())
    new.load_state_dict(FSDP.optim_state_dict_to_load(holder, new, state))
    assert_states_close(new.state[extra], optimizer.state[extra], exact=True)
    assert_states_close(state["state"].pop(name), optimizer.state[extra], exact=True)
    found = {key.removeprefix("model."): value for key, value in state["state"].items()}
    assert_states_close(found, held_by(*stepped(Small())))
    stray = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"parameter 4 of group 0 of the optimizer .* is not in the model"):
        FSDP.optim_state_dict(model, stray)


@on_ranks(4)
@pytest.mark.parametrize("passed", [False, True])
def test_a_group_of_its_own(rank: Rank, passed: bool) -> None:
    """Each half of the ranks has a model, a first rank and a result; ``group`` says who they are, or is known."""
    mesh = rank.make_mesh(2, 2, names=("halves", "half"))["half"]
    group = mesh.get_group() if passed else None
    model, optimizer = stepped(FSDP(Small(), use_orig_params=True, device_mesh=mesh), 1 + rank.rank // 2)
    with FSDP.state_dict_type(model, *RANK0):
        state = FSDP.optim_state_dict(model, optimizer, group=group)
        assert (state == {}) == (dist.get_rank(mesh.get_group()) > 0)
        if state:
            assert_states_close(state["state"], held_by(*stepped(Small(), 1 + rank.rank // 2)))
        new = torch.optim.Adam(model.parameters())
        new.load_state_dict(FSDP.optim_state_dict_to_load(model, new, state, group=group))
    for parameter in model.parameters():
        assert_states_close(new.state[parameter], optimizer.state[parameter], exact=True)


# ---------------------------------------------------------------- names and numbers


class Named(torch.optim.Adam):
    """An optimizer whose state dict goes by names."""

    def __init__(self, named: dict[str, nn.Parameter], **options: Any) -> None:
        super().__init__(named.values(), **options)
        self.names = list(named)

    def state_dict(self) -> State:
        return rekeyed(super().state_dict(), dict(enumerate(self.names)))

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(rekeyed(state, {name: number for number, name in enumerate(self.names)}))


def rekeyed(state: State, keys: dict[Any, Any]) -> State:
    groups = [{**group, "params": [keys[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {keys[n]: values for n, values in state["state"].items()}, "param_groups": groups}


@on_ranks(2)
@pytest.mark.parametrize(("kind", "clean"), [("flat", True), ("original", False), ("original", True)])
def test_named_optimizers(rank: Rank, kind: str, clean: bool) -> None:
    """An optimizer that knows names, with or without what wrappers add to them, gets its state under these."""
    model = small(rank, kind)
    named = {fqn_of(name) if clean else name: p for name, p in model.named_parameters()}
    optimizer = Named(named, lr=0.1)
    step(model, optimizer, 2)
    state = FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())
    assert_states_close(state["state"], held_by(*stepped(Small(), 2)))
    new = Named(named)
    to_load = FSDP.optim_state_dict_to_load(model, new, state, is_named_optimizer=True, load_directly=True)
    assert set(to_load["state"]) == set(named)
    assert_states_close(own(model, new), state["state"], exact=True)


@on_ranks(2)
def test_rekeyed_for_an_unwrapped_model(rank: Rank) -> None:
    """Wrapped and unwrapped models load each other's state by numbers and names; flat parameters refuse by name."""
    model, optimizer = stepped(small(rank, "flat"), 2)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    reference, unwrapped = stepped(Small(), 2)
    names = [name for name, _ in reference.named_parameters()]
    by_number = FSDP.rekey_optim_state_dict(full, ID, reference)
    assert by_number["param_groups"][0]["params"] == list(range(len(names)))
    new = torch.optim.Adam(reference.parameters())
    new.load_state_dict(by_number)
    assert_states_close(held_by(reference, new), held_by(reference, unwrapped))
    by_name = FSDP.rekey_optim_state_dict(unwrapped.state_dict(), NAME, reference, optim=unwrapped)
    assert by_name["param_groups"][0]["params"] == names
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(FSDP.shard_full_optim_state_dict(by_name, model, optim=again))
    assert_states_close(own(model, again), held_by(reference, unwrapped), exact=True)
    with pytest.raises(ValueError, match=r"share a flat parameter, .*optim_state_dict_to_load"):
        FSDP.rekey_optim_state_dict({"state": {"one.weight": {}}}, ID, model, optim=optimizer)


def test_rekeying() -> None:
    """Groups in another order, inputs, keys that are right already, mixed and unknown ones."""
    model = Small()
    order = [model.two.bias, model.one.weight, model.two.weight]
    optimizer = torch.optim.Adam([{"params": order[:1]}, {"params": order[1:], "lr": 0.5}], lr=0.1)
    step(model, optimizer)
    state = optimizer.state_dict()
    named = FSDP.rekey_optim_state_dict(state, NAME, model, optim=optimizer)
    assert [group["params"] for group in named["param_groups"]] == [["two.bias"], ["one.weight", "two.weight"]]
    assert named["state"]["one.weight"]["exp_avg"] is optimizer.state[model.one.weight]["exp_avg"]
    same = FSDP.rekey_optim_state_dict(state, NAME, model, [{"params": order[:1]}, {"params": order[1:]}])
    assert list(same["state"]) == list(named["state"])
    named["param_groups"].reverse()
    named["param_groups"][0]["params"].reverse()
    back = FSDP.rekey_optim_state_dict(named, ID, model, optim=optimizer)
    assert [group["params"] for group in back["param_groups"]] == [[0], [1, 2]]
    assert_states_close(back["state"], state["state"], exact=True)
    assert FSDP.rekey_optim_state_dict(state, ID, model) is state
    assert FSDP.rekey_optim_state_dict(named, NAME, model) is named
    with pytest.raises(ValueError, match="found both"):
        FSDP.rekey_optim_state_dict({"state": {0: {}, "one.weight": {}}}, NAME, model)
    with pytest.raises(ValueError, match=r"found \['three'\]"):
        FSDP.rekey_optim_state_dict({"state": {"three": {}}}, ID, model)
    with pytest.raises(TypeError):
        FSDP.rekey_optim_state_dict(state, "name", model)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what does not fit


@on_ranks(2)
@flat_and_original
def test_what_does_not_fit(rank: Rank, kind: str) -> None:
    """Parameters of one side, wrong shapes, numbers and other dictionaries are errors on all ranks that name them."""
    model, optimizer = stepped(small(rank, kind))
    state = FSDP.optim_state_dict(model, optimizer)
    less, more, wrong = (copy.deepcopy(state) for _ in range(3))
    less["param_groups"][0]["params"].remove("two.bias")
    del less["state"]["two.bias"]
    more["param_groups"][0]["params"].append("three")
    more["state"]["three"] = copy.deepcopy(more["state"]["two.bias"])
    wrong["state"]["two.weight"]["exp_avg"] = torch.zeros(4, 3)
    by_number = optimizer.state_dict()
    given = [
        (less, r"the saved optimizer has no parameters two\.bias"),
        (more, "the checkpoint has state for three, which this optimizer does not have"),
        (wrong, r"two.weight: exp_avg was saved with shape \(4, 3\).*\(5, 3\)"),
        (by_number, "rekey_optim_state_dict"),
        ({"one": 1}, r"found the keys \['one'\]"),
    ]
    for one, message in given:
        with pytest.raises(ValueError, match=message):
            FSDP.optim_state_dict_to_load(model, optimizer, one)
    with FSDP.state_dict_type(model, *RANK0):
        for one, message in ((by_number, "expected names of parameters as keys, found 0"), given[1]):
            with pytest.raises(ValueError, match=message):
                FSDP.optim_state_dict_to_load(model, optimizer, one if rank.rank == 0 else {})


@on_ranks(2)
def test_errors_of_one_rank(rank: Rank) -> None:
    """Where loading communicates, what does not fit on one rank is an error on all, not a hang."""
    model, optimizer = stepped(small(rank))
    parameters = list(model.parameters())
    with FSDP.state_dict_type(model, SHARDED):
        state = FSDP.optim_state_dict(model, optimizer)
        fewer = torch.optim.Adam(parameters[: 4 if rank.rank == 0 else 3])
        with pytest.raises(ValueError, match="the checkpoint has state for two"):
            FSDP.optim_state_dict_to_load(model, fewer, state)
        stray = torch.optim.Adam([*parameters, nn.Parameter(torch.ones(2))] if rank.rank == 0 else parameters)
        with pytest.raises(ValueError, match="is not in the model"):
            FSDP.optim_state_dict_to_load(model, stray, state)


@on_ranks(2)
@flat_and_original
def test_ranks_with_different_state(rank: Rank, kind: str) -> None:
    """State or parameters that one rank's optimizer lacks are an error on all ranks that names parameter and ranks."""
    model, optimizer = stepped(small(rank, kind))
    parameters = list(model.parameters())
    if rank.rank == 0:
        del optimizer.state[parameters[-1]]
    for form in (FULL, SHARDED):
        with pytest.raises(FullshardError, match=r"two\.bias \(nothing on rank 0; .* on rank 1"):
            save(model, optimizer, form)
    if rank.rank == 0:
        optimizer.state.clear()
    with pytest.raises(FullshardError, match=r"one\.weight"):
        save(model, optimizer, SHARDED)
    if kind == "flat":
        return
    extra = nn.Parameter(torch.ones(2))
    holder = nn.ModuleDict({"model": model})
    holder.register_parameter("extra", extra)
    for number in (3, 2, 0):  # without a bias, a unit, and anything
        optimizer = torch.optim.Adam([*parameters[: None if rank.rank == 0 else number], extra], lr=0.1)
        extra.grad = torch.ones(2)
        step(model, optimizer)
        with pytest.raises(FullshardError, match=r"model\.two\.bias \(.* on rank 0; nothing on rank 1\)"):
            FSDP.optim_state_dict(holder, optimizer)


@on_ranks(2)
def test_flat_parameters_with_different_steps(rank: Rank) -> None:
    """Parts of one flat parameter that have made different numbers of steps are an error that names them."""
    model = FSDP(Small(), device_mesh=rank.mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reference, unwrapped = stepped(Small())
    step(reference, unwrapped, first=False)
    state = {
        "state": held_by(reference, unwrapped),
        "param_groups": [{"lr": 0.1, "params": [name for name, _ in reference.named_parameters()]}],
    }
    found = r"one\.weight and two\.weight share a flat parameter.* step, 1\.0 and 2\.0"
    with pytest.raises(FullshardError, match=found):
        FSDP.optim_state_dict_to_load(model, optimizer, state)


@on_ranks(2)
@pytest.mark.parametrize("form", ["sharded", "first", "loading"])
def test_one_whole_tensor_at_a_time(rank: Rank, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the result hardly more than one whole tensor is alive, and on ranks that want none, none is made."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                made.append(weakref.ref(result))
            alive.append(sum(ref() is not None for ref in made))
            return result

        return run

    model, optimizer = stepped(small(rank, "flat"))
    full = FSDP.full_optim_state_dict(model, optimizer)
    monkeypatch.setattr(FlatShardedParameter, "_gather", watched(FlatShardedParameter._gather))
    monkeypatch.setattr(optimizer_conversion, "_broadcast", watched(optimizer_conversion._broadcast))
    if form == "sharded":
        FSDP.sharded_optim_state_dict(model, optimizer)
    elif form == "first":
        FSDP.full_optim_state_dict(model, optimizer)
    else:
        with FSDP.state_dict_type(model, *RANK0):
            FSDP.optim_state_dict_to_load(model, optimizer, full)
    monkeypatch.undo()
    tensors = 12 if form == "loading" else 8  # with the numbers of steps
    most = 3  # a back end lets go of a message a little later
    if rank.rank == 0 and form == "first":
        most = tensors if rank.device.type == "cpu" else 1  # else each goes to CPU memory at once
    elif rank.rank == 0 and form == "loading":
        most = tensors
    assert len(made) == tensors and max(alive) <= most, (len(made), alive)
