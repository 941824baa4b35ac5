"""Parameters that are annotated with spmd_types: plain tensors that say how they lie on the axes of a mesh."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compare import assert_close, assert_equal
from fullshard import (
    DataParallelMeshDims,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from fullshard.comm import record
from pairwise import each_value
from ranks import Rank, on_ranks

spmd = pytest.importorskip("spmd_types")
checker = pytest.importorskip("spmd_types.checker")

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}
DIM, HIDDEN, ROWS = 6, 12, 8


class Block(nn.Module):
    """Scale, up, down, with a residual around them; the scale is before or after the activation is replicated."""

    def __init__(self, scale_is_invariant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        self.up, self.down = nn.Parameter(torch.randn(HIDDEN, DIM) / 3), nn.Parameter(torch.randn(DIM, HIDDEN) / 3)
        self.scale_is_invariant, self.tp = scale_is_invariant, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.replicated(x * self.scale) if self.scale_is_invariant else self.replicated(x) * self.scale
        hidden = F.linear(torch.tanh(F.linear(hidden, self.up)), self.down)
        if self.tp is not None:
            hidden = spmd.all_reduce(hidden, self.tp, src=spmd.V, dst=spmd.I)
        return x + hidden

    def replicated(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return x
        return spmd.invariant_to_replicate(x, self.tp, backward_options={"op_dtype": torch.float32})

    def cut(self, mesh: DeviceMesh, *, whole: bool) -> None:
        """Keep this rank's part of the axis ``tp``, and annotate it on that, or on all of ``mesh``."""
        self.tp = mesh.get_group("tp") if "tp" in mesh.mesh_dim_names else None
        data = dict.fromkeys((name for name in mesh.mesh_dim_names if name != "tp"), spmd.R) if whole else {}
        scale = {"tp": spmd.I if self.scale_is_invariant else spmd.R}
        for name, dim, kind in (("scale", None, scale), ("up", 0, {"tp": spmd.S(0)}), ("down", 1, {"tp": spmd.S(1)})):
            value = getattr(self, name).detach()
            if self.tp is not None and dim is not None:
                value = value.chunk(2, dim)[mesh.get_local_rank("tp")].clone()
            setattr(self, name, nn.Parameter(value))
            with spmd.set_current_mesh(mesh):
                spmd.assert_type(getattr(self, name), {**data, **(kind if self.tp is not None else {})})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(True), Block(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def train(model: Net, part: torch.Tensor, summed: Iterable[Any] = ()) -> list[float]:
    """Two steps on a part of the batch, whose losses are to be summed over these axes."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        loss = model(part).square().sum() / ROWS
        for axis in summed:
            loss = spmd.reinterpret(loss, axis, src=spmd.V, dst=spmd.P)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1e9)
        with spmd.no_typecheck():
            losses.append(loss.detach().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


MESHES = {
    "tp": (("dp", "tp"), (2, 2), DataParallelMeshDims(shard="dp")),
    "hsdp": (("replicate", "dp"), (2, 2), DataParallelMeshDims(shard="dp", replicate="replicate")),
    "replicas and tp": (("dp", "tp"), (2, 2), DataParallelMeshDims(replicate="dp")),
    "joined": (("cp", "dp"), (2, 2), DataParallelMeshDims(shard=("cp", "dp"))),
}


@on_ranks(4)
@each_value(shape=MESHES, checked=[True, False])
def test_parity(rank: Rank, shape: str, checked: bool) -> None:
    """Losses, gradients and weights are those of the whole model on all ranks' batch, with types checked or not."""
    names, sizes, dims = MESHES[shape]
    mesh = init_device_mesh(rank.device.type, sizes, mesh_dim_names=names)
    reference, x = build(), torch.randn(ROWS, DIM)
    model, parts = copy.deepcopy(reference), mesh.size() if "tp" not in names else mesh["dp"].size()
    mine = x.chunk(parts)[rank.rank if "tp" not in names else mesh.get_local_rank("dp")]
    for block in model.blocks:
        block.cut(mesh, whole=True)
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(1.0)
    with spmd.set_current_mesh(mesh), checker.typecheck() if checked else contextlib.nullcontext():
        spmd.assert_type(mine, {name: spmd.I if name == "tp" else spmd.V for name in names})
        model.blocks[0].unshard(async_op=True).wait()
        model.blocks[0].reshard()
        with record() as recorded:
            losses = train(model, mine, [mesh.get_group(name) for name in names if name != "tp"])
    expected = train(reference, x)
    if "tp" in names:
        total = torch.tensor(losses)
        torch.distributed.all_reduce(total, group=mesh.get_group("dp"))
        assert_close(total, torch.tensor(expected), "losses", **CLOSE)
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, DTensor) and parameter.shape == whole.shape, name
        assert_close(parameter.full_tensor(), whole.detach(), name, **CLOSE)
    kinds = [event.kind for event in recorded]
    assert kinds.count("all_gather") == kinds.count("reduce_scatter") == (4 if dims.shard_names else 0)
    assert kinds.count("all_reduce") == (4 if dims.replicate_names else 0)  # sums over tp are none of the engine's


@on_ranks(4)
def test_what_a_program_sees(rank: Rank) -> None:
    """The sharded parameter is the DTensor on the whole mesh; unsharded it is plain, with its annotation."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    block = Block(True)
    block.cut(mesh, whole=True)
    types = {name: (spmd.get_local_type(p), spmd.get_partition_spec(p)) for name, p in block.named_parameters()}
    values = {name: p.detach().clone() for name, p in block.named_parameters()}
    fully_shard(block, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert block.scale.placements == (Shard(0), Replicate()) and block.scale.device_mesh == mesh
    assert block.down.placements == (Shard(0), Shard(1)) and block.down.shape == (DIM, HIDDEN)
    block.unshard()
    for name, parameter in block.named_parameters():
        assert type(parameter) is nn.Parameter
        assert (spmd.get_local_type(parameter), spmd.get_partition_spec(parameter)) == types[name]
        assert_equal(parameter.detach(), values[name], name)
    block.reshard()
    state = {name: torch.full_like(value, 2.0) for name, value in block.state_dict().items()}
    block.load_state_dict(state, assign=True)
    assert_equal(block.up.full_tensor(), torch.full((HIDDEN, DIM), 2.0), "up")


@on_ranks(4)
def test_microbatches_in_bf16(rank: Rank) -> None:
    """Sums over the axis tp are in the reduce dtype, after those of microbatches."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    x, dims = torch.randn(ROWS, DIM), DataParallelMeshDims(shard="dp")
    mine = x.chunk(2)[mesh.get_local_rank("dp")]
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = build()
        for block in model.blocks:
            block.cut(mesh, whole=True)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, mp_policy=policy)
        model.set_requires_gradient_sync(False)
        model(mine[:2]).square().sum().backward()
        model.set_requires_gradient_sync(True)
        model(mine[2:]).square().sum().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for exact, rounded in zip(*found, strict=True):
        assert_close(rounded, exact, "gradient", rtol=0.1, atol=0.05 * exact.abs().max().item())


@on_ranks(4)
def test_refused(rank: Rank) -> None:
    """Annotations that do not say how a parameter lies on the mesh; all ranks raise before anything is sharded."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("dp", "tp"))

    def shard(types: dict[str, Any]) -> nn.Module:
        module = nn.Linear(4, 4, bias=False)
        with spmd.set_current_mesh(mesh):
            spmd.assert_type(module.weight, types)
            return fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    assert shard({"tp": spmd.R}).weight.placements == (Shard(0), Replicate())  # replicated on what is left out
    with pytest.raises(ValueError, match=r"weight: annotated with spmd_types, but not on the axis 'tp'; expected R, I"):
        shard({"dp": spmd.R})
    with pytest.raises(ValueError, match=r"weight: expected spmd_types.R on the data-parallel axis \S+, found \S*I$"):
        shard({"dp": spmd.I, "tp": spmd.R})
    with pytest.raises(ValueError, match=r"weight: .*Varying"):
        shard({"dp": spmd.R, "tp": spmd.V})
    with pytest.raises(ValueError, match="found a plain tensor without placements on the axes"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    module = nn.Linear(4, 4, bias=False)
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(module.weight, {"tp": spmd.R})
    with pytest.raises(ValueError, match=r"weight: annotated with spmd_types on .* call fully_shard within"):
        fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    for refused in (fully_shard, replicate, lambda each, mesh: FullyShardedDataParallel(each, device_mesh=mesh)):
        with pytest.raises(ValueError, match=r"weight: annotated .* expected fully_shard\(mesh=..., dp_mesh_dims="):
            refused(module, mesh=mesh["dp"])
    cube = init_device_mesh(rank.device.type, (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    types = {"dp": spmd.R, "ep": spmd.V, "tp": spmd.V}
    for order, fits in ((("ep", "tp"), True), (("tp", "ep"), False)):
        module = nn.Linear(4, 4, bias=False)
        with spmd.set_current_mesh(cube):
            spmd.assert_type(module.weight, types, partition_spec=spmd.PartitionSpec(order, None))
        if fits:
            fully_shard(module, mesh=cube, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
            assert module.weight.shape == (16, 4)
        else:
            with pytest.raises(ValueError, match=r"weight: expected axes that shard one dim in the order of the mesh"):
                fully_shard(module, mesh=cube, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
