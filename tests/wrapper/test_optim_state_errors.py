"""Optimizer state of wrapped models that does not fit, and ranks that differ: errors on all ranks, no hang."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from two_layers import BOTH, Small, plain, small, step

from checkpoint.optimizers import held_by
from compare import fqn_of
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.checkpoint.state.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from fullshard.errors import FullshardError
from fullshard.wrapper.state_dict import gather as gathering
from fullshard.wrapper.state_dict import optimizer_conversion
from ranks import Rank, on_ranks


@on_ranks(2)
@BOTH
def test_what_does_not_fit(rank: Rank, kind: str) -> None:
    """Parameters that one side has alone, wrong shapes, numbers and other dictionaries are errors that name them."""
    model = small(rank, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = FSDP.optim_state_dict(model, optimizer)
    less, more, wrong = (copy.deepcopy(state) for _ in range(3))
    less["param_groups"][0]["params"].remove("two.bias")
    del less["state"]["two.bias"]
    more["param_groups"][0]["params"].append("three")
    more["state"]["three"] = copy.deepcopy(more["state"]["two.bias"])
    wrong["state"]["two.weight"]["exp_avg"] = torch.zeros(4, 3)
    given = [
        (less, r"the saved optimizer has no parameters two\.bias"),
        (more, "the checkpoint has state for three, which this optimizer does not have"),
        (wrong, r"two.weight: exp_avg was saved with shape \(4, 3\).*\(5, 3\)"),
        (optimizer.state_dict(), "rekey_optim_state_dict"),
        ({"one": 1}, r"found the keys \['one'\]"),
    ]
    for one, message in given:
        with pytest.raises(ValueError, match=message):
            FSDP.optim_state_dict_to_load(model, optimizer, one)


@on_ranks(2)
def test_errors_of_the_first_rank(rank: Rank) -> None:
    """With ``rank0_only`` an error in what the first rank has is raised on all."""
    model = small(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    by_number = optimizer.state_dict()
    settings = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
        with pytest.raises(ValueError, match="expected names of parameters as keys, found 0"):
            FSDP.optim_state_dict_to_load(model, optimizer, by_number if rank.rank == 0 else {})
        state = FSDP.optim_state_dict(model, optimizer)
        if rank.rank == 0:
            state["param_groups"][0]["params"].append("three")
            state["state"]["three"] = state["state"]["two.bias"]
        with pytest.raises(ValueError, match="the checkpoint has state for three"):
            FSDP.optim_state_dict_to_load(model, optimizer, state)


@on_ranks(2)
def test_errors_of_one_rank(rank: Rank) -> None:
    """Where loading communicates, what does not fit on one rank is an error on all, not a hang."""
    model = small(rank)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    step(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
        own = torch.optim.Adam(parameters[: 4 if rank.rank == 0 else 3])
        with pytest.raises(ValueError, match="the checkpoint has state for two"):
            FSDP.optim_state_dict_to_load(model, own, state)
        stray = torch.optim.Adam([*parameters, nn.Parameter(torch.ones(2))] if rank.rank == 0 else parameters)
        with pytest.raises(ValueError, match="is not in the model"):
            FSDP.optim_state_dict_to_load(model, stray, state)


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

    model = small(rank, "flat")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    config = FullOptimStateDictConfig(rank0_only=True)
    full = FSDP.full_optim_state_dict(model, optimizer)
    monkeypatch.setattr(gathering, "_gather", watched(gathering._gather))
    monkeypatch.setattr(optimizer_conversion, "_broadcast", watched(optimizer_conversion._broadcast))
    if form == "sharded":
        FSDP.sharded_optim_state_dict(model, optimizer)
    elif form == "first":
        FSDP.full_optim_state_dict(model, optimizer)
    else:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config):
            FSDP.optim_state_dict_to_load(model, optimizer, full)
    monkeypatch.undo()
    tensors = 8 if form != "loading" else 12  # with the numbers of steps
    if form == "first":
        alive = tensors if rank.device.type == "cpu" else 1  # else each goes to CPU memory at once
        assert (len(made), most) == ((tensors, alive) if rank.rank == 0 else (0, 0))
    else:
        kept = tensors if form == "loading" and rank.rank == 0 else 3  # a back end lets go of a message a little later
        assert len(made) == tensors and most <= kept, (len(made), most)


@on_ranks(2)
@BOTH
def test_ranks_with_different_state(rank: Rank, kind: str) -> None:
    """State that one rank lacks is an error on all ranks, for saving in either form; it names parameter and ranks.

    A rank whose optimizer was emptied is not given a first state in silence.
    """
    model = small(rank, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
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
    reference, unwrapped = plain(1)
    step(reference, unwrapped, first=False)
    state = {
        "state": held_by(reference, unwrapped),
        "param_groups": [{"lr": 0.1, "params": [name for name, _ in reference.named_parameters()]}],
    }
    with pytest.raises(
        FullshardError, match=r"one\.weight and two\.weight share a flat parameter.* step, 1\.0 and 2\.0"
    ):
        FSDP.optim_state_dict_to_load(model, optimizer, state)
