"""``dp_mesh_dims``: parameters are DTensors on the whole mesh already, some of whose axes are data-parallel."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import DataParallelMeshDims, FSDPMeshInfo, fully_shard
from fullshard.comm import record
from models import batch, reference_backward
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}
TWO = ("dp", "tp")
THREE = ("replicate", "shard", "tp")


class OnWholeMesh(nn.Module):
    """Linear layers that compute with DTensors on the whole mesh; the loss is this data-parallel rank's own."""

    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def build_whole(dim: int = 8, hidden: int = 12) -> OnWholeMesh:
    torch.manual_seed(6)
    return OnWholeMesh(dim, hidden)


def distribute(model: OnWholeMesh, mesh: DeviceMesh) -> OnWholeMesh:
    """Rows and columns over the last axis, everything replicated over the others; batches cut over those."""
    others = [Replicate()] * (mesh.ndim - 1)
    last: dict[str, Any] = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

    for name, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            assert parameter is not None
            fqn = f"{name}.{key}" if name else key
            placed = distribute_tensor(parameter.detach(), mesh, [*others, last.get(fqn, Replicate())])
            module.register_parameter(key, nn.Parameter(placed))
    return model


def whole_loss(model: nn.Module, number: int, mesh: DeviceMesh | None = None, step: int = 0) -> torch.Tensor:
    """The loss of one data-parallel rank's batch, on a mesh as that rank's part of a batch that is cut."""
    x = batch(number, step, 3, 6)
    if mesh is None:
        return model(x).square().mean()
    placements = [*[Shard(0)] * (mesh.ndim - 1), Replicate()]
    output = model(DTensor.from_local(x, mesh, placements, run_check=False))
    return output.redistribute(placements=placements).to_local().square().mean()


DIMS: dict[str, tuple[tuple[str, ...], tuple[int, ...], DataParallelMeshDims]] = {
    "shard": (TWO, (2, 2), DataParallelMeshDims(shard="dp")),
    "replicate": (TWO, (2, 2), DataParallelMeshDims(replicate="dp")),
    "both, 122": (THREE, (1, 2, 2), DataParallelMeshDims(shard="shard", replicate="replicate")),
    "two to shard": (THREE, (2, 2, 1), DataParallelMeshDims(shard=("replicate", "shard"))),
    "two to shard, 122": (THREE, (1, 2, 2), DataParallelMeshDims(shard=("replicate", "shard"))),
    "two of replicas": (THREE, (2, 2, 1), DataParallelMeshDims(replicate=("replicate", "shard"))),
}


@on_ranks(4)
@pytest.mark.parametrize(("case", "steps"), [("shard", 2), ("both, 122", 0)])
def test_whole_mesh_trains_like_the_plain_module(rank: Rank, case: str, steps: int) -> None:
    """DTensors on all axes, with the data-parallel ones named: means over those, whatever their shape.

    Gradients come partial on the data-parallel axes, and stay so until the reduction.
    """
    names, shape, dims = DIMS[case]
    mesh = rank.make_mesh(*shape, names=names)
    reference = build_whole(5, 6)
    model = fully_shard(distribute(copy.deepcopy(reference), mesh), mesh=mesh, dp_mesh_dims=dims)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, foreach=False) for m in (model, reference)]
    for step in range(steps):
        whole_loss(model, rank.rank // 2, mesh, step).backward()
        reference_backward(reference, 2, functools.partial(whole_loss, step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    whole_loss(model, rank.rank // 2, mesh, steps).backward()
    reference_backward(reference, 2, functools.partial(whole_loss, step=steps))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_equal(list(model.state_dict()), list(reference.state_dict()), "keys")


@on_ranks(4)
def test_placements_on_the_whole_mesh(rank: Rank) -> None:
    """The shard axis gets ``Shard(0)`` or ``_StridedShard``; several axes become one; replicas stay as they are."""
    expected = {
        "shard": (_StridedShard(0, split_factor=2), Shard(0)),
        "replicate": (Replicate(), Shard(0)),
        "both, 122": (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
        "two to shard": (Shard(0), Shard(0)),
        "two to shard, 122": (_StridedShard(0, split_factor=2), Shard(0)),
        "two of replicas": (Replicate(), Replicate(), Shard(0)),
    }
    for case, placements in expected.items():
        names, shape, dims = DIMS[case]
        mesh = rank.make_mesh(*shape, names=names)
        model = fully_shard(distribute(build_whole(), mesh), mesh=mesh, dp_mesh_dims=dims)
        assert model.up.weight.placements == placements, case
        assert model.up.weight.device_mesh.ndim == len(placements)
        if len(placements) == mesh.ndim:
            assert model.up.weight.device_mesh == mesh
        assert_equal(model.up.weight.detach().full_tensor(), build_whole().up.weight.detach(), case)


@on_ranks(4)
def test_module_distributed_as_a_whole(rank: Rank) -> None:
    """``distribute_module`` without a partition function replicates everything: data parallelism over both axes."""
    mesh = rank.make_mesh(2, 2, names=TWO)
    kinds = {"shard": {"all_gather", "reduce_scatter"}, "replicate": {"all_reduce"}}
    for axis, expected in kinds.items():
        reference = build_whole()
        model = distribute_module(copy.deepcopy(reference), mesh)
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**{axis: TWO}))
        with record() as seen:
            x = DTensor.from_local(batch(rank.rank, 0, 3, 6), mesh, [Shard(0), Shard(0)], run_check=False)
            model(x).to_local().square().mean().backward()
        reference_backward(reference, 4, whole_loss)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert {c.kind for c in seen} == expected


@on_ranks(4)
def test_accumulation_on_the_whole_mesh(rank: Rank) -> None:
    """Microbatches without sync add up where tensor parallelism left them, and stay partial."""
    mesh = rank.make_mesh(2, 2, names=TWO)
    reference = build_whole()
    model = distribute(copy.deepcopy(reference), mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        whole_loss(model, rank.rank // 2, mesh, step).backward()
        reference_backward(reference, 2, functools.partial(whole_loss, step=step))
    assert_models_equal(model, reference, grads=True, **CLOSE)


# ---------------------------------------------------------------- refusals


def placed(mesh: DeviceMesh, *placements: Any) -> nn.Linear:
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    return module


# What is refused beyond test_arguments.py -> a regular expression for "ErrorType: message".
REFUSED: dict[str, str] = {
    "fully_shard(placed(two, Shard(1), Replicate()), mesh=two, dp_mesh_dims=Dims(replicate='dp'))": (
        r"ValueError: .*weight: expected Replicate\(\) on the data-parallel axis 'dp'"
    ),
    "fully_shard(nn.Linear(4, 4), mesh=two, dp_mesh_dims=Dims('dp'))": (
        "ValueError: .*all parameters have to be DTensors on the mesh; weight is a plain tensor.*distribute_module"
    ),
    "fully_shard(placed(two['tp'], Shard(0)), mesh=two, dp_mesh_dims=Dims('dp'))": (
        "ValueError: .*weight: expected a DTensor on the mesh passed to fully_shard.*found one on"
    ),
    "fully_shard(placed(unnamed, Replicate(), Shard(0)), mesh=unnamed, dp_mesh_dims=Dims('dp'))": (
        r"ValueError: .*dp_mesh_dims names \['dp'\], but the axes of the mesh are \[\]"
    ),
    "fully_shard(placed(mesh, Shard(0)), mesh=two['dp'])": (
        "ValueError: .*weight: expected the DTensor's mesh, .*, and the data-parallel mesh, .* different named axes"
    ),
    "fully_shard(placed(two['dp'], Shard(0)), mesh=two['dp'])": (
        "ValueError: .*weight: expected the DTensor's mesh, .* different named axes of one mesh"
    ),
    "fully_shard(placed(two['tp'], Shard(0)), mesh=two['dp'], reshard_after_forward=3)": (
        "ValueError: .*reshard_after_forward: expected a divisor of the 2 ranks of the shard axis, found 3"
    ),
    "fully_shard(nn.Linear(4, 4), mesh=three)": "ValueError: .*expected 1 dimension, or 2 .*found 3.*dp_mesh_dims",
    "FSDPMeshInfo(two['dp'], 0, dp_mesh_dims=Dims('dp'))": (
        "ValueError: FSDPMeshInfo: found dp_mesh_dims without spmd_mesh; pass both or neither"
    ),
    "FSDPMeshInfo(two['dp'], 0, spmd_mesh=two)": "ValueError: .*found spmd_mesh without dp_mesh_dims",
}


@on_ranks(4)
def test_wrong_argument_is_refused(rank: Rank) -> None:
    """Every rank raises, saying what was expected and found."""
    names = {
        "placed": placed,
        "fully_shard": fully_shard,
        "Dims": DataParallelMeshDims,
        "FSDPMeshInfo": FSDPMeshInfo,
        "nn": nn,
        "Shard": Shard,
        "Replicate": Replicate,
        "mesh": rank.mesh,
        "two": rank.make_mesh(2, 2, names=TWO),
        "unnamed": rank.make_mesh(2, 2),
        "three": rank.make_mesh(1, 2, 2, names=THREE),
    }
    for expression, words in REFUSED.items():
        with pytest.raises(Exception) as raised:
            eval(expression, names)
        message = f"{raised.type.__name__}: {raised.value}"
        assert re.search(words, message, re.DOTALL), f"{expression}: {message}"


@pytest.mark.parametrize("replicate", [False, True], ids=["shard", "hybrid"])
@on_ranks(4)
def test_plain_parameters_where_all_axes_are_data_parallel(rank: Rank, replicate: bool):
    """There is one thing that dp_mesh_dims can mean then; with another axis a plain tensor says too little."""
    names = ("replicate", "shard") if replicate else ("shard",)
    mesh = rank.make_mesh(*((2, 2) if replicate else (4,)), names=names)
    dims = DataParallelMeshDims(shard="shard", replicate="replicate" if replicate else None)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = copy.deepcopy(reference)
    fully_shard(model[2], mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model[0].weight.placements == ((Replicate(),) if replicate else ()) + (Shard(0),)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model(x[2 * rank.rank : 2 * rank.rank + 2]).square().mean().backward()
    reference(x).square().mean().backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(found.grad.full_tensor(), expected.grad, "gradient", rtol=1e-5, atol=1e-7)
    if not replicate:
        other = rank.make_mesh(2, 2, names=("shard", "tp"))
        with pytest.raises(ValueError, match=r"is a plain tensor without placements on \['tp'\]"):
            fully_shard(nn.Linear(4, 4), mesh=other, dp_mesh_dims=DataParallelMeshDims(shard="shard"))
