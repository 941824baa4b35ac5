"""Accumulation in wrappers: with and without sync in any order, and what may happen in between."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from wrapper_models import (
    CLOSE,
    adam,
    assert_at_rest,
    assert_like,
    units,
    with_reference,
)

from compare import assert_close, assert_equal
from fullshard import FullshardError, FullyShardedDataParallel, ShardingStrategy
from fullshard.comm import record
from models import LossOf, Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
STRATEGIES = pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
BLOCKS = ["blocks.0", "blocks.1"]


def accumulate(
    model: FullyShardedDataParallel, reference: nn.Module, rank: Rank, syncs: Sequence[bool], first: int = 0
) -> None:
    """One microbatch per entry on both models, with or without sync."""
    for number, sync in enumerate(syncs):
        context = contextlib.nullcontext() if sync else model.no_sync()
        with context, record() as seen:
            square_loss(first + number)(model, rank.rank).backward()
        sent = {c.kind for c in seen} - {"all_gather"}
        assert bool(sent) == sync
        reference_backward(reference, rank.world_size, square_loss(first + number))


@on_ranks(2)
@BOTH
@STRATEGIES
@pytest.mark.parametrize("pattern", ["0001", "101", "0101"])
def test_interleaved_accumulation(rank: Rank, original: bool, strategy: ShardingStrategy, pattern: str) -> None:
    """However microbatches with and without sync alternate, at the last sync gradients are those of all of them."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original, sharding_strategy=strategy)
    optimizers = adam(model.parameters()), adam(reference.parameters())
    for step in range(2):
        accumulate(model, reference, rank, [char == "1" for char in pattern], first=10 * step)
        assert_like(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_like(model, reference, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@BOTH
def test_twice_the_same_microbatch_is_twice_the_gradient(rank: Rank, original: bool) -> None:
    """Without sync and then with it, the same microbatch gives exactly twice its gradient."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    with model.no_sync():
        square_loss()(model, rank.rank).backward()
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    for parameter in reference.parameters():
        parameter.grad *= 2
    assert_like(model, reference, grads=True, rtol=1e-6)


@on_ranks(2)
def test_gradients_without_sync_are_pending(rank: Rank) -> None:
    """Without sync ``.grad`` stays as it was; the unreduced gradients are this rank's own, and full."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=True)
    with model.no_sync():
        square_loss()(model, rank.rank).backward()
    assert all(p.grad is None for p in model.parameters())
    square_loss()(reference, rank.rank).backward()
    pending = model.get_pending_gradients()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_equal(pending[ours].unreduced, theirs.grad, "pending")
    model.synchronize_gradients()
    reference.zero_grad()
    reference_backward(reference, rank.world_size, square_loss())
    assert_like(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@BOTH
def test_some_units_without_sync(rank: Rank, original: bool) -> None:
    """A wrapper inside may accumulate while the others reduce."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    with model.module.blocks[1].no_sync(), record() as seen:
        square_loss(0)(model, rank.rank).backward()
    assert sorted(units(seen, "reduce_scatter")) == ["", "blocks.0"]
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_like(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@BOTH
def test_first_used_in_the_last_microbatch(rank: Rank, original: bool) -> None:
    """A unit that runs in the last microbatch only, or in the first only, has the gradients of that one."""

    def loss_of(step: int, run: list[int]) -> LossOf:
        return lambda model, number: model(batch(number, step, 4, 6), run).square().mean()

    for runs in ([[0], [0, 1]], [[0, 1], [0]], [[1], [0]]):
        model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
        with model.no_sync():
            loss_of(0, runs[0])(model, rank.rank).backward()
        loss_of(1, runs[1])(model, rank.rank).backward()
        for step, run in enumerate(runs):
            reference_backward(reference, rank.world_size, loss_of(step, run))
        assert_like(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
@BOTH
@STRATEGIES
def test_clearing_while_accumulating(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """``zero_grad`` drops what waits for a reduction as well, set to None or to zero."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original, sharding_strategy=strategy)
    for to_none in (True, False):
        with model.no_sync():
            square_loss(5)(model, rank.rank).backward()
        model.zero_grad(set_to_none=to_none)
        accumulate(model, reference, rank, [False, True])
        assert_like(model, reference, grads=True, **CLOSE)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
@BOTH
@STRATEGIES
def test_stepping_while_accumulating(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """An optimizer's step, and edits of full parameters, between microbatches without sync count in the next."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original, sharding_strategy=strategy)
    ours, theirs = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (model, reference))
    accumulate(model, reference, rank, [True])
    with model.no_sync():
        square_loss(1)(model, rank.rank).backward()
    ours.step()
    theirs.step()
    output, expected = (of(batch(0, 9, 4, 6)).detach() for of in (model, reference))
    assert_close(output, expected, "output", **CLOSE)
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(0.5)
    output, expected = (of(batch(0, 9, 4, 6)).detach() for of in (model, reference))
    assert_close(output, expected, "output", **CLOSE)
    model.zero_grad()
    assert_like(model, reference, **CLOSE)


@on_ranks(2)
@BOTH
def test_moving_while_accumulating_is_refused(rank: Rank, original: bool) -> None:
    """Gradients that wait for a reduction are not lost by a move to another dtype: it is refused, then works."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original)
    with model.no_sync():
        square_loss()(model, rank.rank).backward()
    with pytest.raises(FullshardError, match="synchronize_gradients"):
        model.double()
    model.synchronize_gradients()
    model.double()
    reference_backward(reference, rank.world_size, square_loss())
    assert_like(model, reference.double(), grads=True, **CLOSE)


@on_ranks(2)
@BOTH
@STRATEGIES
def test_exception_while_accumulating(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """If the block of ``no_sync`` raises, syncing is as before; clearing gradients makes a clean start."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original, sharding_strategy=strategy)
    with pytest.raises(KeyError), model.no_sync():
        _raises_after_backward(model, rank)
    model.zero_grad()
    accumulate(model, reference, rank, [True, False, True])
    assert_like(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


def _raises_after_backward(model: nn.Module, rank: Rank) -> None:
    square_loss(3)(model, rank.rank).backward()
    raise KeyError


@on_ranks(2)
def test_freezing_while_accumulating(rank: Rank) -> None:
    """What was trained in an earlier microbatch has that one's gradient although it is frozen in the last."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=True)
    accumulate(model, reference, rank, [False])
    for of in (model.module, reference):
        of.first.weight.requires_grad_(False)
    accumulate(model, reference, rank, [True], first=1)
    assert_like(model, reference, grads=True, **CLOSE)
