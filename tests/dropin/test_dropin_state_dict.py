"""torch.distributed.checkpoint and its state dict functions on models that fullshard shards through torch's names.

What the functions do with each kind of model is tested in tests/wrapper/test_torch_state_dict.py. Here: what torch
2.13's own FSDP fails on CPU (the table in docs/get_started/migrating.md), parts of models, saving while training goes
on, and torch's own models before and after.
"""

from __future__ import annotations

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
    set_state_dict,
)

import fullshard
from compare import assert_close, assert_equal
from front_ends import CLOSE, adam, build, full
from fullshard import dropin
from fullshard.frontend import arguments
from models import Frozen, Stack
from ranks import Rank, RankPool, on_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/checkpoint_state_dict.py"
SHARDED = ["flat", "orig", "rows"]
WHOLE = StateDictOptions(full_state_dict=True)
BATCH = 4  # samples of all ranks together, in every world


def torchs() -> Any:
    """torch.distributed.fsdp, whose names are fullshard's while that stands in."""
    return importlib.import_module("torch.distributed.fsdp")


def wrapped(rank: Rank, kind: str, model: Any, **options: Any) -> nn.Module:
    """The model in one of the forms, by torch's names."""
    fsdp = torchs()
    if kind == "rows":
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=rank.mesh, **options)
        return fsdp.fully_shard(model, mesh=rank.mesh, **options)
    options["use_orig_params"] = kind == "orig"
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp.FullyShardedDataParallel(block, **options)
    return fsdp.FullyShardedDataParallel(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int, rank: Rank | None = None) -> None:
    """Steps on a batch of which every rank takes its part; without ``rank``, all of it."""
    for step in steps:
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        own = x if rank is None else x.chunk(rank.world_size)[rank.rank]
        model(own).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_optimizer(rank: Rank, model: nn.Module, *steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer, after some steps."""
    optimizer = adam(model.parameters())
    train(model, optimizer, *steps, rank=rank)
    return model, optimizer


def trained(rank: Rank, kind: str, *steps: int, seed: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    return with_optimizer(rank, wrapped(rank, kind, build(Frozen, 2, seed=seed)), *steps)


def reference(*steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Without sharding and without other ranks."""
    model = build(Frozen, 2)
    optimizer = adam(model.parameters())
    train(model, optimizer, *steps)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def load(each: tuple[nn.Module, torch.optim.Optimizer], folder: Path) -> None:
    """Read a checkpoint into a model and its optimizer."""
    state = state_of(*each)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*each, model_state_dict=state["model"], optim_state_dict=state["optim"])


def assert_model(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(full(actual[name]), value, name, **CLOSE)


def assert_optimizer(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["state"].keys() == expected["state"].keys()
    for fqn, state in expected["state"].items():
        assert_model(actual["state"][fqn], state)
    names = [sorted(group["params"]) for group in actual["param_groups"]]
    assert names == [sorted(group["params"]) for group in expected["param_groups"]]


def assert_same(model: nn.Module, optimizer: torch.optim.Optimizer, expected: Any, **options: Any) -> None:
    """Require the state of the model and the optimizer, got by torch's functions, to be that of others."""
    assert_model(get_model_state_dict(model, **options), get_model_state_dict(expected[0]))
    assert_optimizer(get_optimizer_state_dict(model, optimizer, **options), get_optimizer_state_dict(*expected))


# -------------------------------------------------------------------- what torch's own FSDP fails on CPU


@on_ranks(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_full_state_offloaded(rank: Rank, orig: bool) -> None:
    """FULL_STATE_DICT with offload_to_cpu has rank 0's values, and every moment of Adam under its own name."""
    with dropin.install(quiet=True):
        fsdp = torchs()
        whole = fsdp.FullyShardedDataParallel
        kind = "orig" if orig else "flat"
        unsynchronized = build(Frozen, 2, seed=4 + rank.rank)
        model, optimizer = with_optimizer(rank, wrapped(rank, kind, unsynchronized, sync_module_states=True), 0, 1)
        with whole.summon_full_params(model, offload_to_cpu=True):
            found = {name: value.detach().clone() for name, value in model.named_parameters()}
        states = []
        for rank0_only in (False, True):
            configs = (
                fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
                fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
            )
            with whole.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, *configs):
                states.append((model.state_dict(), whole.optim_state_dict(model, optimizer)))
        whole_on_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states.append(get_state_dict(model, optimizer, options=whole_on_cpu))
    plain = reference(0, 1)
    assert_model(found, dict(plain[0].state_dict()))
    moments = get_optimizer_state_dict(*plain)
    for number, (values, state) in enumerate(states):
        nothing = number > 0 and rank.rank > 0
        assert_model(values, {} if nothing else plain[0].state_dict())
        for fqn, held in ({} if nothing else moments["state"]).items():  # type: ignore[union-attr]
            assert_model(state["state"][fqn], held)
            assert not torch.equal(held["exp_avg"], held["exp_avg_sq"]), "equal values would not tell them apart"


@on_ranks(2)
@pytest.mark.parametrize("kind", SHARDED)
def test_a_rank_without_a_shard_loads(rank: Rank, kind: str, tmp_path: Path) -> None:
    """dcp.load of model and optimizer, where single-row parameters are on one of the ranks only."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build(Stack, 0, seed=seed)
        model.first, model.last = nn.Linear(6, 1), nn.Linear(1, 1)
        return with_optimizer(rank, wrapped(rank, kind, model), 0)

    with dropin.install(quiet=True):
        saved, old = made(1), made(2)
        dcp.save(state_of(*saved), checkpoint_id=tmp_path)
        load(old, tmp_path)
        expected, found = (get_state_dict(*each, options=WHOLE) for each in (saved, old))
    assert_equal(found[0], expected[0], "model")
    assert_equal(found[1]["state"], expected[1]["state"], "optimizer")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "rows"])
def test_cpu_offload_without_accelerator(rank: Rank, kind: str) -> None:
    """Offloading works, and says once that there is nothing to pin."""
    arguments.warn_if_unpinned.cache_clear()
    with dropin.install(quiet=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp = torchs()
        options: dict[str, Any] = {"cpu_offload": fsdp.CPUOffload(offload_params=True)}
        if kind == "rows":
            options = {"offload_policy": fsdp.CPUOffloadPolicy()}
        model, optimizer = with_optimizer(rank, wrapped(rank, kind, build(Frozen, 2), **options), 0, 1)
        assert_same(model, optimizer, reference(0, 1), options=WHOLE)
    assert len([w for w in caught if "not pinned" in str(w.message)]) == 1, [str(w.message) for w in caught]


# -------------------------------------------------------------------- parts, and other moments


@on_ranks(2)
@pytest.mark.parametrize(("kind", "keep"), [("flat", True), ("orig", False), ("rows", False)])
def test_submodules(rank: Rank, kind: str, keep: bool) -> None:
    """Parts of a model, with and without their prefixes."""
    options = StateDictOptions(keep_submodule_prefixes=keep, full_state_dict=True)
    plain, plain_optimizer = reference(0)
    with dropin.install(quiet=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model, optimizer = trained(rank, kind, 0)
        part: Any = model.get_submodule("blocks.0" if kind == "rows" else "_fsdp_wrapped_module.blocks.0")
        expected = get_model_state_dict(plain, submodules={plain.blocks[0]}, options=options)
        assert len(expected) == 4
        assert_model(get_model_state_dict(model, submodules={part}, options=options), expected)
        if keep:  # torch filters models only
            states = (
                get_optimizer_state_dict(plain, plain_optimizer, submodules={plain.blocks[0]}, options=options),
                get_optimizer_state_dict(model, optimizer, submodules={part}, options=options),
            )
            assert_optimizer(states[1], states[0])


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "rows"])
def test_async_save(rank: Rank, kind: str, tmp_path: Path) -> None:
    """What dcp.async_save writes are the values at its call, whatever training does meanwhile."""
    with dropin.install(quiet=True):
        model, optimizer = trained(rank, kind, 0, 1)
        response: Any = dcp.async_save(state_of(model, optimizer), checkpoint_id=tmp_path)
        train(model, optimizer, 2, 3, rank=rank)
        response.result()
        other = trained(rank, kind, seed=3)
        load(other, tmp_path)
        assert_same(*other, reference(0, 1))


@on_ranks(2)
def test_models_of_both_engines_afterwards(rank: Rank, tmp_path: Path) -> None:
    """After uninstall, torch's functions work on its own models, whose files fullshard's models read, and on
    fullshard's wrappers where enabled.
    """
    expected = reference(0, 1)
    with dropin.install(quiet=True):
        ours = {kind: trained(rank, kind, 0, 1) for kind in SHARDED}
    rows = wrapped(rank, "rows", build(Frozen, 2))
    cpu = torch.device("cpu")
    wrapper = torchs().FullyShardedDataParallel(build(Frozen, 2), device_id=cpu, use_orig_params=True)
    theirs = {"rows": rows, "wrapper": wrapper}
    kinds = fullshard.FSDPModule | fullshard.FullyShardedDataParallel
    assert not any(isinstance(model, kinds) for model in theirs.values())
    for kind, each in theirs.items():
        model, optimizer = with_optimizer(rank, each, 0, 1)
        dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / kind)
        assert_same(model, optimizer, expected, options=WHOLE)
    with pytest.raises(fullshard.FullshardError, match="enable_torch_state_dict_functions"):
        get_model_state_dict(ours["orig"][0])
    with dropin.enable_torch_state_dict_functions():
        for number, each in enumerate(ours.values()):
            train(*each, 2, rank=rank)
            load(each, tmp_path / list(theirs)[number % 2])
            assert_same(*each, expected, options=WHOLE)


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
