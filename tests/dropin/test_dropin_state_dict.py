"""torch.distributed.checkpoint and its state dict functions on models that fullshard shards through torch's names.

What the functions do with each kind of model is tested in tests/wrapper/test_torch_state_dict.py. Here: all options
while names of torch's FSDP are fullshard's, files of one kind of model read by all others, and torch's own models
before and after.
"""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from running import run_example
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fullshard
from compare import assert_close
from fullshard import dropin
from ranks import Rank, RankPool, on_ranks

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["flat", "orig", "rows", "ddp", "plain"]
SHARDED = KINDS[:3]
sharded_kinds = pytest.mark.parametrize("kind", SHARDED)
WHOLE = StateDictOptions(full_state_dict=True)
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
BATCH = 4  # samples of all ranks together, in every world


class Net(nn.Module):
    """Sizes that neither 2 nor 4 ranks divide, a frozen parameter, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 9)) for _ in range(2))
        self.last = nn.Linear(9, 1)
        self.blocks[0][0].bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def torchs() -> Any:
    """torch.distributed.fsdp, whose names are fullshard's while that stands in."""
    return importlib.import_module("torch.distributed.fsdp")


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def made(rank: Rank, kind: str, seed: int = 0) -> nn.Module:
    """The model in one of the forms, by torch's names."""
    fsdp, model = torchs(), net(seed)
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "rows":
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=rank.mesh)
        return fsdp.fully_shard(model, mesh=rank.mesh)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp.FullyShardedDataParallel(block, use_orig_params=kind == "orig")
    return fsdp.FullyShardedDataParallel(model, use_orig_params=kind == "orig")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int, rank: Rank | None = None) -> None:
    """Steps on a batch of which every rank takes its part; without ``rank``, all of it."""
    for step in steps:
        x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))
        own = x if rank is None else x.chunk(rank.world_size)[rank.rank]
        model(own).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(rank: Rank, kind: str, *steps: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made(rank, kind, seed)
    optimizer = adam(model)
    train(model, optimizer, *steps, rank=None if kind == "plain" else rank)
    return model, optimizer


def reference(*steps: int) -> tuple[Net, torch.optim.Optimizer]:
    """Without sharding and without other ranks."""
    model = net()
    optimizer = adam(model)
    train(model, optimizer, *steps)
    return model, optimizer


def whole(state: Any) -> Any:
    """The same with full tensors."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def assert_model(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in whole(actual).items():
        assert_close(value, expected[name], name, **CLOSE)


def assert_optimizer(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["state"].keys() == expected["state"].keys()
    for fqn, state in expected["state"].items():
        assert_model(actual["state"][fqn], state)
    hyper = [{key: value for key, value in group.items() if key != "params"} for group in expected["param_groups"]]
    found = [{key: value for key, value in group.items() if key != "params"} for group in actual["param_groups"]]
    assert [{**group, "betas": tuple(group["betas"])} for group in found] == hyper
    names = [sorted(group["params"]) for group in actual["param_groups"]]
    assert names == [sorted(group["params"]) for group in expected["param_groups"]]


# ---------------------------------------------------------------- out


@on_ranks(2)
@sharded_kinds
def test_options_out(rank: Rank, kind: str) -> None:
    """Each option of StateDictOptions has the effect that it has on the unsharded model."""
    plain, plain_optimizer = reference(0, 1)
    with dropin.install(quiet=True):
        model, optimizer = trained(rank, kind, 0, 1)
        sharded, state = get_state_dict(model, optimizer)
        assert all(isinstance(value, DTensor) for name, value in sharded.items() if name != "seen")
        assert_model(sharded, get_model_state_dict(plain))
        assert_optimizer(state, get_optimizer_state_dict(plain, plain_optimizer))
        full, state = get_state_dict(model, optimizer, options=WHOLE)
        assert not any(isinstance(value, DTensor) for value in full.values())
        assert_model(full, get_model_state_dict(plain))
        assert_optimizer(state, get_optimizer_state_dict(plain, plain_optimizer))
        rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full, state = get_state_dict(model, optimizer, options=rank0)
        if rank.rank:
            assert not full and not state.get("state")
        else:
            assert_model(full, get_model_state_dict(plain))
            assert_optimizer(state, get_optimizer_state_dict(plain, plain_optimizer))
        offloaded = StateDictOptions(cpu_offload=True)
        assert_model(get_model_state_dict(model, options=offloaded), get_model_state_dict(plain))
        trainable = StateDictOptions(ignore_frozen_params=True)
        found = get_model_state_dict(model, options=trainable)
        assert "blocks.0.0.bias" not in found
        assert_model(found, get_model_state_dict(plain, options=trainable))


@on_ranks(2)
@pytest.mark.parametrize(("kind", "keep"), [("flat", True), ("orig", False), ("rows", True), ("rows", False)])
def test_submodules(rank: Rank, kind: str, keep: bool) -> None:
    """Parts of a model, with and without their prefixes."""
    options = StateDictOptions(keep_submodule_prefixes=keep, full_state_dict=True)
    plain, plain_optimizer = reference(0)
    with dropin.install(quiet=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model, optimizer = trained(rank, kind, 0)
        part: Any = model.get_submodule("blocks.1" if kind == "rows" else "_fsdp_wrapped_module.blocks.1")
        expected = get_model_state_dict(plain, submodules={plain.blocks[1]}, options=options)
        assert len(expected) == 4
        assert_model(get_model_state_dict(model, submodules={part}, options=options), expected)
        if keep:
            states = (
                get_optimizer_state_dict(plain, plain_optimizer, submodules={plain.blocks[1]}, options=options),
                get_optimizer_state_dict(model, optimizer, submodules={part}, options=options),
            )
            assert_optimizer(states[1], states[0])  # torch filters models only


# ---------------------------------------------------------------- in


OPTIONS_IN = {
    "sharded": StateDictOptions(),
    "full": WHOLE,
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}


@on_ranks(2)
@sharded_kinds
@pytest.mark.parametrize("how", OPTIONS_IN)
def test_options_in(rank: Rank, kind: str, how: str) -> None:
    """What was got in each form is set in another model, which trains on as the first one does."""
    options = OPTIONS_IN[how]
    plain, plain_optimizer = reference(0, 1, 2)
    with dropin.install(quiet=True):
        model, optimizer = trained(rank, kind, 0, 1)
        state, optim = get_state_dict(model, optimizer, options=WHOLE if how == "broadcast" else options)
        state, optim = copy.deepcopy(state), copy.deepcopy(optim)
        other, fresh = trained(rank, kind, seed=3)
        if how == "broadcast":
            given = (state, optim) if rank.rank == 0 else ({}, {})
            set_model_state_dict(other, given[0], options=options)
            set_optimizer_state_dict(other, fresh, optim_state_dict=given[1], options=options)
        else:
            missing = set_state_dict(other, fresh, model_state_dict=state, optim_state_dict=optim, options=options)
            assert not missing.missing_keys and not missing.unexpected_keys
        train(other, fresh, 2, rank=rank)
        assert_model(get_model_state_dict(other), get_model_state_dict(plain))
        assert_optimizer(get_optimizer_state_dict(other, fresh), get_optimizer_state_dict(plain, plain_optimizer))


# ---------------------------------------------------------------- files


def save_all(rank: Rank, folder: str) -> None:
    with dropin.install(quiet=True):
        for kind in KINDS:
            model, optim = get_state_dict(*trained(rank, kind, 0, 1))
            dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/{kind}")


def load_all(rank: Rank, folder: str, pairs: list[tuple[str, str]]) -> None:
    expected = get_state_dict(*reference(0, 1))
    with dropin.install(quiet=True):
        for saved, kind in pairs:
            model, optimizer = trained(rank, kind, seed=3)
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=f"{folder}/{saved}")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            assert_optimizer(get_optimizer_state_dict(model, optimizer), expected[1])
            assert_model(get_model_state_dict(model), expected[0])


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_files_of_every_kind_are_read_by_another(ranks: RankPool, before: int, after: int, tmp_path: Path) -> None:
    """dcp.save and dcp.load from each of FSDP1 in both forms, FSDP2, DDP and a plain model to another of them, on other
    numbers of ranks; all have to be as the unsharded ones.
    """
    ranks(before, save_all, str(tmp_path))
    step = 1 if after == 4 else 2
    ranks(after, load_all, str(tmp_path), list(zip(KINDS, [*KINDS[step:], *KINDS[:step]], strict=True)))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "rows"])
def test_async_save(rank: Rank, kind: str, tmp_path: Path) -> None:
    """What dcp.async_save writes are the values at its call, whatever training does meanwhile."""
    plain, plain_optimizer = reference(0, 1)
    with dropin.install(quiet=True):
        model, optimizer = trained(rank, kind, 0, 1)
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        response: Any = dcp.async_save(state, checkpoint_id=tmp_path)
        train(model, optimizer, 2, 3, rank=rank)
        response.result()
        other, fresh = trained(rank, kind, seed=3)
        state = dict(zip(("model", "optim"), get_state_dict(other, fresh), strict=True))
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert_model(get_model_state_dict(other), get_model_state_dict(plain))
        assert_optimizer(get_optimizer_state_dict(other, fresh), get_optimizer_state_dict(plain, plain_optimizer))


# ---------------------------------------------------------------- before and after


@on_ranks(2)
def test_functions_imported_later_are_the_same(rank: Rank) -> None:
    """Imported before or after install: the functions that this file has, with fullshard's names inside."""
    functions: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    with dropin.install(quiet=True):
        scope: dict[str, Any] = {}
        exec("from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictType", scope)
        assert scope["get_model_state_dict"] is get_model_state_dict
        assert scope["StateDictType"] is functions.StateDictType is fullshard.StateDictType
        assert functions.FSDP is fullshard.FullyShardedDataParallel
    assert functions.StateDictType is not fullshard.StateDictType


@on_ranks(2)
def test_models_of_both_engines_afterwards(rank: Rank, tmp_path: Path) -> None:
    """After uninstall, the functions work on models of torch's FSDP again, whose files fullshard's models read; on
    wrappers of fullshard once they are told of these.
    """
    plain, plain_optimizer = reference(0, 1)
    expected = get_model_state_dict(plain), get_optimizer_state_dict(plain, plain_optimizer)
    with dropin.install(quiet=True):
        ours = {kind: trained(rank, kind, 0, 1) for kind in SHARDED}
    fsdp, cpu = torchs(), torch.device("cpu")
    rows = net()
    for part in (*rows.blocks, rows):
        fsdp.fully_shard(part, mesh=rank.mesh)
    theirs = {"rows": rows, "wrapper": fsdp.FullyShardedDataParallel(net(), device_id=cpu, use_orig_params=True)}
    assert not any(
        isinstance(model, fullshard.FSDPModule | fullshard.FullyShardedDataParallel) for model in theirs.values()
    )
    for kind, model in theirs.items():
        optimizer = adam(model)
        train(model, optimizer, 0, 1, rank=rank)
        saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=tmp_path / kind)
        found, state = get_state_dict(model, optimizer, options=WHOLE)
        assert_model(found, expected[0])
        assert_optimizer(state, expected[1])
        doubled = {name: value * 2 if name != "seen" else value for name, value in found.items()}
        set_state_dict(model, optimizer, model_state_dict=dict(doubled), optim_state_dict=state, options=WHOLE)
        assert_model(get_model_state_dict(model, options=WHOLE), doubled)
    with pytest.raises(fullshard.FullshardError, match="enable_torch_state_dict_functions"):
        get_model_state_dict(ours["orig"][0])
    with dropin.enable_torch_state_dict_functions():
        load_ours(rank, ours, [tmp_path / kind for kind in theirs], expected)


def load_ours(rank: Rank, ours: dict[str, Any], folders: list[Path], expected: tuple[Any, Any]) -> None:
    """What torch's models saved, and full state dicts, are loaded into fullshard's."""
    for number, (model, optimizer) in enumerate(ours.values()):
        before = dict(zip(("model", "optim"), get_state_dict(*trained(rank, "plain", seed=3)), strict=True))
        set_state_dict(
            model, optimizer, model_state_dict=before["model"], optim_state_dict=before["optim"], options=WHOLE
        )
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folders[number % 2])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        found, state = get_state_dict(model, optimizer, options=WHOLE)
        assert_model(found, expected[0])
        assert_optimizer(state, expected[1])
        set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=state, options=WHOLE)
        assert_model(get_model_state_dict(model, options=WHOLE), expected[0])


def test_comparison_fails_on_wrong_values() -> None:
    """One element, one name, one option."""
    plain, optimizer = reference(0)
    model, state = get_model_state_dict(plain), get_optimizer_state_dict(plain, optimizer)
    wrong = {**model, "first.bias": model["first.bias"] + 0.001}
    with pytest.raises(AssertionError, match=r"first\.bias"):
        assert_model(wrong, model)
    with pytest.raises(AssertionError):
        assert_model({**model, "more": model["seen"]}, model)
    changed = copy.deepcopy(state)
    changed["param_groups"][0]["lr"] = 0.5
    with pytest.raises(AssertionError):
        assert_optimizer(changed, state)


EXAMPLE = ROOT / "examples/checkpoint_state_dict.py"


def test_example(ranks: RankPool) -> None:
    """The run that was loaded has the losses of the one that was saved."""
    first, second = ranks(2, run_example, EXAMPLE)
    assert not second
    losses = re.findall(r"^(\w+) step (\d) loss (\S+)$", first, re.MULTILINE)
    rows = {step: loss for name, step, loss in losses if name == "FSDPSequential"}
    loaded = {step: loss for name, step, loss in losses if name == "FullyShardedDataParallel"}
    assert len(rows) == 5 and loaded.keys() == {"3", "4"}
    assert {step: rows[step] for step in loaded} == loaded
    assert "'0.weight': (64, 16)" in first
