"""``clip_grad_norm_``: the norm of gradients that are spread in all ways."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import (
    CLOSE,
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    PLAIN,
    Block,
    assert_same_outputs,
    backward,
    both_backward,
    both_forms,
    built,
    check_gradients,
    placed,
    reference_backward,
    wrapped,
)

from compare import assert_close, assert_equal
from fullshard import (
    CPUOffload,
    ShardingStrategy,
    fully_shard,
)
from fullshard import FullyShardedDataParallel as FSDP
from pairwise import each_value
from ranks import Rank, on_ranks


def counted_all_reduces() -> Any:
    """A mock that carries out all all-reduces of ``torch.distributed``."""
    return mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)


def check_clipped(
    rank: Rank, model: FSDP, reference: nn.Module, max_norm: float, norm_type: float, *, calls: int | None = None
) -> None:
    """Clip both, and compare norms, gradients, and what a step makes of them."""
    with counted_all_reduces() as all_reduce:
        total = model.clip_grad_norm_(max_norm, norm_type)
    assert calls is None or all_reduce.call_count == calls
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    assert total.shape == () and total.dtype is torch.float32
    assert_close(total, expected.detach(), "norm", **CLOSE)
    check_gradients(model, reference)
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert_same_outputs(rank, model, reference)


@on_ranks(2)
@each_value(
    strategy=[*PLAIN, FULL], orig=[False, True], norm_type=[1, 2, 3, math.inf], offload=[False, False, True, False]
)
def test_clip(rank: Rank, strategy: ShardingStrategy, orig: bool, norm_type: float, offload: bool) -> None:
    """Norms and clipped gradients are those of an unsharded model, with one all-reduce at most."""
    offload_policy = CPUOffload(offload_params=True) if offload else None
    model, reference = wrapped(rank, strategy, use_orig_params=orig, cpu_offload=offload_policy)
    both_backward(rank, model, reference)
    calls = None if offload else int(strategy is not NO_SHARD)
    check_clipped(rank, model, reference, 0.05, norm_type, calls=calls)


@on_ranks(4)
@pytest.mark.parametrize(("norm_type", "orig"), [(2.0, False), (math.inf, True)])
def test_mixed_strategies(rank: Rank, norm_type: float, orig: bool) -> None:
    """Units of all strategies and front ends in one model clip as one, with one all-reduce per group of shards."""
    model = built(lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(DIM, DIM), nn.Linear(DIM, 3)))
    reference = copy.deepcopy(model)
    for index, strategy in enumerate((FULL, NO_SHARD, *HYBRID)):
        model[index] = FSDP(model[index], use_orig_params=orig, **placed(rank, strategy))
    fully_shard(model[4], mesh=rank.mesh)
    outer = FSDP(model, use_orig_params=orig, sharding_strategy=GRAD_OP)
    with outer.no_sync():
        backward(rank, outer, 0)
    backward(rank, outer, 1)
    reference_backward(rank, reference, 0, 1)
    with counted_all_reduces() as all_reduce:
        total = outer.clip_grad_norm_(0.05, norm_type)
    groups = [id(call.kwargs.get("group")) for call in all_reduce.call_args_list]
    assert len(groups) == len(set(groups)) <= 3
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
    assert_close(total, expected.detach(), "norm", **CLOSE)
    check_gradients(outer, reference)


@on_ranks(2)
@pytest.mark.parametrize(("orig", "norm_type"), [(False, 2.0), (True, math.inf)])
def test_ignored_count_once(rank: Rank, orig: bool, norm_type: float) -> None:
    """Ignored parameters, whose gradients the user has made equal on all ranks, count once and are scaled."""
    model = built()
    reference = copy.deepcopy(model)
    ignored = model.first
    outer = FSDP(model, use_orig_params=orig, ignored_modules=[ignored])
    both_backward(rank, outer, reference)
    for p in ignored.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(rank.world_size)
    check_clipped(rank, outer, reference, 0.05, norm_type, calls=1)


@on_ranks(2)
@both_forms
def test_small_gradients_of_a_part_and_none(rank: Rank, orig: bool) -> None:
    """Small gradients keep every bit, an inner wrapper clips its own; without any, every rank warns and gets zero."""
    model, reference = wrapped(rank, use_orig_params=orig)
    both_backward(rank, model, reference)
    if orig:
        model.module.last.bias.grad = reference.last.bias.grad = None
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    total = model.clip_grad_norm_(1000.0)
    assert 0 < float(total) < 1000 and not total.requires_grad
    assert_equal([p.grad for p in model.parameters()], before, "gradients")
    total = model.module.blocks[0].clip_grad_norm_(0.01)
    expected = torch.nn.utils.clip_grad_norm_(reference.blocks[0].parameters(), 0.01)
    assert_close(total, expected.detach(), "norm of a part", **CLOSE)
    check_clipped(rank, model, reference, 0.05, 2.0, calls=1)
    model.zero_grad()
    for norm_type in (2.0, math.inf):
        with pytest.warns(UserWarning, match="no gradients"):
            total = model.clip_grad_norm_(1.0, norm_type)
        assert_equal(total, torch.tensor(0.0), "norm of nothing")


@on_ranks(2)
def test_dtypes_of_norms(rank: Rank) -> None:
    """Norms of low-precision gradients are computed in fp32, and are the same on all ranks, also with empty shards."""
    for dtype in (torch.bfloat16, torch.float16):
        outer = FSDP(nn.Linear(64, 64, bias=False).to(dtype))
        (parameter,) = outer.parameters()
        parameter.grad = torch.full_like(parameter, 200.0)  # the sum of squares is far beyond fp16
        total = outer.clip_grad_norm_(1.0)
        assert total.dtype is dtype
        assert_close(total.float(), torch.tensor(12800.0), "norm", rtol=1e-2)
        assert_close(parameter.grad.float(), torch.full_like(parameter, 1 / 64).float(), "clipped", rtol=1e-2)
    outer = FSDP(nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)))
    for parameter in outer.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert outer.clip_grad_norm_(1.0).dtype is torch.float32
    outer = FSDP(nn.Linear(3, 1, bias=False).bfloat16())
    outer(torch.tensor([[1.1, 2.3, 3.7]]).bfloat16()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = outer.clip_grad_norm_(1.0)
    totals: list[Any] = [None] * rank.world_size
    dist.all_gather_object(totals, total.cpu())
    assert_equal(totals[0], totals[1], "norm")
    assert total.dtype is torch.bfloat16


@on_ranks(2)
def test_nan_and_bad_norms(rank: Rank) -> None:
    """A NaN on one rank is a NaN on all; norms that are none are refused before anything is communicated."""
    model, _ = wrapped(rank)
    backward(rank, model)
    for norm_type in (0, -1.0, math.nan, -math.inf):
        with counted_all_reduces() as all_reduce, pytest.raises(ValueError, match="norm_type"):
            model.clip_grad_norm_(1.0, norm_type)
        assert not all_reduce.called
    if rank.rank == 1:
        next(iter(model.parameters())).grad[0] = math.nan
    assert math.isnan(float(model.clip_grad_norm_(1.0)))
