"""Collectives that users bring: ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from user_collectives import Gather, Scatter

from compare import assert_equal
from front_ends import COMPOSABLE, assert_at_rest, assert_same_gradients, assert_trains_alike, build
from fullshard import FullshardError, fully_shard
from fullshard.comm import (
    CommRequest,
    CustomTransport,
    GradScaling,
    Operand,
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    make_transport,
)
from fullshard.memory import wait_for_all
from models import Stack, batch, reference_backward, square_loss, tiny_units
from ranks import Rank, RankPool, on_ranks


def made(rank: Rank, mesh: Any = None, dim: int = 6, **options: Any) -> tuple[Any, Any]:
    reference = build(Stack, 3, dim)
    with tiny_units():
        return COMPOSABLE.wrap(copy.deepcopy(reference), rank, mesh=mesh, **options), reference


def set_all(model: Any, gather: Any, scatter: Any) -> None:
    for unit in (model, *model.blocks):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)


def both_backward(model: Any, reference: Any, rank: Rank, *steps: int, dim: int = 6) -> None:
    """Backwards of both. (Looking at full parameters would call them as well.)"""
    for step in steps:
        square_loss(step, 4, dim)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step, 4, dim))


@on_ranks(1, 2)
@pytest.mark.parametrize("dim", [5, 1])
def test_training(rank: Rank, dim: int) -> None:
    """Each unit's all-gathers and reductions are one call each, in the user's memory, and none on one rank."""
    for done in (False, True):
        model, reference = made(rank, dim=dim, reshard_after_forward=True)
        comms = [(Gather(done), Scatter(done)) for _ in range(4)]
        for unit, (gather, scatter) in zip((model, *model.blocks), comms, strict=True):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
        both_backward(model, reference, rank, 0, 1, dim=dim)
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        for gather, scatter in comms:
            # Per step: forward and backward; backward.
            assert (len(gather.called), len(scatter.called)) == ((4, 2) if rank.world_size > 1 else (0, 0))
            for comm in (gather, scatter):
                assert [(numel, dtype) for numel, dtype, _ in comm.called] == comm.allocated
                assert comm.groups <= {tuple(range(rank.world_size))}
                assert all(dtype is torch.float32 and asynchronous for _, dtype, asynchronous in comm.called)


SCALINGS = [GradScaling(after=2), GradScaling(), GradScaling(2, 2), GradScaling(1, 2, native=False)]


@pytest.mark.cpu_only("gloo sends and receives host memory only")
@on_ranks(2)
def test_objects_of_any_kind(rank: Rank) -> None:
    """Works and finished collectives are divided as asked; torch's objects and memory of the group serve as well."""
    base = make_transport(rank.group, rank.device)
    for gather, scatter in (
        (Gather(), Scatter()),
        (Gather(done=True), Scatter(done=True)),
        (DefaultAllGather(), DefaultReduceScatter()),
        (ProcessGroupMemoryAllGather(rank.group), ProcessGroupMemoryReduceScatter(rank.group)),
        (Gather(), None),
        (None, Scatter()),
    ):
        transport = CustomTransport(base, gather, scatter)
        own = torch.full((3,), rank.rank + 1.0)
        buffer = transport.allocate("all_gather", 6, torch.float32, rank.device)
        assert (buffer is None) == (gather is None)
        operand = Operand(own, torch.zeros(6) if buffer is None else buffer)
        wait_for_all(transport.all_gather([CommRequest("a", [operand])]))
        assert operand.unsharded.tolist() == [1.0] * 3 + [2.0] * 3
        for scaling in SCALINGS:
            operand = Operand(torch.empty(3), torch.full((6,), rank.rank + 1.0))
            wait_for_all(transport.reduce_scatter([CommRequest("a", [operand], scaling)]))
            assert_equal(operand.shard, torch.full((3,), 3 / (scaling.before * scaling.after)), str(scaling))
        assert gather is None or scatter is None or transport.direct_bytes > 10**15


@on_ranks(2)
def test_set_while_gradients_are_pending(rank: Rank) -> None:
    """Gradients of microbatches without sync survive the change; only the last one calls the reduce-scatter, once."""
    for reshard in (True, False):
        model, reference = made(rank, reshard_after_forward=reshard)
        scatter = Scatter()
        model.set_requires_gradient_sync(False)
        both_backward(model, reference, rank, 0)
        loss = square_loss(1)(model, rank.rank)
        model.blocks[1].set_custom_all_gather(Gather())
        model.blocks[2].set_custom_reduce_scatter(scatter)
        loss.backward()
        reference_backward(reference, 2, square_loss(1))
        assert not scatter.called
        model.set_requires_gradient_sync(True)
        both_backward(model, reference, rank, 2)
        assert len(scatter.called) == 1
        assert_same_gradients(model, reference)


@on_ranks(2, 4)
def test_set_while_gradients_are_partly_reduced(rank: Rank) -> None:
    """Refused while gradients wait for the replicate axis, with what to do; after that nothing is lost."""
    model, reference = made(rank, rank.make_mesh(2, rank.world_size // 2, names=("r", "s")))
    model.set_requires_all_reduce(False)
    both_backward(model, reference, rank, 0)
    if rank.world_size > 2:
        with pytest.raises(FullshardError, match=r"unit 'blocks\.1' has gradients .*call synchronize_gradients\(\)"):
            model.blocks[1].set_custom_all_gather(Gather())
    model.synchronize_gradients()
    model.blocks[1].set_custom_all_gather(Gather())
    model.set_requires_all_reduce(True)
    both_backward(model, reference, rank, 1)
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_units_of_several_dtypes(rank: Rank) -> None:
    """There is one call per dtype, and parameters of integers are all-gathered as well."""
    mixed = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double())
    mixed[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    mixed.table = nn.Parameter(torch.arange(7), requires_grad=False)
    plain = copy.deepcopy(mixed)
    fully_shard(mixed, mesh=rank.mesh)
    gather, scatter = Gather(), Scatter()
    mixed.set_custom_all_gather(gather)
    mixed.set_custom_reduce_scatter(scatter)
    mixed(batch(rank.rank, 0, 2, 5)).square().sum().backward()
    reference_backward(plain, 2, lambda m, r: m(batch(r, 0, 2, 5)).square().sum())
    assert_same_gradients(mixed, plain)
    assert sorted(str(d) for _, d, _ in gather.called) == ["torch.float32", "torch.float64", "torch.int64"]
    assert sorted(str(d) for _, d, _ in scatter.called) == ["torch.float32", "torch.float64"]


@on_ranks(4)
def test_replicas_and_smaller_groups(rank: Rank) -> None:
    """HSDP: they get the shard axis; reshard_after_forward=2: backward's all-gather in the subgroup is our own."""
    model, reference = made(rank, rank.make_mesh(2, 2, names=("r", "s")))
    gather, scatter = Gather(), Scatter()
    set_all(model, gather, scatter)
    both_backward(model, reference, rank, 0)
    assert_same_gradients(model, reference)
    first = rank.rank // 2 * 2
    assert gather.groups == scatter.groups == {(first, first + 1)}

    model, reference = made(rank, reshard_after_forward=2)
    gather = Gather()
    set_all(model, gather, None)
    both_backward(model, reference, rank, 0)
    assert_same_gradients(model, reference)
    assert len(gather.called) == 4 and gather.groups == {(0, 1, 2, 3)}


@on_ranks(2)
def test_memory_of_the_wrong_size_is_refused(rank: Rank) -> None:
    """``allocate`` that returns something else: ValueError with the name of the object, and the model can go on."""

    class Short(Gather):
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size[0] - 1, dtype=dtype, device=device)

    model, reference = made(rank)
    model.blocks[1].set_custom_all_gather(Short())
    words = rf"Short.allocate: expected \d+ elements of torch.float32 on {rank.device}, found"
    with pytest.raises(ValueError, match=words):
        square_loss()(model, rank.rank)
    model.blocks[1].set_custom_all_gather(None)
    assert_trains_alike(model, reference, rank, steps=1)
    assert_at_rest(model)


class Failing(Gather):
    """Raises in its second call, on rank 1."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and len(self.called) == 1:
            raise OSError("the network card is on fire")
        return super().__call__(*args, **kwargs)


class FailingScatter(Failing, Scatter):
    """The same for reductions."""


def run_failing(rank: Rank, role: str) -> None:
    """Rank 1's collective raises in the second step; the group gives up on silent ranks after a second."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), rank.device.type)
    model, _ = made(rank, mesh, reshard_after_forward=False)
    if role == "all_gather":
        model.blocks[1].set_custom_all_gather(Failing())
    else:
        model.blocks[1].set_custom_reduce_scatter(FailingScatter())
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
    if rank.device.type != "cpu":
        torch.accelerator.synchronize()  # before, the host has waited for nothing
    time.sleep(30)  # not reached: it would count as hung


@pytest.mark.parametrize("role", ["all_gather", "scatter"])
def test_custom_collective_that_fails_on_one_rank(ranks: RankPool, role: str) -> None:
    """That rank sees the user's own exception, the other one an error once the group's time-out is over."""
    waiting, failed = ranks(2, run_failing, role, fresh=True, expect_failure=True, timeout=20)
    assert (failed.kind, failed.error_type) == ("raised", "OSError"), failed
    assert waiting.kind == "raised" and "RuntimeError" in waiting.error_types, waiting
