"""torchtitan's mixtures of experts on fullshard: meshes per parameter, expert parallelism."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan's models import Triton, also where there is only a CPU")

import torch
from torch.distributed.tensor import Shard
from torchtitan_models import (
    Sharded,
    assert_same,
    build,
    deepseek_config,
    exact_experts,
    losses,
    on_fullshard,
    qwen_moe_config,
)

import fullshard
from ranks import Rank, on_ranks

RTOL = 5e-5

EP = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}
HSDP_EP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
TP_EP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": 2}


def experts_of(sharded: Sharded) -> torch.nn.Parameter:
    """A weight of the experts of the last layer."""
    return sharded.model.layers["1"].moe.routed_experts.inner_experts.w1_EFD


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
@pytest.mark.parametrize(("degrees", "axes"), [(EP, 2), (HSDP_EP, 3), (TP_EP, 2)], ids=["ep", "hsdp", "tp"])
@on_ranks(4)
def test_expert_parallel(rank: Rank, degrees: dict[str, int], axes: int, backend: str):
    """Experts on a mesh of their own (efsdp, ep), the rest on all ranks: losses and norms of the whole model."""
    with exact_experts():
        expected = losses(build(qwen_moe_config()))
    with exact_experts(), on_fullshard(backend):
        sharded = Sharded(qwen_moe_config(), spmd_backend=backend, **degrees)
        weight, rest = experts_of(sharded), sharded.model.layers["1"].attention.wo.weight
        assert weight.device_mesh.mesh_dim_names[-2:] == ("efsdp", "ep")
        assert weight.device_mesh.ndim == axes
        assert "ep" not in rest.device_mesh.mesh_dim_names
        assert weight.to_local().shape[0] == 4 // 2 // weight.device_mesh["efsdp"].size()
        assert_same(sharded.losses(), expected, RTOL)


@pytest.mark.parametrize("degrees", [EP, {"data_parallel_shard_degree": 4}], ids=["ep", "no_ep"])
@on_ranks(4)
def test_few_experts(rank: Rank, degrees: dict[str, int]):
    """Fewer experts than ranks are sharded on dim 1, so that no rank's part is padding."""
    with exact_experts():
        expected = losses(build(qwen_moe_config(experts=2)))
    with exact_experts(), on_fullshard():
        sharded = Sharded(qwen_moe_config(experts=2), **degrees)
        assert experts_of(sharded).placements[0] == Shard(1)
        assert_same(sharded.losses(), expected, RTOL)


@on_ranks(4)
def test_deepseek(rank: Rank):
    """DeepSeek V3: latent attention, shared experts beside routed ones, a dense first layer."""
    with exact_experts():
        expected = losses(build(deepseek_config()))
    with exact_experts(), on_fullshard():
        assert_same(Sharded(deepseek_config(), **EP).losses(), expected, RTOL)


@on_ranks(4)
def test_experts_in_bf16(rank: Rank):
    """As torchtitan has it: what differs is how sums round."""
    expected = losses(build(qwen_moe_config()))
    with on_fullshard():
        assert_same(Sharded(qwen_moe_config(), **EP).losses(), expected, 3e-3)


@on_ranks(4)
def test_spmd_types_with_ep(rank: Rank):
    """Plain tensors of experts do not say how they lie on the ep axis: refused, by torch 2.13 as well."""
    with on_fullshard("spmd_types"):
        with pytest.raises(ValueError, match="with dp_mesh_dims all parameters have to be DTensors"):
            Sharded(qwen_moe_config(), spmd_backend="spmd_types", **EP)


@on_ranks(4)
def test_mesh_info(rank: Rank):
    """What torchtitan builds with _get_mesh_info has the fields that it reads."""
    with on_fullshard():
        from torch.distributed.fsdp import DataParallelMeshDims
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

        dims = Sharded(qwen_moe_config(), **HSDP_EP).dims
        info = _get_mesh_info(dims.get_mesh(["dp_replicate", "efsdp"]), None)
        assert isinstance(info, FSDPMeshInfo)
        assert isinstance(info, fullshard.HSDPMeshInfo)
        assert (info.shard_mesh_dim, info.replicate_mesh_dim) == (1, 0)
        result = ShardPlacementResult(placement=Shard(0), mesh_info=info)
        assert result.mesh_info is info
        whole = rank.make_mesh(2, 2, names=("dp_replicate", "efsdp"))
        named = _get_mesh_info(whole, DataParallelMeshDims(shard="efsdp", replicate="dp_replicate"))
        assert isinstance(named, fullshard.HSDPMeshInfo)
        assert (named.dp_mesh_dims.shard, named.spmd_mesh) == ("efsdp", whole)
