"""``shard_placement_fn``: which dim a parameter is cut on, and over which ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import (
    FSDPMeshInfo,
    FSDPModule,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from fullshard.comm import GlooTransport, record
from models import assert_at_rest, batch, reference_backward
from pairwise import each_value
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}


class Mixed(nn.Module):
    """Parameters of one to four dims, one of them transposed, one 0-D; many sizes that 2 and 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.tall = nn.Parameter(torch.randn(10, 7))
        self.transposed = nn.Parameter(torch.randn(5, 7).t())  # (7, 5), strides (1, 7)
        self.kernel = nn.Conv2d(1, 3, 2)  # weight (3, 1, 2, 2)
        self.experts = nn.Parameter(torch.randn(3, 8, 6) / 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) @ self.tall @ self.transposed / 5
        x = self.kernel(x[:, None, None].expand(-1, 1, 2, 5)).flatten(1)[:, :8]
        return torch.tanh(torch.einsum("bi,eij->bej", x, self.experts)).sum(1) * self.scale


def build() -> Mixed:
    torch.manual_seed(3)
    return Mixed()


def loss_of(model: nn.Module, number: int, step: int = 0) -> torch.Tensor:
    return model(batch(number, step, 4, 6)).square().mean()


def on_last(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim else None


def on_middle(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.ndim // 2) if parameter.ndim > 1 else None


def on_ones(parameter: nn.Parameter) -> Shard | None:
    """A dim of size 1 where there is one: all ranks but one are empty."""
    return Shard(1) if parameter.ndim == 4 else None


def by_hand(parameter: nn.Parameter) -> Shard | None:
    """Mixed in one unit: positive, negative, default."""
    return {3: Shard(-2), 2: Shard(1), 1: Shard(-1)}.get(parameter.ndim)


CHOICES: list[Callable[[nn.Parameter], Shard | None]] = [on_last, on_middle, on_ones, by_hand]


def train_beside(model: nn.Module, reference: nn.Module, rank: Rank, steps: int) -> None:
    """Adam steps on all ranks' batches; the gradients of the last one and the parameters agree."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, foreach=False) for m in (model, reference)]
    for step in range(steps):
        loss_of(model, rank.rank, step).backward()
        reference_backward(reference, rank.world_size, lambda m, r, step=step: loss_of(m, r, step))
        if step == steps - 1:
            assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **CLOSE)


# ---------------------------------------------------------------- Shard(dim)


@on_ranks(3)
@each_value(choose=[by_hand, on_ones, on_last], reshard=[True, False])
def test_trains_like_the_plain_module(rank: Rank, choose: Callable[..., Any], reshard: bool) -> None:
    """Whatever dims parameters are cut on, evenly or not, training equals the unsharded one's."""
    reference = build()
    model = copy.deepcopy(reference)
    fully_shard(model, mesh=rank.mesh, shard_placement_fn=choose, reshard_after_forward=reshard)
    train_beside(model, reference, rank, steps=2)
    assert_at_rest(model)


@on_ranks(4)
@pytest.mark.parametrize("choose", CHOICES, ids=lambda choice: choice.__name__)
def test_placements_and_values(rank: Rank, choose: Callable[..., Any]) -> None:
    """Placements are those asked for, negative dims counted; local parts are torch.chunk's, full tensors the whole."""
    reference = build()
    model = fully_shard(copy.deepcopy(reference), mesh=rank.mesh, shard_placement_fn=choose)
    for fqn, whole in reference.named_parameters():
        ours, wanted, whole = model.get_parameter(fqn), choose(whole), whole.detach()
        dim = wanted.dim % whole.ndim if wanted is not None else 0
        assert ours.placements == ((Shard(dim),) if whole.ndim else (Replicate(),)), fqn
        assert ours.shape == whole.shape and ours.stride() == whole.stride(), fqn
        assert_equal(ours.detach().full_tensor(), whole, fqn)
        if whole.ndim:
            chunks = whole.chunk(rank.world_size, dim)
            local = ours.detach().to_local()
            if rank.rank < len(chunks):
                expected = chunks[rank.rank]
                assert local.shape == expected.shape, fqn
                assert_equal(local.flatten(), expected.flatten(), f"local part of {fqn}")
            else:
                assert local.shape[dim] == 0 and local.numel() == 0, fqn


@on_ranks(2)
def test_state_dict_round_trip(rank: Rank) -> None:
    """A state dict of odd placements loads into another model of the same, by copy and by assignment.

    ``torch.save`` and ``copy.deepcopy`` take it, and the optimizer's, with their meshes.
    """
    model = fully_shard(build(), mesh=rank.mesh, shard_placement_fn=by_hand)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    loss_of(model, rank.rank).backward()
    optimizer.step()
    with record() as seen:
        state = model.state_dict()
    assert seen == []
    for assign in (False, True):
        other = fully_shard(build(), mesh=rank.mesh, shard_placement_fn=by_hand)
        other.load_state_dict({k: v.detach().clone() for k, v in state.items()}, assign=assign)
        for fqn, value in state.items():
            loaded = other.state_dict()[fqn]
            assert loaded.placements == value.placements
            assert_equal(loaded.full_tensor(), value.full_tensor(), fqn)
        assert_equal(loss_of(other, 0).detach(), loss_of(model, 0).detach(), "loss")
    for saved in (state, optimizer.state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(saved)):
            assert str(other) == str(saved)


@on_ranks(2)
def test_other_placements_cannot_be_assigned(rank: Rank) -> None:
    """A DTensor on other placements is refused with a word on redistribution."""
    model = fully_shard(build(), mesh=rank.mesh, shard_placement_fn=on_last)
    loss_of(model, rank.rank).backward()
    other = fully_shard(build(), mesh=rank.mesh)
    other.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"DTensor with placements \(Shard\(dim=1\),\).*redistribute it first"):
        loss_of(other, rank.rank)


@on_ranks(2)
def test_mixed_precision_and_accumulation(rank: Rank) -> None:
    """Odd dims with bf16 on the wire and fp32 sums: bitwise the gradients of the same parameters cut on dim 0."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = [
        fully_shard(build(), mesh=rank.mesh, mp_policy=policy, shard_placement_fn=choose)
        for choose in (by_hand, on_last, None)
    ]
    for model in models:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, rank.rank, step).backward()
    gradients = [{fqn: p.grad.full_tensor() for fqn, p in model.named_parameters()} for model in models]
    assert_equal(gradients[0], gradients[2], "gradients of by_hand")
    assert_equal(gradients[1], gradients[2], "gradients of on_last")


class Einsum(nn.Module):
    """One weight of (rows, 8, 8)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 8, 8, generator=torch.Generator().manual_seed(1)) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,rij->bj", x, self.weight)


@on_ranks(2)
def test_large_parameter(rank: Rank) -> None:
    """A parameter beyond the size from which it travels alone, cut on each of its dims."""
    for dim in (0, 1, -1):
        plain = Einsum(GlooTransport.direct_bytes // 4 // 8)
        model = fully_shard(copy.deepcopy(plain), mesh=rank.mesh, shard_placement_fn=lambda p, dim=dim: Shard(dim))
        model(batch(rank.rank, 0, 2, 8)).square().mean().backward()
        reference_backward(plain, rank.world_size, lambda m, r: m(batch(r, 0, 2, 8)).square().mean())
        assert_models_equal(model, plain, grads=True, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_called_once_per_parameter(rank: Rank) -> None:
    """The function sees every parameter of the call once, as it was: plain, and tied ones once only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    fully_shard(model[1], mesh=rank.mesh)
    seen: list[nn.Parameter] = []
    fully_shard(model, mesh=rank.mesh, shard_placement_fn=seen.append)
    assert [tuple(p.shape) for p in seen] == [(4, 4), (4,), (4,)]
    assert not any(isinstance(p, DTensor) for p in seen)


# ---------------------------------------------------------------- meshes of their own


class Moe(nn.Module):
    """A dense layer whose output goes through experts; every expert mesh holds the same experts or its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense(x))
        return sum(torch.tanh(expert(x)) for expert in self.experts) * self.scale


def moe(expert_seed: int = 0) -> Moe:
    torch.manual_seed(7)
    model = Moe()
    torch.manual_seed(100 + expert_seed)
    for expert in model.experts:
        expert.reset_parameters()
    return model


def expert_parameters(model: Moe) -> set[nn.Parameter]:
    return set(model.experts.parameters())


AXES = ("ep", "efsdp")


def mesh_infos(rank: Rank, shape: tuple[int, int] = (2, 2)) -> dict[str, Any]:
    """The expert's shard axis in the three ways in which it can be said."""
    mesh = rank.make_mesh(*shape, names=AXES)
    return {
        "DeviceMesh": mesh["efsdp"],
        "FSDPMeshInfo of a 1-D mesh": FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0),
        "FSDPMeshInfo of an axis": FSDPMeshInfo(mesh, shard_mesh_dim=1),
    }


def shard_moe(model: Moe, mesh: DeviceMesh, info: Any, dim: int | None = 0, **options: Any) -> Moe:
    own = expert_parameters(model)

    def choose(parameter: nn.Parameter) -> Any:
        placement = None if dim is None else Shard(dim if parameter.ndim > 1 else 0)
        return ShardPlacementResult(placement, info) if parameter in own else None

    return fully_shard(model, mesh=mesh, shard_placement_fn=choose, **options)


def expected_gradients(reference: Moe, rank: Rank, expert_ranks: list[int], step: int = 0) -> None:
    """Dense gradients are means over all ranks, those of experts over ``expert_ranks``."""
    gradients: list[dict[str, torch.Tensor]] = []
    for number in range(rank.world_size):
        reference.zero_grad()
        loss_of(reference, number, step).backward()
        gradients.append({fqn: p.grad.clone() for fqn, p in reference.named_parameters()})
    for fqn, parameter in reference.named_parameters():
        over = expert_ranks if fqn.startswith("experts") else range(rank.world_size)
        parameter.grad = torch.stack([gradients[r][fqn] for r in over]).mean(0)


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        ("DeviceMesh", -1),
        ("FSDPMeshInfo of a 1-D mesh", None),
        ("FSDPMeshInfo of an axis", 0),
    ],
)
def test_experts_on_an_axis_of_their_own(rank: Rank, kind: str, dim: int | None) -> None:
    """Experts are sharded and averaged over their own ranks only, everything else over all; on any dim."""
    info = mesh_infos(rank)[kind]
    first = rank.rank // 2 * 2
    reference = moe()
    model = shard_moe(copy.deepcopy(reference), rank.mesh, info, dim)
    assert model.experts[0].weight.placements == (Shard((dim or 0) % 2),)
    assert model.experts[0].weight.device_mesh.size() == 2
    assert model.dense.weight.device_mesh.size() == 4
    for fqn, p in reference.named_parameters():
        assert_equal(model.get_parameter(fqn).detach().full_tensor(), p.detach(), fqn)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05, foreach=False) for m in (model, reference)]
    loss_of(model, rank.rank).backward()
    expected_gradients(reference, rank, [first, first + 1])
    assert_models_equal(model, reference, grads=True, **CLOSE)
    for optimizer in optimizers:
        optimizer.step()
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(4)
def test_experts_that_differ_by_mesh(rank: Rank) -> None:
    """Each expert mesh keeps its own experts: they neither mix in the gather nor in the reduction."""
    info = mesh_infos(rank)["DeviceMesh"]
    first = rank.rank // 2 * 2
    model = shard_moe(moe(first), rank.mesh, info)
    references = [moe(0), moe(0), moe(2), moe(2)]
    gradients = []
    for number, reference in enumerate(references):
        loss_of(reference, number).backward()
        gradients.append({fqn: p.grad for fqn, p in reference.named_parameters()})
    loss = loss_of(model, rank.rank)
    assert_close(loss.detach(), loss_of(references[rank.rank], rank.rank).detach(), "loss", rtol=1e-6)
    loss.backward()
    for fqn, p in model.named_parameters():
        over = [first, first + 1] if fqn.startswith("experts") else range(4)
        assert_close(p.grad.full_tensor(), torch.stack([gradients[r][fqn] for r in over]).mean(0), fqn, **CLOSE)


@on_ranks(4)
def test_messages_of_several_meshes(rank: Rank) -> None:
    """One gather and one reduction per mesh, each with the bytes of its own ranks."""
    model = shard_moe(moe(), rank.mesh, mesh_infos(rank)["DeviceMesh"], reshard_after_forward=True)
    for _ in range(2):
        with record() as seen:
            loss_of(model, rank.rank).backward()
    assert [c.kind for c in seen] == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    shares = {(c.kind, c.nbytes / (c.numel * c.dtype.itemsize)) for c in seen}
    assert shares == {
        ("all_gather", 3 / 4),
        ("all_gather", 1 / 2),
        ("reduce_scatter", 3 / 4),
        ("reduce_scatter", 1 / 2),
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
    reference = moe()
    model = shard_moe(copy.deepcopy(reference), dense_mesh, info, None if case == "replicate only" else 0)
    assert model.experts[0].weight.placements == placements
    assert model.experts[0].weight.device_mesh.size() == 4
    assert_equal(model.experts[0].weight.full_tensor().detach(), reference.experts[0].weight.detach(), "expert")
    train_beside(model, reference, rank, steps=1)


@on_ranks(4)
def test_partial_all_reduce_touches_replicated_experts_only(rank: Rank) -> None:
    """``set_requires_all_reduce(False)`` waits for the replicate axis of the experts; the dense part is through."""
    mesh = rank.make_mesh(2, 2, names=("er", "es"))
    reference = moe()
    model = shard_moe(copy.deepcopy(reference), rank.mesh, mesh)
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        with record() as seen:
            loss_of(model, rank.rank, step).backward()
        reference_backward(reference, 4, lambda m, r, step=step: loss_of(m, r, step))
        assert [c.kind for c in seen if c.kind != "all_gather"] == ["reduce_scatter"] * 2 + ["all_reduce"] * (step == 2)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
def test_units_of_experts(rank: Rank) -> None:
    """Each expert a unit of its own on the experts' mesh (``mesh=``) below a root on all ranks."""
    mesh = rank.make_mesh(2, 2, names=AXES)
    for reshard in (True, False):
        reference = moe()
        model = copy.deepcopy(reference)
        for expert in model.experts:
            fully_shard(expert, mesh=mesh["efsdp"], reshard_after_forward=reshard)
        fully_shard(model, mesh=rank.mesh, reshard_after_forward=reshard)
        first = rank.rank // 2 * 2
        loss_of(model, rank.rank).backward()
        expected_gradients(reference, rank, [first, first + 1])
        assert_models_equal(model, reference, grads=True, **CLOSE)


# ---------------------------------------------------------------- refusals


# What a shard_placement_fn returns, and the words of the refusal. See test_arguments.py for more of them.
REFUSED: dict[str, str] = {
    "Partial()": r"shard_placement_fn returned Partial.* for 0\.weight",
    "(Shard(0), mesh)": r"shard_placement_fn returned .* for 0\.weight",
    "Shard": r"shard_placement_fn returned .*Shard.* for 0\.weight",
    "Result(Shard(0), 3)": r"mesh_info of type int for 0\.weight; expected FSDPMeshInfo",
    "Result(Shard(0), cube)": "mesh: expected 1 dimension, or 2",
    "Result(Replicate(), mesh)": r"returned Replicate\(\) for 0\.weight",
    "Result(Shard(5), mesh)": r"Shard\(5\) for 0\.weight, which has 2 dims",
}


@on_ranks(1, 2)
def test_wrong_result_is_refused(rank: Rank) -> None:
    """On every rank, with the parameter's name, and nothing is changed; the user's own exception comes through."""
    names = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "Result": ShardPlacementResult}
    cube = rank.make_mesh(1, 1, rank.world_size, names=("a", "b", "c"))

    def raising(parameter: nn.Parameter) -> None:
        if parameter.ndim == 1:
            raise KeyError("bias")

    functions: dict[Callable[..., Any], tuple[type[Exception], str]] = {raising: (KeyError, "bias")}
    for expression, words in REFUSED.items():
        result = eval(expression, {**names, "mesh": rank.mesh, "cube": cube})
        functions[lambda p, result=result: result] = (ValueError, words)
    for function, (error, words) in functions.items():
        model = nn.Sequential(nn.Linear(6, 4))
        with pytest.raises(error, match=f"(?s){words}"):
            fully_shard(model, mesh=rank.mesh, shard_placement_fn=function)
        assert not isinstance(model, FSDPModule) and type(model[0].weight) is nn.Parameter
        fully_shard(model, mesh=rank.mesh)
        model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"Shard\(0\) for scale, which has 0 dims"):
        fully_shard(build(), mesh=rank.mesh, shard_placement_fn=lambda p: Shard(0) if p.ndim == 0 else None)
