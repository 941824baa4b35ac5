"""Collectives that users bring: ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from user_collectives import (
    CLOSE,
    ODD_DIM,
    Gather,
    OurGather,
    OurScatter,
    Scatter,
    build,
    check_training,
    loss_of,
    shard,
    torchs_classes,
    units,
)

import fullshard
from compare import assert_equal, assert_models_equal
from fullshard import FullshardError, MixedPrecisionPolicy, fully_shard
from models import assert_at_rest, batch, reference_backward, tiny_units
from ranks import Rank, RankPool, on_ranks


@on_ranks(1, 2)
@pytest.mark.parametrize("done", [False, True], ids=["later", "at once"])
def test_custom_collectives(rank: Rank, done: bool) -> None:
    """Each unit's gathers and reductions are one call each, in the user's memory, with the same values.

    On one rank there is nothing to gather, so they are not called.
    """
    for dim in (ODD_DIM, 1):
        reference = build(dim)
        model = shard(copy.deepcopy(reference), rank.mesh, reshard_after_forward=True)
        comms = [(Gather(done), Scatter(done)) for _ in units(model)]
        for unit, (gather, scatter) in zip(units(model), comms, strict=True):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
        check_training(model, reference, rank, dim, steps=2)
        assert_at_rest(model)
        for gather, scatter in comms:
            # Per step: forward and backward; backward.
            assert (len(gather.called), len(scatter.called)) == ((4, 2) if rank.world_size > 1 else (0, 0))
            for comm in (gather, scatter):
                assert [(numel, dtype) for numel, dtype, _ in comm.called] == comm.allocated
                assert comm.groups <= {tuple(range(rank.world_size))}
                assert all(dtype is torch.float32 and asynchronous for _, dtype, asynchronous in comm.called)


@on_ranks(2)
@pytest.mark.parametrize("which", ["ours", "torch's"])
def test_subclasses(rank: Rank, which: str) -> None:
    """Objects of our abstract classes, and of PyTorch's, serve alike."""
    gather, scatter = (OurGather(), OurScatter()) if which == "ours" else torchs_classes()
    reference = build()
    with tiny_units():
        model = shard(copy.deepcopy(reference), rank.mesh)
    for unit in units(model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    check_training(model, reference, rank, steps=1)
    # All units in forward, in backward all but the root and what ran last.
    assert len(gather.plain.called) == 4 + 2 and len(scatter.plain.called) == 4


def test_abstract_classes() -> None:
    """They cannot be instantiated without their methods."""
    for kind in (fullshard.Comm, fullshard.AllGather, fullshard.ReduceScatter):
        with pytest.raises(TypeError, match="abstract"):
            kind()


@on_ranks(2)
def test_set_after_the_first_step_and_removed(rank: Rank) -> None:
    """They can be set, replaced and (None) removed between steps; optimizers and gradients go on."""
    reference = build()
    with tiny_units():
        model = shard(copy.deepcopy(reference), rank.mesh)
    first, second, scatter = Gather(), Gather(), Scatter()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (model, reference)]
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: model.blocks[1].set_custom_all_gather(first),
        lambda: model.blocks[1].set_custom_all_gather(second),
        lambda: model.blocks[1].set_custom_reduce_scatter(scatter),
        lambda: (model.blocks[1].set_custom_all_gather(None), model.blocks[1].set_custom_reduce_scatter(None)),
    ]
    for step, change in enumerate(changes):
        change()
        loss_of(6, step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of(6, step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [len(comm.called) for comm in (first, second, scatter)] == [2, 4, 1]


@on_ranks(2)
def test_set_while_gradients_are_pending(rank: Rank) -> None:
    """Gradients of microbatches without sync survive the change; only the last one calls the reduce-scatter, once."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank.mesh)
    scatter = Scatter()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(6, step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of(6, step))
        assert len(scatter.called) == (step == 2)
        if step == 0:
            model.blocks[1].set_custom_all_gather(Gather())
            model.blocks[2].set_custom_reduce_scatter(scatter)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2, 4)
def test_set_while_gradients_are_partly_reduced(rank: Rank) -> None:
    """Refused while gradients wait for the replicate axis, with what to do; after that nothing is lost."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank.make_mesh(2, rank.world_size // 2, names=("r", "s")))
    model.set_requires_all_reduce(False)
    loss_of(6, 0)(model, rank.rank).backward()
    if rank.world_size > 2:
        with pytest.raises(FullshardError, match=r"unit 'blocks\.1' holds gradients .*call synchronize_gradients\(\)"):
            model.blocks[1].set_custom_all_gather(Gather())
    model.synchronize_gradients()
    model.blocks[1].set_custom_all_gather(Gather())
    model.set_requires_all_reduce(True)
    loss_of(6, 1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, loss_of(6, step))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_set_between_forward_and_backward(rank: Rank) -> None:
    """The backward of a forward that ran before the change still finds its parameters and gives all gradients."""
    for reshard in (True, False):
        reference = build()
        model = shard(copy.deepcopy(reference), rank.mesh, reshard_after_forward=reshard)
        loss = loss_of()(model, rank.rank)
        model.blocks[1].set_custom_all_gather(Gather())
        model.blocks[1].set_custom_reduce_scatter(Scatter())
        loss.backward()
        reference_backward(reference, rank.world_size, loss_of())
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_precision_and_dtypes(rank: Rank) -> None:
    """With several dtypes there is one call per dtype, in the dtypes of the policy."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    reference = fully_shard(build(), mesh=rank.mesh, mp_policy=policy)
    model = fully_shard(build(), mesh=rank.mesh, mp_policy=policy)
    gather, scatter = Gather(), Scatter()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    for one in (model, reference):
        loss_of()(one, rank.rank).backward()
    assert {dtype for _, dtype, _ in gather.called} == {torch.bfloat16}
    assert {dtype for _, dtype, _ in scatter.called} == {torch.float32}
    for (fqn, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_equal(ours.grad.full_tensor(), theirs.grad.full_tensor(), fqn)

    mixed = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double())
    mixed[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    mixed.register_buffer("ids", torch.arange(3))
    mixed.table = nn.Parameter(torch.arange(7), requires_grad=False)
    plain = copy.deepcopy(mixed)
    fully_shard(mixed, mesh=rank.mesh)
    gather, scatter = Gather(), Scatter()
    mixed.set_custom_all_gather(gather)
    mixed.set_custom_reduce_scatter(scatter)
    mixed(batch(rank.rank, 0, 2, 5)).square().sum().backward()
    reference_backward(plain, 2, lambda m, r: m(batch(r, 0, 2, 5)).square().sum())
    assert_models_equal(mixed, plain, grads=True, **CLOSE)
    assert sorted(str(d) for _, d, _ in gather.called) == ["torch.float32", "torch.float64", "torch.int64"]
    assert sorted(str(d) for _, d, _ in scatter.called) == ["torch.float32", "torch.float64"]


@on_ranks(4)
def test_custom_collectives_with_replicas_and_smaller_groups(rank: Rank) -> None:
    """HSDP: they get the shard axis; reshard_after_forward=2: backward's gather from subgroup is our own."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank.make_mesh(2, 2, names=("r", "s")))
    gather, scatter = Gather(), Scatter()
    for unit in units(model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    check_training(model, reference, rank, steps=1)
    first = rank.rank // 2 * 2
    assert gather.groups == scatter.groups == {(first, first + 1)}

    reference = build(ODD_DIM)
    model = shard(copy.deepcopy(reference), rank.mesh, reshard_after_forward=2)
    gather = Gather()
    for unit in units(model):
        unit.set_custom_all_gather(gather)
    check_training(model, reference, rank, ODD_DIM, steps=1)
    assert len(gather.called) == 4 and gather.groups == {(0, 1, 2, 3)}


@on_ranks(2)
def test_memory_of_the_wrong_size_is_refused(rank: Rank) -> None:
    """``allocate`` that returns something else: ValueError with the name of the object, and the model can go on."""

    class Short(Gather):
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size[0] - 1, dtype=dtype, device=device)

    reference = build()
    model = shard(copy.deepcopy(reference), rank.mesh)
    model.blocks[1].set_custom_all_gather(Short())
    with pytest.raises(
        ValueError, match=rf"Short.allocate: expected \d+ elements of torch.float32 on {rank.device}, got"
    ):
        loss_of()(model, rank.rank)
    model.blocks[1].set_custom_all_gather(None)
    check_training(model, reference, rank, steps=1)


# ---------------------------------------------------------------- one rank alone fails


class Failing(Gather):
    """Raises in its second call, on one rank."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails and len(self.called) == 1:
            raise OSError("the network card is on fire")
        return super().__call__(*args, **kwargs)


class FailingScatter(Failing, Scatter):
    """The same for reductions."""


def run_failing(rank: Rank, role: str) -> None:
    """Rank 1's collective raises in the second step; the group gives up on silent ranks after a second."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), rank.device.type)
    model = shard(build(), mesh, reshard_after_forward=False)
    if role == "all_gather":
        model.blocks[1].set_custom_all_gather(Failing(rank.rank == 1))
    else:
        model.blocks[1].set_custom_reduce_scatter(FailingScatter(rank.rank == 1))
    for step in range(2):
        loss_of(6, step)(model, rank.rank).backward()
    if rank.device.type != "cpu":
        torch.accelerator.synchronize()  # before, the host has waited for nothing
    time.sleep(30)  # not reached: it would count as hung


@pytest.mark.parametrize("role", ["all_gather", "scatter"])
def test_custom_collective_that_fails_on_one_rank(ranks: RankPool, role: str) -> None:
    """That rank sees the user's own exception, the other one an error once the group's time-out is over."""
    waiting, failed = ranks(2, run_failing, role, fresh=True, expect_failure=True, timeout=20)
    assert (failed.kind, failed.error_type) == ("raised", "OSError"), failed
    assert waiting.kind == "raised" and "RuntimeError" in waiting.error_types, waiting
