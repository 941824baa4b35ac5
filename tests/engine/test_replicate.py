"""``replicate``: every rank keeps everything, gradients are averaged while backward goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.nn.parallel import DistributedDataParallel

from compare import assert_equal, assert_models_equal
from fullshard import (
    DataParallelMeshDims,
    FSDPModule,
    ReplicateModule,
    fully_shard,
    replicate,
)
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import (
    Branch,
    Stack,
    batch,
    packed_numel,
    reference_backward,
    square_loss,
    tiny_units,
    transport_of,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}


def build() -> Stack:
    torch.manual_seed(4)
    return Stack()


def by_blocks(model: nn.Module, rank: Rank, **options: Any) -> Any:
    for block in model.blocks:
        replicate(block, mesh=rank.mesh, **options)
    return replicate(model, mesh=rank.mesh, **options)


def whole(model: nn.Module, rank: Rank, **options: Any) -> Any:
    return replicate(model, mesh=rank.mesh, **options)


WAYS: list[Callable[..., Any]] = [by_blocks, whole]


def ways(function: Callable[..., Any]) -> Any:
    return pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)(function)


# ---------------------------------------------------------------- training


@on_ranks(1, 4)
@ways
def test_trains_like_the_plain_module(rank: Rank, make: Callable[..., Any]) -> None:
    """Gradients and parameters equal the unsharded ones and DDP's over Adam steps, bitwise the same on all ranks."""
    reference = build()
    model = make(copy.deepcopy(reference), rank)
    ddp = DistributedDataParallel(copy.deepcopy(reference))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (model, reference, ddp)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for one in (model, ddp):
            square_loss(step)(one, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        for optimizer in optimizers:
            optimizer.step()
    for other in (reference, ddp.module):
        assert_models_equal(model, other, grads=True, **CLOSE)
    for fqn, parameter in model.named_parameters():
        for what, value in (("value", parameter.detach()), ("gradient", parameter.grad)):
            local = value.to_local().contiguous()
            everyone = [torch.empty_like(local) for _ in range(rank.world_size)]
            torch.distributed.all_gather(everyone, local)
            assert_equal(everyone, [local] * rank.world_size, f"{what} of {fqn}")


@on_ranks(2)
def test_gradients_missing_on_some_ranks(rank: Rank) -> None:
    """Where some ranks had no gradient it counts as zeros; where none had one it stays None, or zeros if asked."""
    torch.manual_seed(1)
    for zeros in (False, True):
        reference = Branch()
        model = replicate(copy.deepcopy(reference), mesh=rank.mesh)
        model.set_reduce_scatter_unused_params(zeros)

        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            module.rank = number
            return module(batch(number, 0, 4, 6)).square().mean()

        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        if zeros:
            assert not model.never.weight.grad.to_local().any()
            for parameter in reference.never.parameters():
                parameter.grad = torch.zeros_like(parameter)
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2)
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce", None])
def test_accumulation(rank: Rank, setting: str | None) -> None:
    """Microbatches add up, whether all are reduced or the last only; without sync, or on one rank, nothing is sent."""
    reference = build()
    model = by_blocks(copy.deepcopy(reference), rank)
    for step in range(3):
        if setting is not None:
            getattr(model, setting)(step == 2)
        with record() as seen:
            square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        reduced = setting is None or step == 2
        assert bool(seen) == (reduced and rank.world_size > 1)
        assert rank.world_size == 1 or (model.last.weight.grad is not None) == reduced
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_half_precision_does_not_overflow(rank: Rank) -> None:
    """fp16 gradients near the largest number are divided before they are summed."""
    model = nn.Linear(1, 4, bias=False).half()
    replicate(model, mesh=rank.mesh)
    (model(torch.ones(1, 1, dtype=torch.float16)) * 40000).sum().backward()
    assert_equal(model.weight.grad.to_local(), torch.full((4, 1), 40000.0, dtype=torch.float16), "gradient")


@on_ranks(2)
def test_all_reduce_hook_and_divide_factor(rank: Rank) -> None:
    """The sum is divided by what was asked for; a hook sees what was all-reduced, and what it leaves counts."""
    reference = build()
    model = replicate(copy.deepcopy(reference))  # without a mesh all ranks are meant
    numels: list[int] = []

    def hook(rows: torch.Tensor) -> None:
        numels.append(rows.numel())
        rows.mul_(3)

    model.set_all_reduce_hook(hook)
    model.set_gradient_divide_factor(5.0)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    for parameter in reference.parameters():
        parameter.grad *= 3 * 2 / 5
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert sum(numels) >= sum(p.numel() for p in reference.parameters())


# ---------------------------------------------------------------- what travels, what is registered


@on_ranks(2, 4)
def test_messages(rank: Rank) -> None:
    """Nothing is gathered; each unit is all-reduced once, in backward's order, in predictable bytes.

    A large parameter is all-reduced by itself, without a copy into a message.
    """
    with tiny_units():
        model = by_blocks(build(), rank)
    for step in range(2):
        with record() as forward:
            loss = square_loss(step)(model, rank.rank)
        with record() as backward:
            loss.backward()
        assert forward == []
        assert {c.kind for c in backward} == {"all_reduce"}
        assert [c.unit for c in backward] == ["blocks.2", "blocks.1", "blocks.0", ""]
        assert len({c.launch for c in backward}) == 4
    sizes = {c.unit: c.numel for c in backward}
    for unit in nested_units(model):
        numels = [parameter.sharded.numel() for parameter in unit.parameters]
        assert sizes[unit.name] == packed_numel(*numels, len(numels)), unit.name  # and one presence number each
    for c in backward:
        assert c.dtype is torch.float32
        assert c.nbytes == 2 * c.numel * 4 * (rank.world_size - 1) // rank.world_size
    rows = 2 * transport_of(rank).direct_bytes // 4 // 16
    large = replicate(nn.Linear(16, rows), mesh=rank.mesh)
    with record() as seen:
        large(batch(rank.rank, 0, 2, 16)).sum().backward()
    assert sorted(c.numel for c in seen) == [packed_numel(rows, 2), rows * 16]


@on_ranks(1, 2)
@ways
def test_registered_parameters(rank: Rank, make: Callable[..., Any]) -> None:
    """At rest parameters are DTensors with Replicate() on the mesh, whole on every rank, and so are gradients.

    In forward the module holds plain parameters, in place: nothing is copied, for they are all there.
    """
    reference = build()
    model = make(copy.deepcopy(reference), rank)
    seen: list[tuple[type, int]] = []
    model.first.register_forward_pre_hook(lambda m, _: seen.append((type(m.weight), m.weight.data_ptr())))
    square_loss()(model, rank.rank).backward()
    assert seen == [(nn.Parameter, model.first.weight.to_local().data_ptr())]
    for fqn, plain in reference.named_parameters():
        parameter = model.get_parameter(fqn)
        assert parameter.placements == parameter.grad.placements == (Replicate(),)
        assert parameter.device_mesh == rank.mesh
        assert_equal(parameter.detach().to_local(), plain.detach(), fqn)
        assert parameter.grad.to_local().shape == plain.shape


@on_ranks(2)
def test_state_dict(rank: Rank) -> None:
    """Values are replicated DTensors on the live parameters, and load into a plain model."""
    model = by_blocks(build(), rank)
    square_loss()(model, rank.rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with record() as seen:
        state = model.state_dict()
    assert seen == []
    plain = build()
    plain.load_state_dict({fqn: value.full_tensor() for fqn, value in state.items()})
    other = whole(build(), rank)
    other.load_state_dict(state)
    assert_models_equal(other, plain)
    assert all(v.to_local().data_ptr() == model.get_parameter(k).to_local().data_ptr() for k, v in state.items())


# ---------------------------------------------------------------- modules and meshes


@on_ranks(1, 2)
def test_class_and_module(rank: Rank) -> None:
    """The module itself comes back as ``Replicate<Class>``, which has all methods of sharded modules."""
    plain = build()
    model = by_blocks(plain, rank)
    assert model is plain
    assert type(model).__name__ == "ReplicateStack" and type(model.blocks[0]).__name__ == "ReplicateBlock"
    assert isinstance(model, ReplicateModule) and isinstance(model, FSDPModule) and isinstance(model, Stack)
    assert type(model.first) is nn.Linear
    sliced = replicate(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), mesh=rank.mesh)[:1]
    assert type(sliced) is nn.Sequential


@on_ranks(4)
def test_axis_of_a_mesh(rank: Rank) -> None:
    """One axis of a larger mesh: averages over its ranks only."""
    mesh = rank.make_mesh(2, 2, names=("a", "b"))
    for name in mesh.mesh_dim_names:
        model = replicate(nn.Linear(1, 1, bias=False), mesh=mesh[name])
        model(torch.full((1, 1), float(rank.rank))).sum().backward()
        members = torch.distributed.get_process_group_ranks(mesh[name].get_group())
        assert model.weight.grad.to_local().item() == sum(members) / 2


@on_ranks(4)
def test_inside_and_outside_of_sharded_modules(rank: Rank) -> None:
    """A replicated module inside a sharded one keeps what it owns; the sharded one owns the rest."""
    reference = build()
    model = copy.deepcopy(reference)
    replicate(model.blocks[0], mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    assert model.blocks[0].up.weight.placements == (Replicate(),)
    assert model.blocks[1].up.weight.placements != (Replicate(),)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize("names", ["r", ("r", "s")], ids=str)
def test_dtensors_on_a_whole_mesh(rank: Rank, names: Any) -> None:
    """``dp_mesh_dims=DataParallelMeshDims(replicate=...)``: DTensors stay as they are and are averaged."""
    mesh = rank.make_mesh(2, 2, names=("r", "s"))
    module = distribute_module(nn.Linear(1, 1, bias=False), mesh)
    module.register_forward_pre_hook(
        lambda m, args: tuple(DTensor.from_local(a, mesh, [Replicate(), Replicate()], run_check=False) for a in args)
    )
    model = replicate(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=names))
    number = float(rank.rank if len(names) == 2 else mesh["r"].get_local_rank())
    model(torch.full((1, 1), number)).to_local().sum().backward()
    assert model.weight.placements == (Replicate(), Replicate())
    assert model.weight.grad.full_tensor().item() == (1.5 if len(names) == 2 else 0.5)
