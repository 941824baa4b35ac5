"""2-D meshes (replicate, shard), degenerate ones included, and gathers from a few subgroup in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from compare import assert_equal, assert_models_equal
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from models import (
    Branch,
    LossOf,
    Stack,
    assert_at_rest,
    batch,
    reference_backward,
    square_loss,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
NAMES = ("replicate", "shard")
SHAPES = {1: [(1, 1)], 4: [(2, 2), (4, 1), (1, 4)]}


def meshes(rank: Rank) -> Iterator[DeviceMesh]:
    """All 2-D meshes of this world."""
    return (rank.make_mesh(*shape, names=NAMES) for shape in SHAPES[rank.world_size])


def shard_on(mesh: DeviceMesh, model: nn.Module, **settings: Any) -> nn.Module:
    """One unit per block or layer, then the root."""
    for child in getattr(model, "blocks", None) or getattr(model, "layers", None) or model:
        fully_shard(child, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


class Uneven(nn.Module):
    """Rows that no mesh divides, fewer rows than ranks, a scalar, a transposed one and an empty one."""

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


def assert_replicas_equal(mesh: DeviceMesh, model: nn.Module) -> None:
    """Require the bits of all shards and gradients to be the same in all replicas."""
    group = mesh.get_group(0)
    for name, parameter in model.named_parameters():
        for tensor in (parameter.detach(), parameter.grad):
            if tensor is None:
                continue
            local = tensor.to_local().contiguous()
            others = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(others, local, group=group)
            for other in others:
                assert_equal(other, local, f"{name} in another replica")


# -------------------------------------------------------------------- parity


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "names", "make"),
    [((2, 2), NAMES, Stack), ((2, 2), None, Uneven), ((4, 1), NAMES, Uneven), ((1, 4), NAMES, Uneven)],
    ids=["2x2", "2x2 without names", "4x1", "1x4"],
)
def test_parity_on_every_mesh(rank: Rank, shape: tuple[int, int], names: Any, make: Callable[[], nn.Module]) -> None:
    """Named or not, degenerate or not: Adam steps equal the reference, and replicas have the same bits."""
    mesh = rank.make_mesh(*shape, names=names)
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    shard_on(mesh, model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, reference)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        for optimizer in optimizers:
            optimizer.step()
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_replicas_equal(mesh, model)
    assert_at_rest(model)


@on_ranks(1, 4)
def test_placements(rank: Rank) -> None:
    """Parameters and gradients are ``[Replicate, Shard(0)]`` on the mesh passed (0-D ones replicated on both axes)."""
    for mesh in meshes(rank):
        model = shard_on(mesh, Uneven())
        square_loss()(model, rank.rank).backward()
        for name, parameter in model.named_parameters():
            expected = (Replicate(), Shard(0) if parameter.ndim else Replicate())
            assert parameter.placements == parameter.grad.placements == expected, name
            assert parameter.device_mesh == parameter.grad.device_mesh == mesh
            rows = parameter.full_tensor()
            if parameter.ndim:
                chunks = torch.chunk(rows, mesh.size(1))
                mine = mesh.get_local_rank(1)
                rows = chunks[mine] if mine < len(chunks) else rows[:0]
            assert_equal(parameter.to_local().detach(), rows.detach(), name)


@on_ranks(4)
@pytest.mark.parametrize("policy", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)], ids=str)
def test_mixed_precision(rank: Rank, policy: tuple[torch.dtype, torch.dtype]) -> None:
    """Gathers carry ``param_dtype``, reductions on both axes ``reduce_dtype``, divided so that none overflows."""
    for mesh in meshes(rank):
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh, mp_policy=MixedPrecisionPolicy(*policy))
        with record() as seen:
            model(torch.full((1, 4), 30000.0)).float().sum().backward()
        assert {c.dtype for c in seen if c.kind == "all_gather"} <= {policy[0]}
        assert {c.dtype for c in seen if c.kind != "all_gather"} == {policy[1]}
        expected = torch.full((4, 4), 30000.0).to(policy[0]).float()
        assert_equal(model.weight.grad.full_tensor(), expected, str(mesh.shape))


@on_ranks(4)
def test_parameters_unused_on_some_ranks(rank: Rank) -> None:
    """A parameter that only some ranks use, of one replica or of all, gets the mean; one that nobody uses None."""
    for mesh in meshes(rank):
        for users in ([0], [0, 2], [3], []) if mesh.shape == (2, 2) else ([3],):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 6), Branch())
            reference = copy.deepcopy(model)
            shard_on(mesh, model)

            def loss_of(module: nn.Module, number: int, users: list[int] = users) -> torch.Tensor:
                module[1].rank = int(number in users)  # odd: the second branch
                return square_loss()(module, number)

            loss_of(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, loss_of)
            assert (model[1].odd.weight.grad is None) == (not users)
            assert model[1].never.weight.grad is None
            assert_models_equal(model, reference, grads=True, **CLOSE)
            assert_replicas_equal(mesh, model)


# -------------------------------------------------------------------- accumulation


def prepare(model: nn.Module, letter: str) -> None:
    """(S)ync everything, (R)educe-scatter only, (N)o sync."""
    model.set_requires_gradient_sync(letter != "N")
    model.set_requires_all_reduce(letter == "S")


@on_ranks(4)
@pytest.mark.parametrize("pattern", ["SNRS", "NRNRSRS"])
def test_interleavings(rank: Rank, pattern: str) -> None:
    """Microbatches without sync, with reduce-scatter only and with both, in any order that ends with both, add up.

    What was reduced over shards only reaches all replicas, even if the last microbatch or some ranks skip it.
    """

    def loss_at(step: int) -> LossOf:
        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            # The last skips the middle block; before, a rank of one replica alone runs it.
            run = [0, 2] if step == len(pattern) - 1 or number != 3 else [0, 1, 2]
            return module(batch(number, step, 4, 6), run=run).square().mean()

        return loss_of

    for mesh in meshes(rank) if pattern == "SNRS" else [rank.make_mesh(2, 2, names=NAMES)]:
        torch.manual_seed(2)
        model = Stack(3)
        reference = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)  # one unit: ranks must gather and reduce alike
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
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_replicas_equal(mesh, model)


@on_ranks(4)
def test_all_reduce_of_some_units_only(rank: Rank) -> None:
    """``recurse=False`` holds back one unit's all-reduce; what it kept is reduced with the next that does both."""
    model, mesh = Stack(2), rank.make_mesh(2, 2, names=NAMES)
    reference = copy.deepcopy(model)
    shard_on(mesh, model)
    for held in (model, model.blocks[1]):
        for module in (model, reference):
            module.zero_grad()
        for step, now in enumerate((False, False, True)):
            held.set_requires_all_reduce(now, recurse=False)
            with record() as seen:
                square_loss(step)(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, square_loss(step))
            name = "" if held is model else "blocks.1"
            assert (name in {c.unit for c in seen if c.kind == "all_reduce"}) == now
            assert {c.unit for c in seen if c.kind == "all_reduce"} >= {"", "blocks.0", "blocks.1"} - {name}
            assert ((held.first.weight if held is model else held.up.weight).grad is None) == (not now)
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize("freeze", ["first", "last"])
def test_partial_gradients_while_parameters_freeze(rank: Rank, freeze: str) -> None:
    """Partial gradients survive a change of what is trainable before they are reduced over the replicas."""
    model, mesh = Stack(1), rank.make_mesh(2, 2, names=NAMES)
    reference = copy.deepcopy(model)
    shard_on(mesh, model)
    for step, letter in enumerate("RRS"):
        for module in (model, reference):
            module.blocks[0].up.requires_grad_(step != 0 if freeze == "first" else step == 0)
        prepare(model, letter)
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
    for module in (model, reference):
        module.blocks[0].up.requires_grad_(True)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(4)
def test_microbatches_add_up_in_the_reduce_dtype(rank: Rank) -> None:
    """Partial sums over the shard axis add up in the reduce dtype: 256 and three ones are 259, not 256."""
    mesh = rank.make_mesh(2, 2, names=NAMES)
    for reduce_dtype, expected in ((torch.float32, 259.0), (torch.bfloat16, 256.0)):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh, mp_policy=policy)
        for value, letter in zip((256.0, 1.0, 1.0, 1.0), "RRRS", strict=True):
            prepare(model, letter)
            model(torch.full((1, 1), value)).float().sum().backward()
        assert_equal(model.weight.grad.full_tensor(), torch.full((4, 1), expected), str(reduce_dtype))
