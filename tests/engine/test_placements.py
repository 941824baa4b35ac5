"""``shard_placement_fn`` with meshes: experts that are sharded over ranks of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from compare import assert_close, assert_equal
from front_ends import CLOSE, assert_same_gradients, assert_trains_alike
from fullshard import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult, fully_shard
from fullshard.comm import record
from models import reference_backward, square_loss
from ranks import Rank, on_ranks


class Moe(nn.Module):
    """A dense layer whose output goes through experts; every expert mesh holds the same experts or its own."""

    def __init__(self, expert_seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.dense = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(5))
        torch.manual_seed(100 + expert_seed)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense(x))
        return sum(torch.tanh(expert(x)) for expert in self.experts) * self.scale


def shard_moe(model: Moe, mesh: DeviceMesh, info: Any, dim: int | None = 0, **options: Any) -> Moe:
    own = set(model.experts.parameters())

    def choose(parameter: nn.Parameter) -> Any:
        placement = None if dim is None else Shard(dim if parameter.ndim > 1 else 0)
        return ShardPlacementResult(placement, info) if parameter in own else None

    return fully_shard(model, mesh=mesh, shard_placement_fn=choose, **options)


def expected_gradients(references: list[Moe], expert_ranks: list[int]) -> dict[str, torch.Tensor]:
    """Dense gradients are means over all ranks, those of experts over ``expert_ranks``."""
    gradients = []
    for number, reference in enumerate(references):
        reference.zero_grad()
        square_loss()(reference, number).backward()
        gradients.append({fqn: p.grad for fqn, p in reference.named_parameters()})
    over = {fqn: expert_ranks if fqn.startswith("experts") else range(4) for fqn in gradients[0]}
    return {fqn: torch.stack([gradients[r][fqn] for r in ranks]).mean(0) for fqn, ranks in over.items()}


@on_ranks(4)
@pytest.mark.parametrize(("kind", "dim"), [("DeviceMesh", -1), ("1-D mesh", None), ("axis", 0), ("units", 0)])
def test_experts_on_an_axis_of_their_own(rank: Rank, kind: str, dim: int | None) -> None:
    """Experts are sharded and averaged over their own ranks only, everything else over all; on any dim."""
    mesh = rank.make_mesh(2, 2, names=("ep", "efsdp"))
    infos = {
        "DeviceMesh": mesh["efsdp"],
        "1-D mesh": FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0),
        "axis": FSDPMeshInfo(mesh, shard_mesh_dim=1),
    }
    first = rank.rank // 2 * 2
    for differ in (False, True):
        references = [Moe(number // 2 if differ else 0) for number in range(4)]
        model = copy.deepcopy(references[rank.rank])
        if kind == "units":
            for expert in model.experts:
                fully_shard(expert, mesh=mesh["efsdp"], reshard_after_forward=differ)
            fully_shard(model, mesh=rank.mesh, reshard_after_forward=True)
        else:
            shard_moe(model, rank.mesh, infos[kind], dim, reshard_after_forward=True)
        assert model.experts[0].weight.placements == (Shard((dim or 0) % 2),)
        assert (model.experts[0].weight.device_mesh.size(), model.dense.weight.device_mesh.size()) == (2, 4)
        with record() as seen:
            square_loss()(model, rank.rank).backward()
        for fqn, expected in expected_gradients(references, [first, first + 1]).items():
            parameter = model.get_parameter(fqn)
            assert_equal(parameter.detach().full_tensor(), references[rank.rank].get_parameter(fqn).detach(), fqn)
            assert_close(parameter.grad.full_tensor(), expected, fqn, **CLOSE)
        if kind != "units":
            assert [c.kind for c in seen] == ["all_gather"] * 4 + ["reduce_scatter"] * 2
            shares = {(c.kind, c.nbytes / (c.numel * c.dtype.itemsize)) for c in seen}
            assert shares == {
                (operation, share) for operation in ("all_gather", "reduce_scatter") for share in (0.75, 0.5)
            }


@on_ranks(4)
@pytest.mark.parametrize("case", ["HSDPMeshInfo", "DeviceMesh", "shard below HSDP", "replicate only"])
def test_experts_and_replicas(rank: Rank, case: str) -> None:
    """Experts sharded and replicated over two each, over all four below HSDP, or whole on all: means over all four."""
    mesh = rank.make_mesh(2, 2, names=("er", "es"))
    infos: dict[str, tuple[Any, DeviceMesh, tuple[Any, ...]]] = {
        "HSDPMeshInfo": (HSDPMeshInfo(mesh, 1, 0), rank.mesh, (Replicate(), Shard(0))),
        "DeviceMesh": (mesh, rank.mesh, (Replicate(), Shard(0))),
        "shard below HSDP": (FSDPMeshInfo(rank.mesh, 0), rank.make_mesh(2, 2, names=("r", "s")), (Shard(0),)),
        "replicate only": (HSDPMeshInfo(rank.mesh, None, 0), rank.mesh, (Replicate(),)),
    }
    info, dense_mesh, placements = infos[case]
    reference = Moe()
    model = shard_moe(Moe(), dense_mesh, info, None if case == "replicate only" else 0)
    assert model.experts[0].weight.placements == placements
    assert model.experts[0].weight.device_mesh.size() == 4
    assert_trains_alike(model, reference, rank, steps=1)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        with record() as seen:
            square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, 4, square_loss(step))
        if case == "DeviceMesh":
            reduced = [c.kind for c in seen if c.kind != "all_gather"]
            assert reduced == ["reduce_scatter"] * 2 + ["all_reduce"] * step
    assert_same_gradients(model, reference)
