"""Parameters that are DTensors already, of tensor parallelism or on the whole mesh: they are cut once more."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

from compare import assert_close, assert_equal, assert_models_equal
from front_ends import both_backward
from fullshard import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from models import assert_at_rest, batch, reference_backward
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}
TWO = ("dp", "tp")
THREE = ("replicate", "shard", "tp")


class Layer(nn.Module):
    """Norm, up, down, with a residual around them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two layers between a linear one and a head, on (batch, sequence, dim); a 0-D parameter scales the output."""

    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(6, dim)
        self.layers = nn.ModuleList(Layer(dim, hidden) for _ in range(2))
        self.head = nn.Linear(dim, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def build(dim: int = 8, hidden: int = 16) -> Net:
    torch.manual_seed(5)
    return Net(dim, hidden)


def cut_by_columns_and_rows(model: Net, tp: DeviceMesh) -> Net:
    """Tensor parallelism inside the layers; everything else stays plain."""
    for layer in model.layers:
        parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def cut_by_sequence(model: Net, tp: DeviceMesh) -> Net:
    """Tensor and sequence parallelism of all but the 0-D parameter: norms replicated, their gradients partial."""
    plan: dict[str, Any] = {
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.layers)):
        plan[f"layers.{i}.norm"] = SequenceParallel()
        plan[f"layers.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, tp, plan)


STYLES: dict[str, Callable[[Net, DeviceMesh], Net]] = {
    "columns and rows": cut_by_columns_and_rows,
    "sequence": cut_by_sequence,
}


def shard(model: Net, data_parallel: DeviceMesh, **options: Any) -> Net:
    for layer in model.layers:
        fully_shard(layer, mesh=data_parallel, **options)
    return fully_shard(model, mesh=data_parallel, **options)


def loss_of(model: nn.Module, number: int, step: int = 0) -> torch.Tensor:
    return model(batch(number, step, 3, 4, 6)).square().mean()


class Training:
    """A model on its mesh beside an unsharded one, both trained on the same data."""

    def __init__(self, mesh: DeviceMesh, style: str = "sequence", model: Net | None = None, **options: Any) -> None:
        self.reference = build() if model is None else model
        names = mesh.mesh_dim_names
        assert names is not None
        data_parallel = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
        cut = STYLES[style](copy.deepcopy(self.reference), mesh["tp"])
        self.model = shard(cut, data_parallel, **options)
        self.size = data_parallel.size()
        self.number = mesh.get_rank() // mesh["tp"].size()  # of this rank's batch
        models = (self.model, self.reference)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, foreach=False) for m in models]

    def backward(self, step: int = 0) -> None:
        """One backward of both."""
        loss_of(self.model, self.number, step).backward()
        reference_backward(self.reference, self.size, functools.partial(loss_of, step=step))

    def step(self) -> None:
        """Let both optimizers step."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self, *, grads: bool = False) -> None:
        """Parameters, and gradients if asked for, equal those of the unsharded model."""
        assert_models_equal(self.model, self.reference, grads=grads, **CLOSE)


def axes(*shape: int) -> tuple[str, ...]:
    """Names for a mesh of this shape."""
    return TWO if len(shape) == 2 else THREE


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "style", "size", "reshard", "setter"),
    [
        ((2, 2), "sequence", (3, 2), True, "set_requires_gradient_sync"),
        ((4, 1), "sequence", (8, 16), 2, "set_requires_gradient_sync"),
        ((2, 1, 2), "columns and rows", (7, 10), False, "set_requires_all_reduce"),
    ],
    ids=str,
)
def test_trains_like_the_plain_module(
    rank: Rank, shape: tuple[int, ...], style: str, size: tuple[int, int], reshard: Any, setter: str
) -> None:
    """Data (and replicate) x tensor parallel, whichever axis has size 1, and rows that no axis divides."""
    training = Training(rank.make_mesh(*shape, names=axes(*shape)), style, build(*size), reshard_after_forward=reshard)
    for layer in training.model.layers:
        layer.checkpointed = reshard is True
    received = []
    for step, last in enumerate((False, True)):
        getattr(training.model, setter)(last)
        with record() as seen:
            training.backward(step)
        received.append(sum(c.nbytes for c in seen if c.kind == "all_gather"))
        assert last or setter != "set_requires_gradient_sync" or {c.kind for c in seen} <= {"all_gather"}
    training.check(grads=True)
    training.step()
    training.check()
    assert_at_rest(training.model)
    with record() as forward:
        loss_of(training.model, training.number)
    if reshard == 2:  # half of what crosses the network, 1/2 instead of 3/4 of each unsharded parameter
        assert received[1] < 2 * sum(c.nbytes for c in forward)


@on_ranks(4)
def test_mixed_precision(rank: Rank) -> None:
    """bf16 compute and fp32 reduce: fp32 shards and gradients, bf16 all-gathers, fp32 reductions."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = Training(rank.make_mesh(2, 2, names=TWO), mp_policy=policy)
    with record() as seen:
        training.backward()
    assert {c.dtype for c in seen if c.kind == "all_gather"} == {torch.bfloat16}
    assert {c.dtype for c in seen if c.kind == "reduce_scatter"} == {torch.float32}
    for parameter in training.model.parameters():
        assert parameter.dtype is parameter.grad.dtype is torch.float32
    assert_models_equal(training.model, training.reference, grads=True, rtol=0.05, atol=0.01)


@on_ranks(4)
def test_placements_and_local_rows(rank: Rank) -> None:
    """Rows cut twice are a ``_StridedShard`` on the data-parallel axis; other parameters keep their own placement."""
    mesh = rank.make_mesh(1, 2, 2, names=THREE)
    training = Training(mesh, model=build(6, 10))
    layer, twice = training.model.layers[0], _StridedShard(0, split_factor=2)
    assert layer.up.weight.placements == layer.up.bias.placements == (Replicate(), twice, Shard(0))
    assert layer.down.weight.placements == (Replicate(), Shard(0), Shard(1))
    assert layer.down.bias.placements == layer.norm.weight.placements == (Replicate(), Shard(0), Replicate())
    assert training.model.scale.placements == (Replicate(), Replicate())  # plain: not on the tensor-parallel axis
    assert {p.device_mesh.mesh_dim_names for p in layer.parameters()} == {THREE}
    for fqn, whole in training.reference.named_parameters():
        ours, part = training.model.get_parameter(fqn), whole.detach()
        assert_equal(ours.detach().full_tensor(), part, fqn)
        if isinstance(ours.placements[-1], Shard) and "tp" in ours.device_mesh.mesh_dim_names:
            part = part.chunk(2, dim=ours.placements[-1].dim)[mesh["tp"].get_local_rank()]
        part = part.chunk(2, dim=0)[mesh["shard"].get_local_rank()] if part.ndim else part
        assert_equal(ours.detach().to_local(), part, f"local rows of {fqn}")
    training.backward()
    for parameter in training.model.parameters():
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.device_mesh == parameter.device_mesh


@on_ranks(4)
def test_state_dict(rank: Rank) -> None:
    """State dicts hold DTensors on the live shards, without communication, and load by copy and by assignment."""
    mesh = rank.make_mesh(2, 2, names=TWO)
    training = Training(mesh, model=build(6, 10))
    with record() as seen:
        state = training.model.state_dict()
    assert seen == [] and set(state) == set(training.reference.state_dict())
    for fqn, value in state.items():
        live = training.model.get_parameter(fqn)
        assert (value.placements, value.to_local().data_ptr()) == (live.placements, live.to_local().data_ptr())
    for assign in (False, True):
        other = Training(mesh, model=build(6, 10))
        other.model.load_state_dict({fqn: value.detach() * 2 for fqn, value in state.items()}, assign=assign)
        other.reference.load_state_dict({k: 2 * value for k, value in training.reference.state_dict().items()})
        other.backward()
        other.check(grads=True)


@on_ranks(4)
def test_clipping(rank: Rank) -> None:
    """torch's own ``clip_grad_norm_`` clips to the norm of the unsharded model, also beside frozen parameters."""
    training = Training(rank.make_mesh(2, 2, names=TWO))
    for model in (training.model, training.reference):
        model.layers[0].requires_grad_(False)
        model.layers[1].up.bias.requires_grad_(False)
    training.backward()
    training.check(grads=True)
    models = (training.model, training.reference)
    ours, theirs = (
        [p for fqn, p in m.named_parameters() if fqn != "scale"] for m in models
    )  # scale is not on all axes
    for norm_type, largest in ((2.0, 0.01), (float("inf"), 0.001)):
        total = torch.nn.utils.clip_grad_norm_(ours, largest, norm_type, foreach=False)
        expected = torch.nn.utils.clip_grad_norm_(theirs, largest, norm_type)
        assert_close(total.full_tensor(), expected, f"total norm {norm_type}", **CLOSE)
    training.check(grads=True)


def whole() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))


def distribute(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Rows and columns over the last axis, everything replicated over the others."""
    last: dict[str, Any] = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
    for fqn, parameter in list(model.named_parameters()):
        name, key = fqn.split(".")
        placements = [*[Replicate()] * (mesh.ndim - 1), last.get(fqn, Replicate())]
        placed = distribute_tensor(parameter.detach(), mesh, placements)
        model.get_submodule(name).register_parameter(key, nn.Parameter(placed))
    return model


def whole_loss(
    model: nn.Module, number: int, mesh: DeviceMesh | None = None, step: int = 0, data: int | None = None
) -> torch.Tensor:
    """The loss of one rank's batch; on a mesh as its part of a batch that is cut over the ``data`` first axes."""
    x = batch(number, step, 3, 6)
    if mesh is None:
        return model(x).square().mean()
    data = mesh.ndim - 1 if data is None else data
    placements = [*[Shard(0)] * data, *[Replicate()] * (mesh.ndim - data)]
    output = model(DTensor.from_local(x, mesh, placements, run_check=False))
    return output.redistribute(placements=placements).to_local().square().mean()


# The mesh, the axes that are data-parallel, and what becomes of rows that are cut over the last one.
DIMS: list[tuple[tuple[int, ...], DataParallelMeshDims, tuple[Any, ...]]] = [
    ((2, 2), DataParallelMeshDims(shard="dp"), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), DataParallelMeshDims(replicate="dp"), (Replicate(), Shard(0))),
    (
        (1, 2, 2),
        DataParallelMeshDims(shard="shard", replicate="replicate"),
        (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
    ),
    ((2, 2, 1), DataParallelMeshDims(shard=("replicate", "shard")), (Shard(0), Shard(0))),
    ((1, 2, 2), DataParallelMeshDims(shard=("replicate", "shard")), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2, 1), DataParallelMeshDims(replicate=("replicate", "shard")), (Replicate(), Replicate(), Shard(0))),
]


@on_ranks(4)
def test_axes_of_the_whole_mesh(rank: Rank) -> None:
    """``dp_mesh_dims``: the shard axis gets ``Shard(0)`` or ``_StridedShard``; several become one; replicas stay."""
    for case, (shape, dims, placements) in enumerate(DIMS):
        mesh = rank.make_mesh(*shape, names=axes(*shape))
        reference = whole()
        model = fully_shard(distribute(copy.deepcopy(reference), mesh), mesh=mesh, dp_mesh_dims=dims)
        weight = model[0].weight
        assert weight.placements == placements, case
        assert weight.device_mesh.ndim == len(placements)
        if len(placements) == mesh.ndim:
            assert weight.device_mesh == mesh
        assert_equal(weight.detach().full_tensor(), reference[0].weight.detach(), str(case))
        assert list(model.state_dict()) == list(reference.state_dict())
        ranks = 4 // mesh["tp"].size()
        for step in range(2) if case in (0, 2) else ():
            model.set_requires_gradient_sync(step == 1)
            whole_loss(model, rank.rank // mesh["tp"].size(), mesh, step).backward()
            reference_backward(reference, ranks, functools.partial(whole_loss, step=step))
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize("names", [("shard",), ("replicate", "shard")], ids=["shard", "hybrid"])
def test_plain_parameters_where_all_axes_are_data_parallel(rank: Rank, names: tuple[str, ...]) -> None:
    """Plain parameters are replicated over the replicate axis and sharded over the shard axis."""
    mesh = rank.make_mesh(*((2, 2) if len(names) == 2 else (4,)), names=names)
    dims = DataParallelMeshDims(**{name: name for name in names})
    reference = whole()
    model = copy.deepcopy(reference)
    for module in (model[2], model):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    assert model[0].weight.placements == (*[Replicate()] * (len(names) - 1), Shard(0))
    both_backward(model, reference, rank, whole_loss)
    assert_models_equal(model, reference, grads=True, **CLOSE)


class Scaled(nn.Module):
    """Multiplies a replicated weight by this rank's own part of the batch: its gradient is a sum over the TP axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self.weight.device_mesh  # type: ignore[attr-defined]
        local = self.weight.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        assert mesh.size() == 2
        return local * x


@on_ranks(4)
def test_reduce_dtype_of_sums_over_the_own_axis(rank: Rank) -> None:
    """Partial gradients are added up over the tensor-parallel axis in ``reduce_dtype``, as over the others."""
    mesh = rank.make_mesh(2, 2, names=TWO)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(Scaled(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    x = torch.full((4,), 256.0 if mesh["tp"].get_local_rank() == 0 else 1.0, device=rank.device)
    for times, sync in ((1, True), (2, False), (3, True)):
        model.set_requires_gradient_sync(sync)
        model(x).sum().backward()
        if sync:
            expected = torch.full((4,), 257.0 * times)  # 256 in bfloat16
            assert_equal(model.weight.grad.full_tensor(), expected, "gradient")
