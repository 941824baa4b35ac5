"""Backward that the caller ends, with ``finalize_backward``; and memory of unsharded parameters that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from front_ends import (
    COMPOSABLE,
    STRATEGIES,
    adam,
    assert_at_rest,
    assert_same_gradients,
    build,
    sharded_with_reference,
)
from fullshard import FullshardError, GradientReductionHandle, PhaseError, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import units_of
from models import Stack, held_bytes, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

MICROBATCHES = 3


@on_ranks(4)
@each_value(strategy=STRATEGIES, sync=["each", "last"], async_op=[False, True])
def test_gradients(rank: Rank, strategy: str, sync: str, async_op: bool) -> None:
    """They are those of all microbatches, reduced in each of them, or all as the caller finalizes."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2), strategy=strategy)
    optimizers = [adam(each.parameters()) for each in (model, reference)]
    model.set_manual_backward_finalization(True)
    for step in range(2):
        model.set_requires_gradient_sync(sync == "each")
        for number in range(MICROBATCHES):
            loss_of = square_loss(3 * step + number)
            loss_of(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, loss_of)
        model.set_requires_gradient_sync(True)
        with record() as seen:
            handle = model.finalize_backward(async_op=async_op)
        assert sync == "last" or not any(each.kind == "reduce_scatter" for each in seen)
        if async_op:
            assert isinstance(handle, GradientReductionHandle)
            handle.wait()
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_what_has_to_wait(rank: Rank) -> None:
    """Until the handle is waited for, nothing runs or steps; after a reset it has nothing to wait for."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2))
    optimizer = adam(model.parameters())
    assert model.finalize_backward() is None  # before the first forward
    loss_of = square_loss(0)
    model.set_manual_backward_finalization(True)
    loss_of(model, rank.rank).backward()
    with pytest.raises(PhaseError, match=r"call finalize_backward\(\) first"):
        optimizer.step()
    with pytest.raises(PhaseError, match="was not finalized"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    for refused in (lambda: loss_of(model, rank.rank), optimizer.step, model.finalize_backward):
        with pytest.raises(PhaseError, match=r"call wait\(\) of its handle"):
            refused()
    handle.wait()
    handle.wait()
    reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference)
    optimizer.zero_grad()

    loss_of(model, rank.rank).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(FullshardError, match="dropped"):
            handle.wait()
    optimizer.zero_grad()  # the step is repeated: units whose reduction was over have their .grad
    loss_of(model, rank.rank).backward()
    model.finalize_backward()
    assert_same_gradients(model, reference)
    model.set_manual_backward_finalization(False)
    with pytest.raises(FullshardError, match="manual finalization is off"):
        model.finalize_backward()
    for api in ("set_manual_backward_finalization", "finalize_backward"):
        with pytest.raises((FullshardError, TypeError), match="expected the root module"):
            getattr(model.blocks[0], api)(*([True] if api.startswith("set") else []))


@on_ranks(2)
def test_finalized_twice(rank: Rank) -> None:
    """The second time changes nothing, also with unused parameters."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2))
    model.set_reduce_scatter_unused_params(True)
    model.set_manual_backward_finalization(True)
    optimizer = adam(model.parameters())
    loss_of = square_loss(0)
    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    model.finalize_backward()
    with record() as seen:
        model.finalize_backward()
    assert not seen
    assert_same_gradients(model, reference)
    optimizer.step()
    optimizer.zero_grad()
    model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_manual_backward_finalization(False)


@on_ranks(4)
def test_without_all_reduce(rank: Rank) -> None:
    """Gradients that would not be complete are an error, until the all-reduce is on again."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2), mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    loss_of = square_loss(0)
    loss_of(model, rank.rank).backward()
    with pytest.raises(FullshardError, match=r"set_requires_all_reduce\(True\)"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference)


@on_ranks(1)
def test_below_the_root(rank: Rank) -> None:
    """Asked for before the first forward, also on the meta device, it is an error as that comes."""
    with torch.device("meta"):
        model = Stack(2)
    for module in (model.blocks[0], model):
        fully_shard(module, mesh=rank.mesh)
    model.blocks[0].set_manual_backward_finalization(True)
    model.to_empty(device=rank.device)
    with pytest.raises(FullshardError, match=r"found one of unit 'blocks\.0' below a"):
        square_loss(0)(model, rank.rank)
    model.blocks[0].set_manual_backward_finalization(False)
    square_loss(0)(model, rank.rank)


def memory(model: Any) -> list[int]:
    """The addresses of unsharded parameters."""
    return [p.unsharded.untyped_storage().data_ptr() for unit in units_of(model) for p in unit.parameters]


@on_ranks(2)
@each_value(reshard_after_forward=[True, False], async_op=[False, True])
def test_kept_storage(rank: Rank, reshard_after_forward: bool, async_op: bool) -> None:
    """Addresses stay the same over steps of four microbatches; gradients are the same; turned off, all is freed."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2))
    model.set_reshard_after_forward(reshard_after_forward)
    model.set_keep_unsharded_storage(True)
    model.set_manual_backward_finalization(True)
    seen = []
    for step in range(2):
        for number in range(4):
            loss_of = square_loss(4 * step + number)
            loss_of(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, loss_of)
            seen.append(memory(model))
        model.finalize_backward()
        assert_same_gradients(model, reference)
    assert all(seen[0]) and all(each == seen[0] for each in seen)
    model.set_keep_unsharded_storage(False)
    for unit in units_of(model):
        unit.reshard()
    assert_at_rest(model)
    assert not any(held_bytes(bucket) for unit in units_of(model) for bucket in unit.buckets)


@on_ranks(2)
def test_kept_storage_after_an_exception(rank: Rank) -> None:
    """It stays, and the next step is right."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2))
    model.set_keep_unsharded_storage(True)
    loss_of = square_loss(0)
    loss_of(model, rank.rank).backward()
    model.zero_grad()
    before = memory(model)
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, rank.rank)
    hook.remove()
    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert_same_gradients(model, reference)
    assert memory(model) == before


@on_ranks(1)
def test_bad_arguments(rank: Rank) -> None:
    """They are named."""
    model = fully_shard(torch.nn.Linear(2, 2), mesh=rank.mesh)
    for call in (
        lambda: model.set_manual_backward_finalization(1),
        lambda: model.finalize_backward(async_op=1),
        lambda: model.set_keep_unsharded_storage(1),
        lambda: model.set_keep_unsharded_storage(True, recurse=1),
    ):
        with pytest.raises(ValueError, match="found 1"):
            call()
