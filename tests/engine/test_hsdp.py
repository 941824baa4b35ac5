"""2-D meshes (replicate, shard), degenerate ones included: placements, parity, and when replicas are reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from compare import assert_equal
from front_ends import (
    COMPOSABLE,
    adam,
    assert_same_gradients,
    assert_trains_alike,
    both_backward,
    build,
    sharded_with_reference,
)
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from models import LossOf, Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks

NAMES = ("replicate", "shard")
SHAPES = {1: [(1, 1)], 4: [(2, 2), (4, 1), (1, 4)]}


class Uneven(nn.Module):
    """Rows that no mesh divides, fewer rows than ranks, a scalar, a transposed parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 1), nn.Linear(1, 5)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x @ self.transposed + self.empty.sum()


def meshes(rank: Rank) -> list[DeviceMesh]:
    """All 2-D meshes of this world; the square one has no names."""
    return [rank.make_mesh(*shape, names=None if shape == (2, 2) else NAMES) for shape in SHAPES[rank.world_size]]


def made(rank: Rank, *args: Any) -> tuple[Any, Any]:
    """A stack in units by block on the square mesh, and its reference."""
    return sharded_with_reference(COMPOSABLE, rank, build(Stack, *args), mesh=rank.make_mesh(2, 2, names=NAMES))


def assert_replicas_equal(mesh: DeviceMesh, model: nn.Module) -> None:
    """Require the bits of all shards and gradients to be the same in all replicas."""
    group = mesh.get_group(0)
    for name, parameter in model.named_parameters():
        for tensor in (parameter.detach(), parameter.grad):
            if tensor is not None:
                local = tensor.to_local().contiguous()
                others = [torch.empty_like(local) for _ in range(group.size())]
                dist.all_gather(others, local, group=group)
                assert_equal(others, [local] * group.size(), f"{name} in another replica")


@on_ranks(1, 4)
def test_every_mesh(rank: Rank) -> None:
    """Named or not, degenerate or not: Adam steps equal the reference, and replicas have the same bits."""
    for mesh in meshes(rank):
        model, reference = sharded_with_reference(COMPOSABLE, rank, build(Uneven), mesh=mesh)
        for name, parameter in model.named_parameters():
            rows, mine = reference.get_parameter(name).detach(), mesh.get_local_rank(1)
            assert parameter.placements == (Replicate(), Shard(0) if rows.ndim else Replicate()), name
            if rows.ndim:
                chunks = torch.chunk(rows, mesh.size(1))
                rows = chunks[mine] if mine < len(chunks) else rows[:0]
            assert_equal(parameter.to_local().detach(), rows, name)
        optimizers = [adam(m.parameters()) for m in (model, reference)]
        assert_trains_alike(model, reference, rank, steps=2, optimizers=optimizers)
        square_loss()(model, rank.rank).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.placements == parameter.placements, name
            assert parameter.device_mesh == parameter.grad.device_mesh == mesh
        assert_replicas_equal(mesh, model)


def prepare(model: Any, letter: str) -> None:
    """(S)ync everything, (R)educe-scatter only, (N)o sync."""
    model.set_requires_gradient_sync(letter != "N")
    model.set_requires_all_reduce(letter == "S")


@on_ranks(4)
@pytest.mark.parametrize("pattern", ["SNRS", "NRNRSRS"])
def test_interleavings(rank: Rank, pattern: str) -> None:
    """Microbatches without sync, with reduce-scatter only and with both, in any order that ends with both, add up."""

    def loss_at(step: int) -> LossOf:
        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            # The last skips the middle block; before, a rank of one replica alone runs it.
            run = [0, 2] if step == len(pattern) - 1 or number != 3 else [0, 1, 2]
            return module(batch(number, step, 4, 6), run=run).square().mean()

        return loss_of

    for mesh in meshes(rank) if pattern == "SNRS" else meshes(rank)[:1]:
        # One unit: ranks must issue the same collectives.
        model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 3), [], mesh=mesh)
        possible = {kind for kind, axis in (("all_reduce", 0), ("reduce_scatter", 1)) if mesh.size(axis) > 1}
        for step, letter in enumerate(pattern):
            prepare(model, letter)
            with record() as seen:
                loss_at(step)(model, rank.rank).backward()
            wanted = {"N": set(), "R": {"reduce_scatter"}, "S": {"reduce_scatter", "all_reduce"}}[letter]
            assert {c.kind for c in seen} - {"all_gather"} == wanted & possible
            reference_backward(reference, rank.world_size, loss_at(step))
        assert not model.get_pending_gradients()
        assert model.blocks[1].up.weight.grad is not None
        assert_same_gradients(model, reference)
        assert_replicas_equal(mesh, model)


@on_ranks(4)
def test_all_reduce_of_some_units_only(rank: Rank) -> None:
    """``recurse=False`` holds back one unit's all-reduce; what it kept is reduced with the next that does both."""
    model, reference = made(rank, 2)
    for held in (model, model.blocks[1]):
        for module in (model, reference):
            module.zero_grad()
        for step, now in enumerate((False, False, True)):
            held.set_requires_all_reduce(now, recurse=False)
            with record() as seen:
                square_loss(step)(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, square_loss(step))
            name = "" if held is model else "blocks.1"
            reduced = {c.unit for c in seen if c.kind == "all_reduce"}
            assert (name in reduced) == now and reduced >= {"", "blocks.0", "blocks.1"} - {name}
            assert ((held.first.weight if held is model else held.up.weight).grad is None) == (not now)
        assert_same_gradients(model, reference)


@on_ranks(4)
def test_partial_gradients_while_parameters_freeze(rank: Rank) -> None:
    """Partial gradients survive a change of what is trainable before they are reduced over the replicas."""
    for frozen in ([0], [1, 2]):
        model, reference = made(rank, 1)
        for step, letter in enumerate("RRS"):
            for module in (model, reference):
                module.blocks[0].up.requires_grad_(step not in frozen)
            prepare(model, letter)
            both_backward(model, reference, rank, square_loss(step))
        for module in (model, reference):
            module.blocks[0].up.requires_grad_(True)
        assert_same_gradients(model, reference)


@on_ranks(4)
def test_microbatches_add_up_in_the_reduce_dtype(rank: Rank) -> None:
    """Partial sums over the shard axis add up in the reduce dtype: 256 and three ones are 259, not 256."""
    for reduce_dtype, expected in ((torch.float32, 259.0), (torch.bfloat16, 256.0)):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = fully_shard(nn.Linear(1, 4, bias=False), mesh=meshes(rank)[0], mp_policy=policy)
        for value, letter in zip((256.0, 1.0, 1.0, 1.0), "RRRS", strict=True):
            prepare(model, letter)
            model(torch.full((1, 1), value)).float().sum().backward()
        assert_equal(model.weight.grad.full_tensor(), torch.full((4, 1), expected), str(reduce_dtype))
