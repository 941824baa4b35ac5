"""The state of optimizers by FQN: what is saved is what an unsharded optimizer holds, and what is loaded is that."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint.kinds import KINDS, Model, build, train
from checkpoint.optimizers import (
    OPTIMIZERS,
    Custom,
    assert_states_close,
    fill,
    groups_of,
    held_by,
    in_one_group,
    joined,
    load,
    map_leaves,
    saved_by,
    target_for,
    trained,
)
from compare import assert_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.checkpoint.state.optimizer.initial import give_initial_state
from fullshard.checkpoint.state.optimizer.state import (
    compare_fingerprints,
    fingerprint,
    optimizer_state,
)
from fullshard.checkpoint.state.types import StateDictType
from fullshard.engine.parameters.sharded import value_of
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import FullshardError, PhaseError
from fullshard.optim import localize
from ranks import Rank, on_ranks

FLAT = ("flat", "no_shard")  # with visible flat parameters
# One optimizer on all kinds, one with all sorts of state on what differs most, and some that keep state elsewhere.
SOME = ("fully_shard", "flat", "original")
KINDS_AND_OPTIMIZERS = [(kind, "custom") for kind in SOME]
KINDS_AND_OPTIMIZERS += [(kind, "adam") for kind in ("ddp", "hybrid", "replicate", "no_shard", "mixture")]
KINDS_AND_OPTIMIZERS += [("fully_shard", "asgd"), ("flat", "adamw_fused"), ("original", "plain_sgd")]


def stepped(model: nn.Module, name: str, steps: int = 3, *, order: int = 1) -> torch.optim.Optimizer:
    """An optimizer of that name, of two groups, after some steps."""
    optimizer = OPTIMIZERS[name](groups_of(model, order=order))
    train(model, optimizer, 0, steps)
    return optimizer


def of_reference(name: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """The unsharded model, its optimizer after some steps, and what a checkpoint of both has."""
    model = Model()
    optimizer = stepped(model, name, steps)
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": names}
        for group, names in zip(optimizer.param_groups, names_in_groups(model, optimizer), strict=True)
    ]
    return model, optimizer, {"state": held_by(model, optimizer), "param_groups": groups}


def names_in_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


# ---------------------------------------------------------------- saving


@on_ranks(2)
@pytest.mark.parametrize(("kind", "name"), KINDS_AND_OPTIMIZERS)
def test_state_is_that_of_an_unsharded_optimizer(rank: Rank, kind: str, name: str) -> None:
    """What is saved has the names, whole tensors, shared tensors and values of the plain model's optimizer.

    What that optimizer saved is loaded into a new one with other groups in another order: the same state bit by bit,
    and the same next steps.
    """
    reference, plain, saved = of_reference(name)
    model = build(rank, kind)
    tree = optimizer_state(model, stepped(model, name))
    assert_states_close(joined(tree["state"]), saved["state"])
    for found, wanted in zip(tree["param_groups"], saved["param_groups"], strict=kind not in FLAT):
        if kind not in FLAT:  # flat parameters mix what the groups would tell apart
            assert sorted(found["params"]) == sorted(wanted["params"])
            assert found["mark"] == wanted["mark"]
    model = KINDS[kind](rank, copy.deepcopy(reference))
    saved = in_one_group(saved) if kind in FLAT else copy.deepcopy(saved)
    new = OPTIMIZERS[name](groups_of(model, order=-1))
    if name == "asgd":  # alone in making steps on the device: they are loaded to where torch has those of others
        for state in saved["state"].values():
            state["step"] = state["step"].cpu()
    load(model, new, saved)
    assert_states_close(joined(optimizer_state(model, new)["state"]), saved["state"], exact=True)
    for group in new.param_groups:
        assert group["mark"] in (("all",) if kind in FLAT else ("big", "small"))
    losses = [train(m, o, 3, 5) for m, o in ((model, new), (reference, plain))]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)
    assert_states_close(joined(optimizer_state(model, new)["state"]), held_by(reference, plain))


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hybrid", "flat"])
def test_state_on_four_ranks(rank: Rank, kind: str) -> None:
    """Ranks whose part of a parameter is empty, and replicas, hold the same state as the others, and load it."""
    model = build(rank, kind)
    optimizer = stepped(model, "adam")
    compare_fingerprints(fingerprint(optimizer_state(model, optimizer)["state"]))
    saved = in_one_group(of_reference("adam")[2])
    assert_states_close(joined(optimizer_state(model, optimizer)["state"]), saved["state"])
    model = build(rank, kind)
    new = torch.optim.Adam(trained(model), lr=0.5)
    load(model, new, saved)
    assert new.param_groups[0]["lr"] == 0.01
    assert_states_close(joined(optimizer_state(model, new)["state"]), saved["state"], exact=True)


def test_a_lone_scalar_parameter() -> None:
    """Where no other parameter tells, the name of the counter does."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam(model.parameters())
    model.scale.square().backward()
    optimizer.step()
    state = optimizer_state(model, optimizer)["state"]["scale"]
    assert isinstance(state["exp_avg"], TensorShards) and isinstance(state["exp_avg_sq"], TensorShards)
    assert type(state["step"]) is torch.Tensor


def test_tables_of_the_size_of_a_parameter_are_shared() -> None:
    """A table that all parameters have is not cut where it happens to have a parameter's shape."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = Custom(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer_state(model, optimizer)["state"]
    assert state["0.bias"]["table"].shape == model[0].bias.shape
    assert type(state["0.bias"]["table"]) is torch.Tensor
    target = target_for(model, optimizer, saved_plain(model, optimizer))
    assert type(target.tree["state"]["0.bias"]["table"]) is torch.Tensor


def saved_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint has, without ranks."""
    names = names_in_groups(model, optimizer)
    groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]
    return {"state": copy.deepcopy(held_by(model, optimizer)), "param_groups": groups}


def test_groups_list_all_parameters() -> None:
    """Parameters without state, frozen ones among them, are in the groups only; nothing is added to the optimizer.

    A learning rate that is a tensor is one in what is saved; names that torch keeps of parameters are left out.
    """
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=torch.tensor(0.25), foreach=False)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for state in ([], ["0.bias", "1.weight"]):
        if state:
            model(torch.ones(1, 3)).sum().backward()
            model[1].bias.grad = None
            optimizer.step()
        tree = optimizer_state(model, optimizer)
        (group,) = tree["param_groups"]
        assert list(tree["state"]) == state and len(optimizer.state) == len(state)
        assert group["params"] == names and "param_names" not in group
        assert group["lr"] is optimizer.param_groups[0]["lr"]


def test_foreign_parameters() -> None:
    """An optimizer of another model's parameters is an error that says which."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(3))]}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 of the optimizer \(shape \(3,\)"):
        optimizer_state(model, optimizer)


@on_ranks(2)
def test_in_the_middle_of_a_step(rank: Rank) -> None:
    """Inside summon_full_params state is not to be had."""
    model = build(rank, "flat")
    optimizer = stepped(model, "adam")
    with FSDP.summon_full_params(model), pytest.raises(PhaseError):
        optimizer_state(model, optimizer)


def test_entries_of_the_user() -> None:
    """What users put into the state under a name is kept, mapping or not."""
    model = nn.Linear(2, 2)
    optimizer = stepped_linear(model)
    optimizer.state["phase"] = "warm-up"  # type: ignore[index]
    optimizer.state["totals"] = {"sum": torch.tensor([1.0, 2.0]), "n": 3}  # type: ignore[index]
    tree = optimizer_state(model, optimizer)
    assert tree["state"]["phase"] == {"": "warm-up"} and tree["state"]["totals"]["n"] == 3
    saved = {"state": copy.deepcopy(tree["state"]), "param_groups": tree["param_groups"]}
    for fqn in ("weight", "bias"):
        saved["state"][fqn] = copy.deepcopy(held_by(model, optimizer)[fqn])
    other = nn.Linear(2, 2)
    fresh = torch.optim.Adam(other.parameters())
    load(other, fresh, saved)
    assert fresh.state["phase"] == "warm-up"  # type: ignore[index]
    assert_equal(fresh.state["totals"], {"sum": torch.tensor([1.0, 2.0]), "n": 3}, "totals")  # type: ignore[index]


def stepped_linear(model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


@on_ranks(4)
@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_tensor_parallel_parameters(rank: Rank, kind: str) -> None:
    """Parameters that are DTensors already are cut once more; their state is whole again, and goes back."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    reference = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    for index, parameter in enumerate(reference.parameters()):
        parameter.data = torch.linspace(-1, 1 + index, parameter.numel()).view_as(parameter)
    model = parallelize_module(copy.deepcopy(reference), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind == "fully_shard":
        fully_shard(model, mesh=mesh["dp"])
    else:
        model = FSDP(model, device_mesh=mesh["dp"])
    optimizers = [torch.optim.Adam(m.parameters(), foreach=False) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        m(torch.linspace(0, 1, 12).view(2, 6)).square().mean().backward()
        optimizer.step()
    expected = held_by(reference, optimizers[1])
    saved = saved_by(model, optimizers[0])
    assert_states_close(saved["state"], expected)
    new = torch.optim.Adam(model.parameters(), foreach=False)
    load(model, new, saved)
    assert_states_close(joined(optimizer_state(model, new)["state"]), saved["state"], exact=True)
    in_host_memory = map_leaves(saved["state"], torch.Tensor.cpu)  # as torch's configurations have it
    for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, form):
            state = FSDP.optim_state_dict(model, new)
            again = torch.optim.Adam(model.parameters(), foreach=False)
            again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
        whole = map_leaves(state["state"], lambda value: value.full_tensor() if isinstance(value, DTensor) else value)
        assert_states_close(whole, in_host_memory, exact=True)
        assert_states_close(joined(optimizer_state(model, again)["state"]), saved["state"], exact=True)
    first = FSDP.full_optim_state_dict(model, new)
    assert (first == {}) == (rank.rank > 0)
    assert_states_close(first.get("state", in_host_memory), in_host_memory, exact=True)


# ---------------------------------------------------------------- ranks that differ


class SkipsEmpty(torch.optim.SGD):
    """As some hand-written optimizers: no state where this rank has nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in list(self.state):
            if not getattr(parameter, "_local_tensor", parameter).numel():
                del self.state[parameter]


@on_ranks(2)
def test_state_on_some_ranks_only(rank: Rank) -> None:
    """An optimizer that skips empty parts is reported on all ranks, with parameter and rank."""
    model = build(rank, "fully_shard")
    optimizer = SkipsEmpty(trained(model), lr=0.1, momentum=0.9)
    train(model, optimizer, 0, 1)
    state = optimizer_state(model, optimizer)["state"]
    with pytest.raises(
        FullshardError, match=r"one \((nothing on rank 0; |momentum_buffer.* on rank 0; nothing on rank 1)"
    ):
        compare_fingerprints(fingerprint(state))


@on_ranks(2)
def test_shared_tensors_that_differ(rank: Rank) -> None:
    """A tensor that every rank has all of must be the same on all, as a number of steps."""
    model = build(rank, "fully_shard")
    optimizer = stepped(model, "adam", 1)
    optimizer.state[model.low]["step"] += rank.rank
    with pytest.raises(
        FullshardError, match=r"low \(.*step \(\) float32 = 1\.0 on rank 0; .*step \(\) float32 = 2\.0 on rank 1"
    ):
        compare_fingerprints(fingerprint(optimizer_state(model, optimizer)["state"]))


def test_fingerprints() -> None:
    """A name, shape, dtype, shared value or parameter that differs is seen."""
    state = {"a": {"m": TensorShards.whole(torch.ones(2, 3)), "step": torch.tensor(3.0), "x": None}}
    one = fingerprint(state)
    for changed in (
        {"a": {**state["a"], "m": TensorShards.whole(torch.ones(3, 2))}},
        {"a": {**state["a"], "m": TensorShards.whole(torch.ones(2, 3).half())}},
        {"a": {**state["a"], "step": torch.tensor(4.0)}},
        {"a": {"m": state["a"]["m"], "step": state["a"]["step"]}},
        {},
        {**state, "b": {"step": torch.tensor(3.0)}},
    ):
        assert fingerprint(changed) != one


# ---------------------------------------------------------------- loading


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
def test_existing_memory_is_used(rank: Rank, kind: str) -> None:
    """An optimizer that has stepped gets its own tensors filled; one of another dtype gets new ones."""
    model = build(rank, kind)
    optimizer = stepped(model, "adam", 2)
    before = {id(p): state["exp_avg"] for p, state in optimizer.state.items()}
    saved = in_one_group(of_reference("adam")[2])
    target = target_for(model, optimizer, saved)
    assert target.problems == []
    fill(target, saved)
    assert {float(state["step"]) for state in optimizer.state.values()} <= {2.0, 3.0}
    target.install()
    assert all(state["exp_avg"] is before[id(p)] for p, state in optimizer.state.items())
    assert_states_close(joined(optimizer_state(model, optimizer)["state"]), saved["state"], exact=True)


def test_nothing_changes_before_install() -> None:
    """Planning, and even filling new memory, leaves a fresh optimizer as it was; no step is run."""
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    saved = saved_plain(model, stepped_linear(model, 5))
    other = nn.Linear(2, 2)
    other.load_state_dict(before)
    optimizer = torch.optim.Adam(other.parameters(), lr=7.0)
    target = target_for(other, optimizer, saved)
    fill(target, saved)
    assert len(optimizer.state) == 0 and optimizer.param_groups[0]["lr"] == 7.0
    target.install()
    assert_equal(dict(other.state_dict()), dict(before), "model")
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_was_not_saved_goes() -> None:
    """State of a parameter that had none when it was saved is removed: the optimizer is what it was then."""
    model = nn.Linear(2, 2)
    optimizer = stepped_linear(model)
    saved = saved_plain(model, optimizer)
    del saved["state"]["bias"]
    load(model, optimizer, saved)
    assert list(optimizer.state) == [model.weight]


@on_ranks(2)
def test_flat_parameters_with_gaps(rank: Rank) -> None:
    """Parts of a flat parameter that had no state get zeros, as they would have had, also in memory that is reused."""
    saved = in_one_group(of_reference("adam")[2])
    del saved["state"]["blocks.0.0.bias"]
    for steps in (0, 2):
        model = build(rank, "flat")
        optimizer = stepped(model, "adam", steps)
        load(model, optimizer, saved)
        found = joined(optimizer_state(model, optimizer)["state"])
        assert not found["blocks.0.0.bias"]["exp_avg"].any()
        assert_equal(found.pop("blocks.0.0.bias")["step"], torch.tensor(3.0, device="cpu"), "step")
        assert_states_close(found, saved["state"], exact=True)


@on_ranks(2)
def test_flat_parameters_with_different_steps(rank: Rank) -> None:
    """A flat parameter has one number of steps: several saved ones are an error before anything changes."""
    saved = in_one_group(of_reference("adam")[2])
    saved["state"]["blocks.1.0.bias"]["step"] += 2
    model = build(rank, "flat")
    optimizer = stepped(model, "adam", 1)
    target = target_for(model, optimizer, saved)
    assert target.problems == []
    assert target.shared["blocks.1.0.bias"].keys() == {"step"}
    for fqn, values in target.shared.items():
        values["step"].copy_(saved["state"][fqn]["step"])
    (conflict,) = target.conflicts()
    assert "blocks.1.0.weight and blocks.1.0.bias share a flat parameter" in conflict and "3.0 and 5.0" in conflict
    before = copy.deepcopy(joined(optimizer_state(model, optimizer)["state"]))
    with pytest.raises(FullshardError, match=r"cannot load the optimizer: blocks\.1\.0\.weight and"):
        target.install()
    assert_states_close(joined(optimizer_state(model, optimizer)["state"]), before, exact=True)
    original = build(rank, "original")
    new = OPTIMIZERS["adam"](groups_of(original))
    load(original, new, saved)
    assert_states_close(joined(optimizer_state(original, new)["state"]), saved["state"], exact=True)


@on_ranks(2)
def test_flat_parameters_in_different_forms(rank: Rank) -> None:
    """Parts whose state was saved in different dtypes cannot be one; nor different values, which are known at once."""
    saved = in_one_group(of_reference("adam")[2])
    saved["state"]["blocks.1.0.bias"]["exp_avg"] = saved["state"]["blocks.1.0.bias"]["exp_avg"].double()
    model = build(rank, "flat")
    target = target_for(model, OPTIMIZERS["adam"](groups_of(model)), saved)
    assert len(target.problems) == 1 and "exp_avg of blocks.1.0.weight, blocks.1.0.bias" in target.problems[0]
    saved = in_one_group(of_reference("custom")[2])
    saved["state"]["blocks.1.0.bias"]["count"] += 2
    (conflict,) = target_for(model, OPTIMIZERS["custom"](groups_of(model)), saved).conflicts()
    assert "different count, 3 and 5" in conflict


def test_tied_names() -> None:
    """A tied parameter is found under whichever of its names it was saved."""
    for name in ("embed.weight", "head.weight"):
        saved = copy.deepcopy(of_reference("adam")[2])
        saved["state"][name] = saved["state"].pop("embed.weight")
        for group in saved["param_groups"]:
            group["params"] = [name if fqn == "embed.weight" else fqn for fqn in group["params"]]
        model = Model()
        optimizer = OPTIMIZERS["adam"](groups_of(model))
        load(model, optimizer, saved)
        assert_equal(optimizer.state[model.head.weight]["exp_avg"], saved["state"][name]["exp_avg"], name)


class Factored(torch.optim.Optimizer):
    """Scales by means over rows and columns; of DTensors, these are DTensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            squared, state = parameter.grad.square() + 0.1, self.state[parameter]
            means = {"row": squared.mean(-1, keepdim=True), "column": squared.mean(0, keepdim=True)}
            for name, mean in means.items():
                state[name] = 0.5 * (state[name] + mean) if name in state else mean
                state[name] = state[name].redistribute(placements=[Replicate()])
                parameter.sub_(0.1 * parameter.grad / state[name].sqrt())


@on_ranks(2)
def test_state_of_other_shapes_made_of_dtensors(rank: Rank) -> None:
    """State of other shapes that is made of DTensors is made of DTensors again, so that the optimizer can go on."""
    model = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Linear(7, 4, bias=False))
    for index, parameter in enumerate(model.parameters()):
        parameter.data = torch.linspace(-1, 1 + index, parameter.numel()).view_as(parameter)
    models = [fully_shard(copy.deepcopy(model), mesh=rank.mesh) for _ in range(2)]
    optimizers = [Factored(m.parameters()) for m in models]

    def step(which: int, scale: float) -> None:
        models[which](torch.full((2, 6), scale)).square().mean().backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    step(0, 1.0)
    saved = saved_by(models[0], optimizers[0])
    assert saved["state"]["0.weight"]["row"].shape == (7, 1)
    step(1, 1.0)  # the same parameters; the state is loaded into an optimizer that has none
    optimizers[1] = Factored(models[1].parameters())
    load(models[1], optimizers[1], saved)
    assert_states_close(joined(optimizer_state(models[1], optimizers[1])["state"]), saved["state"], exact=True)
    for which in range(2):
        step(which, 0.5)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_equal(one.full_tensor().detach(), other.full_tensor().detach(), "after another step")


# ---------------------------------------------------------------- before the first step


@on_ranks(2)
@pytest.mark.parametrize("name", ["nadam", "asgd", "adagrad", "adamw_fused"])
def test_local_steps_begin_with_the_same_state(rank: Rank, name: str) -> None:
    """What their first step begins with, not what it leaves: products and averages too."""
    expected = OPTIMIZERS[name](nn.Linear(3, 2).parameters())
    give_initial_state(expected)
    for shard in (fully_shard, partial(FSDP, use_orig_params=True)):
        optimizers = [OPTIMIZERS[name](shard(nn.Linear(3, 2)).parameters()) for _ in range(2)]
        localize(optimizers[0], enable=False)
        dtensors, local = (list(made(optimizer).values()) for optimizer in optimizers)
        assert_states_close(local, dtensors, exact=True)
        scalars = [{key: v for key, v in state.items() if not v.dim()} for state in made(expected).values()]
        assert_states_close([{key: state[key] for key in scalars[0]} for state in local], scalars, exact=True)


def made(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The initial state of an optimizer, with local tensors."""
    give_initial_state(optimizer)
    return {parameter: map_leaves(own, value_of) for parameter, own in optimizer.state.items()}


class Delegating(torch.optim.AdamW):
    """Its step calls torch's, around which torch runs hooks too."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("elementwise", [False, True], ids=["dtensors", "local"])
def test_hooks_are_for_real_steps(rank: Rank, elementwise: bool) -> None:
    """They do not run, and are there afterwards; state is that before the first step."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch adds the hooks when the class is used first
    model, calls = fully_shard(nn.Linear(3, 2)), []
    optimizer = Delegating(model.parameters())
    if elementwise:
        localize(optimizer, elementwise=True)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    give_initial_state(optimizer)
    assert not calls and all(state["step"] == 0 for state in optimizer.state.values())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert calls[:1] == ["pre"] and calls[-1:] == ["post"]
    assert all(state["step"] == 1 for state in optimizer.state.values())


class OfPlainTensors(torch.optim.SGD):
    """Fails with DTensors, as kernels of one's own do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            raise RuntimeError("no kernel for it")


@on_ranks(2)
def test_optimizers_that_cannot_step_dtensors(rank: Rank) -> None:
    """Nobody can tell what their state begins with, which is an error."""
    model = fully_shard(nn.Linear(3, 2))
    before = [p.full_tensor() for p in model.parameters()]
    optimizer = localize(OfPlainTensors(model.parameters()), elementwise=True)
    with pytest.raises(FullshardError, match=r"OfPlainTensors.*no kernel for it.*run a step first"):
        give_initial_state(optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["params"] == list(model.parameters())
    assert_equal([p.full_tensor() for p in model.parameters()], before, "parameters")


# ---------------------------------------------------------------- what does not fit


def linear_and_saved() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Linear(2, 2)
    saved = saved_plain(model, stepped_linear(model))
    return model, torch.optim.Adam(model.parameters()), saved


def test_parameters_of_one_side() -> None:
    """A parameter that the saved optimizer did not have is a problem; without ``strict`` its state stays.

    State of a parameter that this optimizer does not have is a problem; without state it is none. Whether frozen
    parameters were given to an optimizer says nothing.
    """
    model, optimizer, saved = linear_and_saved()
    saved["param_groups"][0]["params"].append("other")
    assert target_for(model, optimizer, saved).problems == []
    saved["state"]["other"] = copy.deepcopy(saved["state"]["bias"])
    unexpected = "the checkpoint has state for other, which this optimizer does not have"
    assert target_for(model, optimizer, saved).problems == [unexpected]
    target = target_for(model, optimizer, saved, strict=False)
    assert target.problems == [] and "other" not in target.tree["state"]
    del saved["state"]["other"], saved["state"]["bias"]
    saved["param_groups"][0]["params"] = ["weight"]
    assert target_for(model, optimizer, saved).problems == ["the saved optimizer has no parameters bias"]
    old = torch.full((2,), 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.bias] = {"momentum_buffer": old}
    load(model, optimizer, saved, strict=False)
    assert optimizer.state[model.bias] == {"momentum_buffer": old}
    assert_states_close(optimizer.state[model.weight], saved["state"]["weight"], exact=True)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    load(model, optimizer, saved)
    assert list(optimizer.state) == [model.weight]


def test_wrong_shape() -> None:
    """A state of another shape than its parameter is a problem that names both."""
    saved = copy.deepcopy(of_reference("adam")[2])
    saved["state"]["low"]["exp_avg"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    model = Model()
    for optimizer in (OPTIMIZERS["adam"](groups_of(model)), stepped(model, "adam", 1)):
        (problem,) = target_for(model, optimizer, saved).problems
        assert "low: exp_avg was saved with shape (5, 3)" in problem and "(3, 5)" in problem


def test_state_with_fewer_elements() -> None:
    """An entry that is a mean over dims, where others of its name follow their parameters, is shared and kept."""
    model = nn.Linear(3, 2)
    model.more = nn.Parameter(torch.ones(4))
    saved: dict[str, Any] = {
        "state": {
            "weight": {"scale": torch.ones(2, 1)},
            "bias": {"scale": torch.ones(2)},
            "more": {"scale": torch.ones(4)},
        },
        "param_groups": [{"params": ["weight", "bias", "more"]}],
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    load(model, optimizer, saved)
    assert_states_close(held_by(model, optimizer), saved["state"], exact=True)


def test_groups_that_were_others() -> None:
    """Groups may be joined where options are equal, and split; where they differ, the error names the parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved_optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.25}], momentum=0.9
    )
    saved = saved_plain(model, saved_optimizer)
    one = torch.optim.SGD(model.parameters(), lr=1.0)
    (problem,) = target_for(model, one, saved).problems
    assert "(lr): 0.weight, 0.bias and 1.weight, 1.bias" in problem
    saved["param_groups"][1]["lr"] = 0.5
    load(model, one, saved)
    assert one.param_groups[0]["lr"] == 0.5 and one.param_groups[0]["momentum"] == 0.9
    saved["param_groups"][1]["lr"] = 0.125
    split = torch.optim.SGD([{"params": [p]} for p in reversed(list(model.parameters()))], lr=1.0)
    load(model, split, saved)
    assert [group["lr"] for group in split.param_groups] == [0.125, 0.125, 0.5, 0.5]


def test_groups_without_parameters() -> None:
    """Empty groups stay what they are, or get the options of the saved empty one of their number."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [], "lr": 3.0}], lr=1.0)
    saved = saved_plain(model, optimizer)
    optimizer.param_groups[1]["lr"] = 4.0
    load(model, optimizer, saved)
    assert optimizer.param_groups[1]["lr"] == 3.0
    load(model, optimizer, {**saved, "param_groups": saved["param_groups"][:1]})
    assert optimizer.param_groups[1]["lr"] == 3.0


def test_options_that_are_tensors() -> None:
    """A learning rate that is a tensor stays that tensor; numbers and tensors may replace each other."""
    model = nn.Linear(2, 2)
    number = torch.optim.Adam(model.parameters(), lr=0.5, foreach=False)
    tensor = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    own = tensor.param_groups[0]["lr"]
    load(model, tensor, saved_plain(model, number))
    assert tensor.param_groups[0]["lr"] is own and own.item() == 0.5
    own.fill_(0.125)
    load(model, number, saved_plain(model, tensor))
    assert isinstance(number.param_groups[0]["lr"], torch.Tensor) and number.param_groups[0]["lr"].item() == 0.125
    assert number.param_groups[0]["lr"] is not own


def test_values_become_what_torch_makes_of_them() -> None:
    """torch's own optimizers get state in their parameters' dtype, plain numbers of steps as tensors, and run hooks.

    Other optimizers get the state as it was saved.
    """
    model, _, saved = linear_and_saved()
    model.to(torch.bfloat16)
    heard: list[torch.optim.Optimizer] = []
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_load_state_dict_post_hook(heard.append)
    load(model, optimizer, {**saved, "state": {**saved["state"], "weight": {**saved["state"]["weight"], "step": 9}}})
    state = optimizer.state[model.weight]
    assert state["exp_avg"].dtype is torch.bfloat16 and heard == [optimizer]
    assert_equal(state["step"], torch.tensor(9.0), "step")

    class Own(torch.optim.Adam):
        """Keeps its state in fp32."""

    own = Own(model.parameters())
    load(model, own, saved)
    assert_states_close(held_by(model, own), saved["state"], exact=True)


def test_comparison_fails_on_wrong_values() -> None:
    """The helpers of this file notice what differs."""
    model = nn.Linear(2, 2)
    state = held_by(model, stepped_linear(model))
    assert_states_close(copy.deepcopy(state), state, exact=True)
    weight, bias = state["weight"], state["bias"]
    for other in (
        {**state, "weight": {**weight, "exp_avg": weight["exp_avg"] * 1.01}},
        {**state, "bias": {**bias, "step": bias["step"] + 1}},
        {**state, "bias": {"step": bias["step"]}},
        {**state, "bias": {**bias, "exp_avg": bias["exp_avg"].double()}},
    ):
        with pytest.raises(AssertionError):
            assert_states_close(other, state)
