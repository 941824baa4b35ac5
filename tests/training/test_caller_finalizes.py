"""Backward that the caller ends, with ``finalize_backward``; and memory of unsharded parameters that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from front_ends import (
    COMPOSABLE,
    STRATEGIES,
    adam,
    assert_at_rest,
    assert_same_gradients,
    build,
    sharded_with_reference,
    step_and_clear,
)
from fullshard import FullshardError, GradientReductionHandle, PhaseError, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import units_of
from models import Stack, held_bytes, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks


def finalizing(rank: Rank, **options: Any) -> tuple[Any, Any]:
    """A model whose backward the caller ends, and its reference."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2), **options)
    model.set_manual_backward_finalization(True)
    return model, reference


def backward(model: Any, reference: Any, rank: Rank, step: int = 0) -> None:
    """One microbatch of both, the model's not finalized."""
    square_loss(step)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(step))


@on_ranks(2)
@each_value(strategy=STRATEGIES, sync=["each", "last"], async_op=[False, True])
def test_gradients_are_those_of_all_microbatches(rank: Rank, strategy: str, sync: str, async_op: bool) -> None:
    """They are reduced in each microbatch, or all as the caller finalizes."""
    model, reference = finalizing(rank, strategy=strategy)
    optimizers = [adam(each.parameters()) for each in (model, reference)]
    for step in range(2):
        model.set_requires_gradient_sync(sync == "each")
        for number in range(3):
            backward(model, reference, rank, 3 * step + number)
        model.set_requires_gradient_sync(True)
        with record() as seen:
            handle = model.finalize_backward(async_op=async_op)
        assert sync == "last" or not any(each.kind == "reduce_scatter" for each in seen)
        if async_op:
            assert isinstance(handle, GradientReductionHandle)
            handle.wait()
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        step_and_clear(*optimizers)


@on_ranks(2)
def test_nothing_runs_or_steps_before_the_handle_is_waited_for(rank: Rank) -> None:
    """Nor before ``finalize_backward``; after a reset there is nothing to wait for."""
    model, reference = finalizing(rank)
    optimizer = adam(model.parameters())
    assert model.finalize_backward() is None  # before the first forward
    backward(model, reference, rank)
    with pytest.raises(PhaseError, match=r"call finalize_backward\(\) first"):
        optimizer.step()
    with pytest.raises(PhaseError, match="was not finalized"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    for refused in (lambda: square_loss()(model, rank.rank), optimizer.step, model.finalize_backward):
        with pytest.raises(PhaseError, match=r"call wait\(\) of its handle"):
            refused()
    handle.wait()
    handle.wait()
    assert_same_gradients(model, reference)
    optimizer.zero_grad()

    square_loss()(model, rank.rank).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(FullshardError, match="dropped"):
            handle.wait()
    optimizer.zero_grad()  # the step is repeated: units whose reduction was over have their .grad
    square_loss()(model, rank.rank).backward()
    model.finalize_backward()
    assert_same_gradients(model, reference)
    model.set_manual_backward_finalization(False)
    with pytest.raises(FullshardError, match="manual finalization is off"):
        model.finalize_backward()
    for call in (lambda m: m.set_manual_backward_finalization(True), lambda m: m.finalize_backward()):
        with pytest.raises((FullshardError, TypeError), match="expected the root module"):
            call(model.blocks[0])


@on_ranks(2)
def test_finalizing_twice_changes_nothing(rank: Rank) -> None:
    """Also with zeros for unused parameters, and after a step."""
    model, reference = finalizing(rank)
    model.set_reduce_scatter_unused_params(True)
    optimizer = adam(model.parameters())
    backward(model, reference, rank)
    model.finalize_backward()
    with record() as seen:
        model.finalize_backward()
    assert not seen
    assert_same_gradients(model, reference)
    step_and_clear(optimizer)
    model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(4)
def test_gradients_without_all_reduce_are_refused(rank: Rank) -> None:
    """Gradients that would not be complete are an error, until the all-reduce is on again."""
    model, reference = finalizing(rank, mesh=rank.make_mesh(2, 2))
    model.set_requires_all_reduce(False)
    backward(model, reference, rank)
    with pytest.raises(FullshardError, match=r"set_requires_all_reduce\(True\)"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    assert_same_gradients(model, reference)


@on_ranks(1)
def test_units_below_the_root_and_bad_arguments_are_refused(rank: Rank) -> None:
    """A unit below the root is an error in the first forward, also of a model that was on the meta device."""
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
    for call in (
        lambda: model.set_manual_backward_finalization(1),
        lambda: model.finalize_backward(async_op=1),
        lambda: model.set_keep_unsharded_storage(1),
        lambda: model.set_keep_unsharded_storage(True, recurse=1),
    ):
        with pytest.raises(ValueError, match="found 1"):
            call()


# -------------------------------------------------------------------- set_keep_unsharded_storage


def addresses(model: Any) -> list[int]:
    """Of unsharded parameters."""
    return [p.unsharded.untyped_storage().data_ptr() for unit in units_of(model) for p in unit.parameters]


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_unsharded_parameters_keep_their_addresses(rank: Rank, strategy: str) -> None:
    """Over microbatches, steps and a failed forward, with the same gradients; turned off, all is freed."""
    model, reference = finalizing(rank, strategy=strategy)
    model.set_keep_unsharded_storage(True)
    seen = []
    for step in range(3):
        for number in range(2):
            backward(model, reference, rank, 2 * step + number)
            seen.append(addresses(model))
        model.finalize_backward()
        assert_same_gradients(model, reference)
        if step == 1:
            hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                square_loss()(model, rank.rank)
            hook.remove()
    assert all(seen[0]) and all(each == seen[0] for each in seen)
    model.set_keep_unsharded_storage(False)
    for unit in units_of(model):
        unit.reshard()
    assert_at_rest(model)
    assert not any(held_bytes(bucket) for unit in units_of(model) for bucket in unit.buckets)
