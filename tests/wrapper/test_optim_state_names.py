"""Names, groups and numbers in optimizer state of wrapped models; what does not fit, and ranks that differ."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import assert_states_close

from checkpoint.kinds import adam, build, train
from checkpoint.optimizers import held_by, joined
from compare import fqn_of
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.checkpoint.state.optimizer.state import optimizer_state
from fullshard.checkpoint.state.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from fullshard.engine.parameters.flat import FlatShardedParameter
from fullshard.errors import FullshardError, PhaseError
from fullshard.wrapper.state_dict import optimizer_conversion
from ranks import Rank, on_ranks

State = dict[str, Any]
NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
BOTH = pytest.mark.parametrize("kind", ["flat", "original"])
RANK0 = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)


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


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return joined(optimizer_state(model, optimizer)["state"])


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> State:
    """What the optimizer holds after loading."""
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    return own(model, optimizer)


# ---------------------------------------------------------------- parameters without state


@on_ranks(2)
@BOTH
def test_parameters_without_state(rank: Rank, kind: str) -> None:
    """A unit that was not run has no state, before loading and after it; the others keep theirs and their steps.

    An optimizer that has not stepped, or keeps nothing, is saved and loaded with its options. Parameters that are
    trained in turn have their own numbers of steps.
    """
    model = small(rank, kind)
    for optimizer in (torch.optim.Adam(model.parameters(), lr=0.5), torch.optim.SGD(model.parameters(), lr=0.5)):
        state = FSDP.optim_state_dict(model, optimizer)
        assert state["state"] == {} and state["param_groups"][0]["lr"] == 0.5
        other = type(optimizer)(model.parameters(), lr=1.0)
        assert loaded(model, other, state) == {} and other.param_groups[0]["lr"] == 0.5
        optimizer.step()
    model, optimizer = stepped(model, 3, first=False)
    state = FSDP.optim_state_dict(model, optimizer)
    assert_states_close(state["state"], held_by(*stepped(Small(), 3, first=False)))
    assert set(state["state"]) == {"two.weight", "two.bias"}
    assert set(state["param_groups"][0]["params"]) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    new = torch.optim.Adam(model.parameters())
    assert_states_close(loaded(model, new, state), state["state"], exact=True)
    step(model, new, 1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("one" in name)
    step(model, new, 1)
    steps = {fqn: float(values["step"]) for fqn, values in own(model, new).items()}
    assert steps == {"one.weight": 2.0, "one.bias": 2.0, "two.weight": 4.0, "two.bias": 4.0}


# ---------------------------------------------------------------- what is given


@on_ranks(2)
@BOTH
def test_given_state_dicts(rank: Rank, kind: str) -> None:
    """A state dict without ``param_groups`` stays one; what was changed in the optimizer's is what is saved."""
    model, optimizer = stepped(small(rank, kind), 2)
    given = copy.deepcopy(optimizer.state_dict())
    state = FSDP.optim_state_dict(model, optimizer, {"state": given["state"]})
    assert list(state) == ["state"]
    assert_states_close(state["state"], held_by(*stepped(Small(), 2)))
    to_load = FSDP.optim_state_dict_to_load(model, optimizer, state)
    assert list(to_load) == ["state"]
    assert list(to_load["state"]) == list(range(len(optimizer.param_groups[0]["params"])))
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        assert_states_close(to_load["state"][number], optimizer.state[parameter], exact=True)
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
    optimizer.state["phase"] = {"name": "warm-up", "seen": torch.arange(3)}  # type: ignore[index]
    optimizer.state["count"] = 5  # type: ignore[index]
    with pytest.warns(UserWarning, match="the key 'phase', which is not a parameter"):
        state = FSDP.optim_state_dict(model, optimizer)
    new = torch.optim.Adam(model.parameters())
    new.load_state_dict(FSDP.optim_state_dict_to_load(model, new, state))
    assert new.state["phase"]["name"] == "warm-up" and new.state["phase"]["seen"].tolist() == [0, 1, 2]  # type: ignore[index]
    assert new.state["count"] == 5  # type: ignore[index]


# ---------------------------------------------------------------- groups and order


@on_ranks(2)
def test_groups_are_matched_by_name(rank: Rank) -> None:
    """Options follow the parameters into groups of another order and split; where they cannot, the error says why.

    Ranks may have built their optimizers in different order.
    """
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
    assert_states_close(loaded(model, new, state), state["state"], exact=True)
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
    """Each half of the ranks has a model, a first rank and a result; ``group`` is found, or says who they are."""
    mesh = rank.make_mesh(2, 2, names=("halves", "half"))["half"]
    group = mesh.get_group() if passed else None
    model, optimizer = stepped(FSDP(Small(), use_orig_params=True, device_mesh=mesh), 1 + rank.rank // 2)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *RANK0):
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
        state = super().state_dict()
        groups = [{**group, "params": [self.names[n] for n in group["params"]]} for group in state["param_groups"]]
        return {"state": {self.names[n]: values for n, values in state["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state: State) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        groups = [{**group, "params": [numbers[n] for n in group["params"]]} for group in state["param_groups"]]
        super().load_state_dict(
            {"state": {numbers[name]: values for name, values in state["state"].items()}, "param_groups": groups}
        )


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
    """What a wrapped model saved, an unwrapped one loads by numbers; what that saved, a wrapped one loads by names.

    A flat parameter is several names, so its state cannot be rekeyed; the error says what to use.
    """
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


@on_ranks(2)
def test_local_form(rank: Rank) -> None:
    """The live state of flat parameters under their own names, for the same wrapping on the same ranks only."""
    model, optimizer = stepped(small(rank, "flat"), 2)
    configs = LocalStateDictConfig(), LocalOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, *configs):
        state = FSDP.optim_state_dict(model, optimizer)
        assert set(state["state"]) == {"one._flat_param", "two._flat_param"} == set(state["param_groups"][0]["params"])
        flat = next(model.one.parameters())
        assert state["state"]["one._flat_param"]["exp_avg"] is optimizer.state[flat]["exp_avg"]
        new = torch.optim.Adam(model.parameters())
        FSDP.optim_state_dict_to_load(model, new, copy.deepcopy(state), load_directly=True)
        assert_states_close(own(model, new), own(model, optimizer), exact=True)
        assert new.param_groups[0]["lr"] == 0.1
        wrong = copy.deepcopy(state)
        wrong["state"]["one._flat_param"]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"one\._flat_param: this rank's shard has shape"):
            FSDP.optim_state_dict_to_load(model, new, wrong)
        other = copy.deepcopy(state)
        other["param_groups"][0]["params"][0] = "three._flat_param"
        with pytest.raises(ValueError, match=r"unexpected: \['three\._flat_param'\], missing: \['one\._flat_param'\]"):
            FSDP.optim_state_dict_to_load(model, new, other)
    large = build(rank, "mixture")
    optimizer = adam(large)
    train(large, optimizer, 0, 2)
    with FSDP.state_dict_type(large, StateDictType.LOCAL_STATE_DICT, *configs):
        new = adam(large)
        state = copy.deepcopy(FSDP.optim_state_dict(large, optimizer))
        FSDP.optim_state_dict_to_load(large, new, state, load_directly=True)
    assert_states_close(own(large, new), own(large, optimizer), exact=True)


# ---------------------------------------------------------------- what does not fit


@on_ranks(2)
@BOTH
def test_what_does_not_fit(rank: Rank, kind: str) -> None:
    """Parameters that one side has alone, wrong shapes, numbers and other dictionaries are errors that name them.

    With ``rank0_only`` an error in what the first rank has is raised on all.
    """
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
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *RANK0):
        for one, message in ((by_number, "expected names of parameters as keys, found 0"), given[1]):
            with pytest.raises(ValueError, match=message):
                FSDP.optim_state_dict_to_load(model, optimizer, one if rank.rank == 0 else {})


@on_ranks(2)
def test_errors_of_one_rank(rank: Rank) -> None:
    """Where loading communicates, what does not fit on one rank is an error on all, not a hang."""
    model, optimizer = stepped(small(rank))
    parameters = list(model.parameters())
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
        fewer = torch.optim.Adam(parameters[: 4 if rank.rank == 0 else 3])
        with pytest.raises(ValueError, match="the checkpoint has state for two"):
            FSDP.optim_state_dict_to_load(model, fewer, state)
        stray = torch.optim.Adam([*parameters, nn.Parameter(torch.ones(2))] if rank.rank == 0 else parameters)
        with pytest.raises(ValueError, match="is not in the model"):
            FSDP.optim_state_dict_to_load(model, stray, state)


@on_ranks(2)
@BOTH
def test_ranks_with_different_state(rank: Rank, kind: str) -> None:
    """State that one rank lacks is an error on all ranks, for saving in either form; it names parameter and ranks.

    A rank whose optimizer was emptied is not given a first state in silence.
    """
    model, optimizer = stepped(small(rank, kind))
    if rank.rank == 0:
        del optimizer.state[list(model.parameters())[-1]]
    for type_ in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with (
            FSDP.state_dict_type(model, type_),
            pytest.raises(FullshardError, match=r"two\.bias \(nothing on rank 0; .* on rank 1"),
        ):
            FSDP.optim_state_dict(model, optimizer)
    if rank.rank == 0:
        optimizer.state.clear()
    with FSDP.state_dict_type(model, type_), pytest.raises(FullshardError, match=r"one\.weight"):
        FSDP.optim_state_dict(model, optimizer)


@on_ranks(2)
def test_ranks_with_different_parameters(rank: Rank) -> None:
    """The same if a rank's optimizer does not have a parameter at all, or none of the unit."""
    model = small(rank)
    named = {fqn_of(name): p for name, p in model.named_parameters()}
    extra = nn.Parameter(torch.ones(2))
    holder = nn.ModuleDict({"model": model})
    holder.register_parameter("extra", extra)
    for lacking in ("two.bias", "two", ""):
        names = [name for name in named if rank.rank == 0 or not name.startswith(lacking)]
        optimizer = torch.optim.Adam([named[name] for name in names] + [extra], lr=0.1)
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
    most = 0

    def watched(function: Any) -> Any:
        def gather(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            whole = function(*args, **kwargs)
            if isinstance(whole, torch.Tensor):
                made.append(weakref.ref(whole))
            most = max(most, sum(ref() is not None for ref in made))
            return whole

        return gather

    model, optimizer = stepped(small(rank, "flat"))
    full = FSDP.full_optim_state_dict(model, optimizer)
    monkeypatch.setattr(FlatShardedParameter, "_gather", watched(FlatShardedParameter._gather))
    monkeypatch.setattr(optimizer_conversion, "_broadcast", watched(optimizer_conversion._broadcast))
    if form == "sharded":
        FSDP.sharded_optim_state_dict(model, optimizer)
    elif form == "first":
        FSDP.full_optim_state_dict(model, optimizer)
    else:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *RANK0):
            FSDP.optim_state_dict_to_load(model, optimizer, full)
    monkeypatch.undo()
    tensors = 8 if form != "loading" else 12  # with the numbers of steps
    if form == "first":
        alive = tensors if rank.device.type == "cpu" else 1  # else each goes to CPU memory at once
        assert len(made) == tensors and most <= (alive if rank.rank == 0 else 3), (len(made), most)
    else:
        kept = tensors if form == "loading" and rank.rank == 0 else 3  # a back end lets go of a message a little later
        assert len(made) == tensors and most <= kept, (len(made), most)
