"""``no_sync``: gradients add up without communication."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from wrapped import (
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    assert_same_outputs,
    backward,
    both_forms,
    check_gradients,
    counts,
    loss_of,
    plain_strategies,
    reference_backward,
    wrapped,
)

from compare import assert_close
from fullshard import (
    CPUOffload,
    MixedPrecision,
    PhaseError,
    ShardingStrategy,
)
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import tiny_units
from ranks import Rank, on_ranks


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "first", "again"),
    [(FULL, 4, 4), (GRAD_OP, 3, 0), (NO_SHARD, 0, 0)],
    ids=lambda value: getattr(value, "name", None),
)
@both_forms
def test_no_sync_counts(rank: Rank, strategy: ShardingStrategy, first: int, again: int, orig: bool) -> None:
    """Nothing is reduced inside, and what is kept from forward to backward is not gathered again."""
    with tiny_units():
        model, reference = wrapped(rank, strategy, use_orig_params=orig)
    with record() as seen, model.no_sync():
        backward(rank, model, 0)
    found = counts(seen)
    assert found["reduce_scatter"] == found["all_reduce"] == 0
    assert found["all_gather"] == first  # the root, and what ran last, keep their parameters until backward
    assert all(p.grad is None for p in model.parameters())
    with record() as seen, model.no_sync():
        backward(rank, model, 1)
    found = counts(seen)
    assert found["reduce_scatter"] == found["all_reduce"] == 0 and found["all_gather"] == again
    with record() as seen:
        backward(rank, model, 2)
    found = counts(seen)
    assert found["all_reduce" if strategy is NO_SHARD else "reduce_scatter"] == 3
    assert found["reduce_scatter" if strategy is NO_SHARD else "all_reduce"] == 0
    reference_backward(rank, reference, 0, 1, 2)
    check_gradients(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_no_sync_hybrid(rank: Rank, strategy: ShardingStrategy) -> None:
    """Neither axis is reduced over inside; afterwards each is, once per unit."""
    model, reference = wrapped(rank, strategy)
    with record() as seen, model.no_sync():
        backward(rank, model, 0)
        backward(rank, model, 1)
    assert counts(seen)["reduce_scatter"] == counts(seen)["all_reduce"] == 0
    with record() as seen:
        backward(rank, model, 2)
    assert counts(seen)["reduce_scatter"] == counts(seen)["all_reduce"] == 3
    reference_backward(rank, reference, 0, 1, 2)
    check_gradients(model, reference)


@on_ranks(2)
@plain_strategies
def test_no_sync_memory(rank: Rank, strategy: ShardingStrategy) -> None:
    """FULL_SHARD frees parameters in between; strategies that keep them until backward keep them after it, too."""
    model, _ = wrapped(rank, strategy)
    for _ in range(2):
        with model.no_sync():
            backward(rank, model, 0)
        full = [sum(bucket.allocated_bytes for bucket in unit.buckets) for unit in nested_units(model)]
        assert all(full) == (strategy is GRAD_OP) and any(full) == (strategy is GRAD_OP), full
    backward(rank, model, 0)
    assert not any(bucket.allocated_bytes for unit in nested_units(model) for bucket in unit.buckets)


@on_ranks(2)
@plain_strategies
@both_forms
def test_no_sync_interleaved(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Any order of microbatches with and without reduction adds up, as long as the last one reduces."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for pattern in ("-+-+", "+--+", "--+", "++-+"):
        for step, sign in enumerate(pattern):
            with model.no_sync() if sign == "-" else contextlib.nullcontext():
                backward(rank, model, step)
        reference_backward(rank, reference, *range(len(pattern)))
        check_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@both_forms
def test_no_sync_dtype(rank: Rank, orig: bool) -> None:
    """Twice without and once with reduction is thrice the gradient, in the shards' dtype, with mixed precision."""
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model, _ = wrapped(rank, use_orig_params=orig, mixed_precision=precision)
    backward(rank, model, 0)
    single = [p.grad for p in model.parameters()]
    model.zero_grad()
    with model.no_sync():
        backward(rank, model, 0)
        backward(rank, model, 0)
    backward(rank, model, 0)
    for (name, p), one in zip(model.named_parameters(), single, strict=True):
        assert p.grad is not None and one is not None and p.grad.dtype is torch.float32
        assert_close(p.grad, 3 * one, name, rtol=1e-5, atol=1e-6)


@on_ranks(2)
@plain_strategies
@both_forms
def test_no_sync_offloaded(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """With offloaded gradients all microbatches add up, whichever of them are reduced."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig, cpu_offload=CPUOffload(offload_params=True))
    backward(rank, model, 0)
    with model.no_sync():
        backward(rank, model, 1)
    backward(rank, model, 2)
    reference_backward(rank, reference, 0, 1, 2)
    check_gradients(model, reference)


@on_ranks(2)
def test_no_sync_of_a_part(rank: Rank) -> None:
    """On an inner wrapper it means that part only."""
    model, reference = wrapped(rank)
    with record() as seen, model.module.parts[1].no_sync():
        backward(rank, model, 0)
    assert counts(seen)["reduce_scatter"] == 2
    backward(rank, model, 1)
    reference_backward(rank, reference, 0, 1)
    check_gradients(model, reference)


@on_ranks(2)
def test_no_sync_ends(rank: Rank) -> None:
    """Settings are as before afterwards: nested, after an error in the block, and within the other front end's."""
    model, reference = wrapped(rank)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    with model.no_sync():
        with model.no_sync():
            backward(rank, model, 0)
        with record() as seen:
            backward(rank, model, 1)
        assert counts(seen)["reduce_scatter"] == 0
    backward(rank, model, 2)
    reference_backward(rank, reference, 0, 1, 2)
    check_gradients(model, reference)


@on_ranks(2)
def test_no_sync_in_a_step(rank: Rank) -> None:
    """In a forward or a backward it is refused."""
    model, _ = wrapped(rank)
    errors = []

    def enter(*_: Any) -> None:
        with pytest.raises(PhaseError, match="between steps") as caught, model.no_sync():
            pass
        errors.append(caught.value)

    handle = model.module.last.register_forward_pre_hook(enter)
    output = model(torch.ones(2, DIM))
    handle.remove()
    assert len(errors) == 1
    output.sum().backward()


@on_ranks(2)
@both_forms
def test_no_sync_around_the_backward_only(rank: Rank, orig: bool) -> None:
    """Entered between forward and backward, it counts for that backward."""
    model, reference = wrapped(rank, use_orig_params=orig)
    loss = loss_of(model, 0, rank.rank)
    with record() as seen, model.no_sync():
        loss.backward()
    assert counts(seen)["reduce_scatter"] == 0
    backward(rank, model, 1)
    reference_backward(rank, reference, 0, 1)
    check_gradients(model, reference)
