"""``replicate``: every rank keeps everything, gradients are averaged while backward goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module

from compare import assert_equal
from front_ends import (
    COMPOSABLE,
    assert_same_gradients,
    assert_trains_alike,
    both_backward,
    build,
    sharded_with_reference,
)
from fullshard import DataParallelMeshDims, FSDPModule, ReplicateModule, fully_shard, replicate
from fullshard.comm import record
from models import Stack, square_loss, tiny_units
from ranks import Rank, on_ranks

WAYS = pytest.mark.parametrize("units", [None, []], ids=["by blocks", "whole"])


def made(rank: Rank, units: Any = None, **options: Any) -> tuple[Any, Any]:
    with tiny_units():
        return sharded_with_reference(COMPOSABLE, rank, build(Stack), units, strategy="NO_SHARD", **options)


@on_ranks(1, 4)
@WAYS
def test_parameters_are_replicated(rank: Rank, units: Any) -> None:
    """Parameters and gradients are replicated DTensors of the same bits on all ranks, which modules use in place."""
    model, reference = made(rank, units)
    seen: list[tuple[type, int]] = []
    model.first.register_forward_pre_hook(lambda m, _: seen.append((type(m.weight), m.weight.data_ptr())))
    assert_trains_alike(model, reference, rank, steps=1)
    square_loss()(model, rank.rank).backward()
    assert set(seen) == {(nn.Parameter, model.first.weight.to_local().data_ptr())}
    for fqn, parameter in model.named_parameters():
        assert parameter.placements == parameter.grad.placements == (Replicate(),)
        assert parameter.device_mesh == rank.mesh
        for value in (parameter.detach(), parameter.grad):
            local = value.to_local().contiguous()
            everyone = [torch.empty_like(local) for _ in range(rank.world_size)]
            dist.all_gather(everyone, local)
            assert_equal(everyone, [local] * rank.world_size, fqn)


@on_ranks(2)
def test_hook_and_divisor(rank: Rank) -> None:
    """The sum is divided by what was asked for; a hook sees what was all-reduced, and what it leaves counts."""
    reference = build(Stack)
    model = replicate(build(Stack))  # without a mesh all ranks are meant
    numels: list[int] = []

    def hook(rows: torch.Tensor) -> None:
        numels.append(rows.numel())
        rows.mul_(3)

    model.set_all_reduce_hook(hook)
    model.set_gradient_divide_factor(5.0)
    both_backward(model, reference, rank, square_loss())
    for parameter in reference.parameters():
        parameter.grad *= 3 * 2 / 5
    assert_same_gradients(model, reference)
    assert sum(numels) >= sum(p.numel() for p in reference.parameters())


@on_ranks(2)
def test_classes_and_state_dict(rank: Rank) -> None:
    """The module itself comes back as ``Replicate<Class>``, which has all methods of sharded modules."""
    plain = build(Stack, seed=5)
    assert COMPOSABLE.wrap(plain, rank, strategy="NO_SHARD") is plain
    assert type(plain).__name__ == "ReplicateStack" and type(plain.blocks[0]).__name__ == "ReplicateBlock"
    assert isinstance(plain, ReplicateModule) and isinstance(plain, FSDPModule) and isinstance(plain, Stack)
    assert type(plain.first) is nn.Linear
    assert type(replicate(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), mesh=rank.mesh)[:1]) is nn.Sequential
    with record() as seen:
        state = plain.state_dict()
    assert seen == []
    assert all(v.to_local().data_ptr() == plain.get_parameter(k).to_local().data_ptr() for k, v in state.items())
    model, reference = made(rank)
    model.load_state_dict(state)
    reference.load_state_dict({fqn: value.full_tensor() for fqn, value in state.items()})
    assert_trains_alike(model, reference, rank, steps=1)


@on_ranks(4)
def test_meshes(rank: Rank) -> None:
    """One axis of a larger mesh: averages over its ranks only. DTensors on a whole mesh stay and are averaged."""
    mesh = rank.make_mesh(2, 2, names=("r", "s"))
    for name in mesh.mesh_dim_names:
        model: Any = replicate(nn.Linear(1, 1, bias=False), mesh=mesh[name])
        model(torch.full((1, 1), float(rank.rank))).sum().backward()
        members = dist.get_process_group_ranks(mesh[name].get_group())
        assert model.weight.grad.to_local().item() == sum(members) / 2
    for names, expected in (("r", 0.5), (("r", "s"), 1.5)):
        module = distribute_module(nn.Linear(1, 1, bias=False), mesh)
        module.register_forward_pre_hook(
            lambda m, args: tuple(DTensor.from_local(a, mesh, [Replicate()] * 2, run_check=False) for a in args)
        )
        model = replicate(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=names))
        number = float(rank.rank if names != "r" else mesh["r"].get_local_rank())
        model(torch.full((1, 1), number)).to_local().sum().backward()
        assert model.weight.placements == (Replicate(), Replicate())
        assert model.weight.grad.full_tensor().item() == expected
    model, reference = build(Stack), build(Stack)
    replicate(model.blocks[0], mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    assert model.blocks[0].up.weight.placements == (Replicate(),) != model.blocks[1].up.weight.placements
    assert_trains_alike(model, reference, rank, steps=1)
