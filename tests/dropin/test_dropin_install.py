"""fullshard.dropin: what names are while it is installed, before and after, and what it refuses."""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import dropin
from fullshard.dropin import inheritance, names
from ranks import Rank, on_ranks


def torchs(name: str = "") -> Any:
    """A module of torch's FSDP. By name, so that this file takes nothing from it."""
    return importlib.import_module("torch.distributed.fsdp" + (f".{name}" if name else ""))


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


PLACES = {
    "": ["FullyShardedDataParallel", "fully_shard", "FSDPModule", "MixedPrecisionPolicy", "FlatParameter"],
    "fully_sharded_data_parallel": ["FullyShardedDataParallel", "BackwardPrefetch", "FullStateDictConfig"],
    "api": ["ShardingStrategy", "StateDictType", "FullOptimStateDictConfig", "ShardedStateDictConfig"],
    "sharded_grad_scaler": ["ShardedGradScaler"],
    "_flat_param": ["FlatParameter"],
    "_fully_shard": ["fully_shard", "FSDPModule", "CPUOffloadPolicy"],
    "_fully_shard._fully_shard": ["fully_shard", "FSDPModule", "UnshardHandle"],
    "_fully_shard._fsdp_common": ["FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"],
    "_fully_shard._fsdp_api": ["AllGather", "ReduceScatter", "OffloadPolicy"],
}


@on_ranks(1)
def test_names_are_fullshards(rank: Rank):
    """Everywhere in torch's packages, whose public names are all offered; and torch's own again afterwards."""
    before = {(place, name): getattr(torchs(place), name) for place, found in PLACES.items() for name in found}
    with dropin.install(quiet=True):
        for place, name in before:
            assert getattr(torchs(place), name) is getattr(fullshard, name), (place, name)
            scope: dict[str, Any] = {}
            exec(f"from {torchs(place).__name__} import {name}", scope)
            assert scope[name] is getattr(fullshard, name), (place, name)
        for place in ("", "api", "wrap", "fully_sharded_data_parallel", "sharded_grad_scaler", "_fully_shard"):
            module = torchs(place)
            for name in getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")]):
                getattr(module, name)  # nothing that torch calls public is refused
        wrap, composable = torchs("wrap"), importlib.import_module("torch.distributed._composable.fsdp")
        assert wrap.ModuleWrapPolicy is fullshard.wrap.ModuleWrapPolicy and wrap.wrap is fullshard.wrap.wrap
        assert composable.fully_shard is fullshard.fully_shard
        old = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
        assert old.FSDPModule is fullshard.FSDPModule
        replicate = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
        assert replicate.replicate is fullshard.replicate
        checkpointing = importlib.import_module(names.CHECKPOINT_WRAPPER)
        for name in ("apply_activation_checkpointing", "CheckpointWrapper"):
            assert getattr(checkpointing, name) is getattr(fullshard.activation_checkpoint, name)
    assert {key: getattr(torchs(key[0]), key[1]) for key in before} == before
    assert torchs().fully_shard is not fullshard.fully_shard


@on_ranks(1)
def test_installing_more_than_once(rank: Rank):
    """Only the call that installed takes out at the end of its block; of several threads one installs."""
    theirs = torchs().fully_shard
    with dropin.install(quiet=True):
        with dropin.install(quiet=True):
            assert dropin.installed()
        assert dropin.installed() and torchs().fully_shard is fullshard.fully_shard
        dropin.install(quiet=True)
    assert not dropin.installed() and torchs().fully_shard is theirs
    dropin.uninstall()
    with pytest.raises(KeyError), dropin.install(quiet=True):
        raise KeyError
    assert not dropin.installed()
    with ThreadPoolExecutor(8) as threads:
        done = [future.result() for future in [threads.submit(dropin.install, quiet=True) for _ in range(8)]]
    assert len(done) == 8 and torchs().fully_shard is fullshard.fully_shard
    dropin.uninstall()
    assert torchs().fully_shard is theirs


PROGRAM = """
import torch.distributed.fsdp as whole
from torch.distributed.fsdp import FSDPModule, fully_shard as shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
def sharded(model):
    for block in model:
        if list(block.parameters()):
            shard(block)
    return shard(model)
def late():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    return FSDP
"""
# A program that imports from fullshard keeps that: only what it has asked torch's names for is torch's again.
FRANK = """
from fullshard import fully_shard, replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as theirs
from torch.distributed.fsdp import FSDPModule as Kind
"""


@on_ranks(2)
def test_before_and_after_programs_are_imported(rank: Rank):
    """Both kinds of programs train on fullshard, and hold torch's names, but no others, again afterwards."""
    programs = {name: types.ModuleType(name) for name in ("early_program", "late_program", "frank_program")}
    early, late, frank = programs.values()
    sys.modules.update(programs)
    try:
        exec(PROGRAM, vars(early))
        theirs = early.FSDPModule, early.shard, early.ModuleWrapPolicy
        with dropin.install(quiet=True):
            exec(PROGRAM, vars(late))
            exec(FRANK, vars(frank))
            for program in (early, late):
                assert program.shard is fullshard.fully_shard and program.whole.fully_shard is fullshard.fully_shard
                assert program.late() is fullshard.FullyShardedDataParallel
                model = program.sharded(a_model())
                model(torch.ones(2, 6)).sum().backward()
                assert isinstance(model, fullshard.FSDPModule) and isinstance(model, program.FSDPModule)
        for program in (early, late):
            assert (program.FSDPModule, program.shard, program.ModuleWrapPolicy) == theirs
        assert frank.fully_shard is fullshard.fully_shard
        assert frank.Kind is torchs().FSDPModule is not fullshard.FSDPModule
        assert frank.replicate is fullshard.replicate is not frank.theirs
        model(torch.ones(2, 6)).sum().backward()  # stays fullshard's
    finally:
        for name in programs:
            del sys.modules[name]


@on_ranks(1)
def test_kinds_of_both_engines(rank: Rank):
    """isinstance says the truth with names of either."""
    with dropin.install(quiet=True):
        composed = fullshard.fully_shard(nn.Linear(4, 4))
        wrapped = fullshard.FullyShardedDataParallel(nn.Linear(4, 4))
        assert isinstance(composed, torchs().FSDPModule) and not isinstance(composed, torchs().FullyShardedDataParallel)
        assert isinstance(wrapped, torchs().FullyShardedDataParallel) and not isinstance(wrapped, torchs().FSDPModule)
    assert not isinstance(composed, torchs().FSDPModule) and isinstance(composed, fullshard.FSDPModule)


@on_ranks(1)
def test_names_that_somebody_kept(rank: Rank):
    """References in tuples and closures are out of reach; sharding through them is an error that says so."""
    replicate = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    kept = torchs().fully_shard, torchs().FullyShardedDataParallel, replicate
    with dropin.install(quiet=True):
        for function in kept:
            with pytest.raises(dropin.MixedEnginesError, match="reference that was taken before"):
                function(nn.Linear(2, 2))
    kept[0](nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))  # and works again


@on_ranks(1)
def test_what_there_is_not_raises_when_touched(rank: Rank):
    """A named error with the name; programs that catch ImportError go on without; hasattr does not lie."""
    with dropin.install(quiet=True):
        with pytest.raises(dropin.NotOfferedError, match=r"_runtime_utils\._lazy_init is a part of torch's FSDP"):
            _ = torchs("_runtime_utils")._lazy_init
        with pytest.raises(ImportError, match=rf"imported by {__name__}"):
            exec("from torch.distributed.fsdp._flat_param import FlatParamHandle", {"__name__": __name__})
        assert "_lazy_init" not in dir(torchs("_runtime_utils")) and "fully_shard" in dir(torchs())
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = torchs().no_such_name
        assert torchs("_common_utils").FSDP_PREFIX and torchs("_common_utils").clean_tensor_name("a") == "a"
    assert callable(torchs("_runtime_utils")._lazy_init)


@on_ranks(1)
def test_patched_and_deleted_names(rank: Rank):
    """Patches of replaced names are seen and undone; what programs have deleted does not stop uninstalling."""
    with dropin.install(quiet=True):
        with mock.patch("torch.distributed.fsdp.fully_shard", new="patched"):
            assert torchs().fully_shard == "patched"
        assert torchs().fully_shard is fullshard.fully_shard
        with mock.patch.object(torchs(), "fresh", new=1, create=True):
            assert torchs().fresh == 1
        torchs().fully_shard = torchs().fully_shard  # as pytest's monkeypatch undoes its patches
        assert torchs().fully_shard is fullshard.fully_shard
        del nn.Module._fsdp_use_orig_params
    assert not dropin.installed()
    assert torchs().fully_shard is not fullshard.fully_shard and callable(torchs().fully_shard)


@on_ranks(1)
def test_torchs_own_modules_are_bound_anew(rank: Rank):
    """State dicts, pipelining, dynamo."""
    functions = importlib.import_module("torch.distributed.checkpoint.state_dict")
    stage = importlib.import_module("torch.distributed.pipelining.stage")
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    theirs = functions.StateDictType, stage.fully_shard, schedules.UnshardHandle, stage.replicate
    backward = stage._PipelineStageBase.__dict__["backward_maybe_with_nosync"]
    with dropin.install(quiet=True):
        assert functions.StateDictType is fullshard.StateDictType
        assert isinstance(fullshard.FullyShardedDataParallel(nn.Linear(2, 2)), functions.FSDP)
        assert stage.fully_shard is fullshard.fully_shard and stage.FSDPModule is fullshard.FSDPModule
        assert stage.replicate is fullshard.replicate and stage.ReplicateModule is fullshard.ReplicateModule
        assert schedules.UnshardHandle is fullshard.UnshardHandle
        optimizer = importlib.import_module("torch.distributed.checkpoint.optimizer")
        assert callable(optimizer._create_chunk_sharded_tensor)
        with pytest.raises(dropin.NotOfferedError, match="FSDPParamGroup is a part of torch's FSDP"):
            torchs("_fully_shard._fsdp_param_group").FSDPParamGroup  # noqa: B018 # a patch of it would do nothing
    assert stage._PipelineStageBase.__dict__["backward_maybe_with_nosync"] is backward
    assert theirs == (functions.StateDictType, stage.fully_shard, schedules.UnshardHandle, stage.replicate)


@on_ranks(2)
def test_models_and_values_of_torchs_engine(rank: Rank):
    """A model that it has sharded, and its policies, are refused by name; installing warns where there is one."""
    mesh = init_device_mesh("cpu", (2,))
    model = a_model()
    torchs().fully_shard(model[0], mesh=mesh)
    for shard in (fullshard.fully_shard, fullshard.FullyShardedDataParallel, fullshard.replicate):
        with pytest.raises(ValueError, match=r"module '0', a FSDPLinear, is sharded by torch\.distributed\.fsdp"):
            shard(model)
    with pytest.raises(ValueError, match="this module, a FSDPLinear, is sharded by"):
        fullshard.fully_shard(model[0])
    fullshard.fully_shard(model[2])
    whose = r"found torch's torch\.distributed\.fsdp\..*MixedPrecisionPolicy; import it from"
    with pytest.raises(TypeError, match=whose):
        fullshard.fully_shard(a_model(), mp_policy=torchs().MixedPrecisionPolicy())
    del model
    model = torchs().fully_shard(a_model(), mesh=mesh)
    already = r"already sharded 1 modules \(FSDPSequential\).*before the model"
    with pytest.warns(dropin.MixedEnginesWarning, match=already):
        dropin.install(quiet=True)
    dropin.uninstall()
    del model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dropin.install(quiet=True):
            fullshard.fully_shard(a_model())


@on_ranks(1)
def test_an_installation_that_fails_leaves_nothing(rank: Rank):
    """Wherever it fails: names, classes and what was lent are as before, and installing works afterwards."""
    theirs = torchs().fully_shard
    for place in ("stand_ins._refusing", "split_backward.patch_stages", "stand_ins.StandIns._rebind"):
        with mock.patch(f"fullshard.dropin.{place}", side_effect=KeyError(place)), pytest.raises(KeyError):
            dropin.install(quiet=True)
        assert not dropin.installed() and torchs().fully_shard is theirs and type(torchs()) is types.ModuleType
        assert not hasattr(nn.Module(), "_is_fsdp_managed_module") and not hasattr(fullshard.fully_shard, "state")
    with dropin.install(quiet=True):
        assert torchs().fully_shard is fullshard.fully_shard


@on_ranks(1)
def test_uninstalling_is_for_processes_to_come_as_well(rank: Rank):
    """What python -m fullshard.dropin has put into PYTHONPATH is taken out of it; the user's parts stay."""
    for before in ({"PYTHONPATH": os.pathsep.join(["", "own"])}, {}):
        with mock.patch.dict("os.environ"):
            os.environ.pop("PYTHONPATH", None)
            os.environ.update(before)
            with dropin.install(quiet=True):
                inheritance.patch_pythonpath()
                assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == inheritance.FOLDER
            assert os.environ.get("PYTHONPATH") == before.get("PYTHONPATH")
