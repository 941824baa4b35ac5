"""Private names of torch's FSDP that programs use, on fullshard's engine."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from compare import assert_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import dropin, fully_shard
from ranks import Rank, on_ranks


def blocks(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Sequential(nn.Linear(10, 3), nn.LayerNorm(3))).to(dtype)


def wrapped(dtype: torch.dtype, use_orig_params: bool) -> FSDP:
    model = blocks(dtype)
    model[2] = FSDP(model[2], use_orig_params=use_orig_params)
    return FSDP(model, use_orig_params=use_orig_params)


def upcast(model: nn.Module) -> Iterator[str]:
    """What accelerate does to wrappers of a model in low precision."""
    for module in FSDP.fsdp_modules(model):
        if not module._has_params:
            continue
        flat = module._flat_param
        if flat.dtype != torch.float32 and flat.device != torch.device("meta") and flat.requires_grad:
            yield from flat._fqns
            flat.data = flat.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@on_ranks(2)
def test_flat_parameters_can_be_cast(rank: Rank, use_orig_params: bool):
    """One wrapper's at a time; optimizers and training go on with the new dtype."""
    with dropin.install(quiet=True):
        model = wrapped(torch.bfloat16, use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(list(upcast(model))) == 6
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert list(upcast(model)) == []
        values = torch.randn(4, 6)
        model(values).square().sum().backward()
        optimizer.step()
    reference = blocks(torch.bfloat16).float()
    reference(values).square().sum().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    with FSDP.summon_full_params(model):
        for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@on_ranks(2)
def test_views_of_a_wrapper(rank: Rank, use_orig_params: bool):
    """What there is: dtype, names, this rank's shards; nothing on a wrapper without parameters of its own."""
    with dropin.install(quiet=True):
        model = wrapped(torch.float32, use_orig_params)
        outer, inner = FSDP.fsdp_modules(model)
        assert outer._has_params and outer._handle._orig_param_dtype is torch.float32
        assert list(inner._flat_param._fqns) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        if use_orig_params:
            shards = torch.cat([p.detach().reshape(-1) for p in inner.parameters()])
            assert_equal(inner._flat_param.data, shards, "shards")
        else:
            assert isinstance(inner._flat_param, fullshard.FlatParameter)
        empty = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))))
        assert not empty._has_params and empty._flat_param is None and empty._handle is None
    assert not hasattr(model, "_handle") and not hasattr(model, "_has_params")


@on_ranks(1)
def test_marks(rank: Rank):
    """On what belongs to units, and only while installed."""
    with dropin.install(quiet=True):
        flat, original, composed = FSDP(blocks()), FSDP(blocks(), use_orig_params=True), fully_shard(blocks())
        for model in (flat, original, composed):
            assert model._is_fsdp_managed_module
        assert original.module._is_fsdp_managed_module and original.module[2]._is_fsdp_managed_module
        assert composed[0]._is_fsdp_managed_module and not composed[1]._is_fsdp_managed_module
        assert not blocks()._is_fsdp_managed_module
        assert all(model._fsdp_use_orig_params for model in (flat, original, composed))
        assert all(p._fsdp_flattened for model in (flat, original) for p in model.parameters())
        assert not any(getattr(p, "_fsdp_flattened", False) for p in composed.parameters())
        assert not nn.Parameter(torch.ones(1))._fsdp_flattened
        composed._is_fsdp_managed_module = True  # as transformers sets it
        assert composed._is_fsdp_managed_module is True
    assert not hasattr(nn.Module(), "_is_fsdp_managed_module") and not hasattr(nn.Parameter(), "_fsdp_flattened")


@on_ranks(2)
def test_states(rank: Rank):
    """The units below a module, and gradients reduced through them."""
    with dropin.install(quiet=True):
        model = blocks()
        fully_shard(model[2])
        fully_shard(model)
        with pytest.raises(fullshard.FullshardError, match="expected a module that fully_shard was called on"):
            fully_shard.state(model[0])
        state = fully_shard.state(model)
        assert len(state._state_ctx.all_states) == 2
        model.set_requires_gradient_sync(False)
        model(torch.full((2, 6), float(rank.rank + 1))).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        for each in state._state_ctx.all_states:
            for one in each._fsdp_param_groups:
                one.post_backward()
        state._root_post_backward_final_callback()
        assert isinstance(model[2][0].weight, DTensor)
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(torch.full((2, 6), float(rank.rank + 1))).square().sum().backward()
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert_equal(found.grad.to_local(), expected.grad.to_local(), "gradient")


@on_ranks(4)
def test_mesh_infos(rank: Rank):
    """As ShardPlacementResult takes them."""
    with dropin.install(quiet=True):
        info_of = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")._get_mesh_info
        flat, hybrid = rank.make_mesh(4), rank.make_mesh(2, 2, names=("replicate", "shard"))
        assert type(info_of(flat)) is fullshard.FSDPMeshInfo and info_of(flat).mesh is flat
        both = info_of(hybrid)
        assert type(both) is fullshard.HSDPMeshInfo and (both.replicate_mesh_dim, both.shard_mesh_dim) == (0, 1)
        dims = fullshard.DataParallelMeshDims(shard=("replicate", "shard"))
        assert info_of(hybrid, dims).mesh.size() == 4 and info_of(hybrid, dims).mesh.ndim == 1
        named = info_of(hybrid, fullshard.DataParallelMeshDims(shard="shard", replicate="replicate"))
        assert type(named) is fullshard.HSDPMeshInfo
        with pytest.raises(ValueError, match="a mesh dimension to shard over, found only replicate dimensions"):
            info_of(hybrid, fullshard.DataParallelMeshDims(replicate="replicate"))
        model, big = blocks(), info_of(flat)
        fully_shard(
            model,
            mesh=hybrid,
            shard_placement_fn=lambda p: fullshard.ShardPlacementResult(None, big) if p.dim() == 2 else None,
        )
        model(torch.ones(2, 6)).sum().backward()
        assert {p.device_mesh.ndim for p in model.parameters()} == {1, 2}
