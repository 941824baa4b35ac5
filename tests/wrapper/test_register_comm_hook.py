"""``register_comm_hook``: the user's reduction in the engine's place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import (
    CLOSE,
    DIM,
    FULL,
    HYBRID,
    NO_SHARD,
    PLAIN,
    Net,
    Part,
    both_forms,
    check_steps,
    loss_of,
    placed,
    raised_everywhere,
    wrapped,
)

from compare import assert_close, assert_equal, assert_models_equal
from fullshard import (
    FullshardError,
    MixedPrecision,
    ShardingStrategy,
    comm_hooks,
    fully_shard,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.ownership import nested_units
from ranks import Rank, on_ranks


class Mean:
    """A hook that reduces by itself, of either kind, and notes what it was called with."""

    calls: list[tuple[object, list[int], torch.dtype]]

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, state: object, gradient: torch.Tensor, piece: torch.Tensor | None = None) -> None:
        tensors = [gradient] if piece is None else [gradient, piece]
        assert all(t.dim() == 1 and t.is_contiguous() for t in tensors)
        self.calls.append((state, [t.numel() for t in tensors], gradient.dtype))
        whole = gradient.float()
        dist.all_reduce(whole)
        whole /= dist.get_world_size()
        if piece is None:
            gradient.copy_(whole)
        else:
            piece.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


class Narrow(nn.Sequential):
    """Runs in double precision, and looks as if it did not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x.double())
        return y.float()


def sizes(model: nn.Module, world_size: int) -> list[list[int]]:
    """What the hook is called with, in the order of backward."""
    units = list(reversed(nested_units(model)))
    pieces = [bucket.layout.slice_numel for unit in units for bucket in unit.buckets]  # type: ignore[attr-defined]
    return [[n * world_size, n] if world_size else [n] for n in pieces]


@on_ranks(2)
@pytest.mark.parametrize("strategy", PLAIN, ids=lambda s: s.name)
@both_forms
def test_hook_in_place_of_the_reduction(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """Called once per unit and backward, with the padded gradient and this rank's part; without sharding, with one."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    hook, state = Mean(), object()
    model.register_comm_hook(state, hook)
    check_steps(rank, model, reference)
    expected = sizes(model, 0 if strategy is NO_SHARD else rank.world_size)
    assert sorted(numels for _, numels, _ in hook.calls) == sorted(expected)
    assert all(given is state and dtype is torch.float32 for given, _, dtype in hook.calls)
    numel = sum(p.numel() for p in reference.parameters())
    assert sum(numels[0] for _, numels, _ in hook.calls) >= numel
    check_steps(rank, model, reference, steps=2)
    assert len(hook.calls) == 9


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "compress"),
    [(FULL, "none"), (NO_SHARD, "none"), (FULL, "fp16"), (NO_SHARD, "bf16"), (FULL, "bf16")],
    ids=lambda value: getattr(value, "name", value),
)
def test_hooks_of_the_library(rank: Rank, strategy: ShardingStrategy, compress: str) -> None:
    """The library's hooks average in the dtype that they say, and training goes on as without."""
    model, reference = wrapped(rank, strategy, use_orig_params=True)
    group = rank.group
    check_steps(rank, model, reference)  # a hook can come after the first steps
    tolerance = {"none": CLOSE, "fp16": {"rtol": 2e-3, "atol": 2e-4}, "bf16": {"rtol": 2e-2, "atol": 2e-3}}[compress]
    if compress == "none":
        plain = comm_hooks.allreduce_hook if strategy is NO_SHARD else comm_hooks.reduce_scatter_hook
        model.register_comm_hook(comm_hooks.DefaultState(group), plain)
    else:
        hook = getattr(comm_hooks, f"{compress}_compress_hook")
        model.register_comm_hook(comm_hooks.LowPrecisionState(group), hook)
    loss_of(model, 0, rank.rank).backward()
    if compress == "bf16":  # it really does round: gradients are representable in its dtype
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.dtype is torch.float32
            assert_equal(p.grad.bfloat16().float(), p.grad, name)
    check_steps(rank, model, reference, steps=2, **tolerance)


@on_ranks(2)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_hook_with_mixed_precision(rank: Rank, reduce_dtype: torch.dtype) -> None:
    """The hook gets gradients in the reduce dtype; what it leaves comes out in the shards' dtype."""
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=reduce_dtype, buffer_dtype=torch.bfloat16)
    model, _ = wrapped(rank, use_orig_params=True, mixed_precision=precision)
    plain, _ = wrapped(rank, use_orig_params=True, mixed_precision=precision)
    hook = Mean()
    model.register_comm_hook(None, hook)
    for module in (model, plain):
        loss_of(module, 0, rank.rank).backward()
    assert {dtype for _, _, dtype in hook.calls} == {reduce_dtype}
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert_close(mine.grad, theirs.grad, name, rtol=1e-2, atol=1e-3)


@on_ranks(2)
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD], ids=lambda s: s.name)
def test_hook_and_no_sync(rank: Rank, strategy: ShardingStrategy) -> None:
    """Without sync it is not called; then once, with the sum."""
    model, reference = wrapped(rank, strategy)
    hook = Mean()
    model.register_comm_hook(None, hook)
    with model.no_sync():
        loss_of(model, 0, rank.rank).backward()
        loss_of(model, 1, rank.rank).backward()
    assert hook.calls == []
    loss_of(model, 2, rank.rank).backward()
    assert len(hook.calls) == 3
    for step in range(3):
        (sum(loss_of(reference, step, r) for r in range(rank.world_size)) / rank.world_size).backward()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_parameters_without_gradients(rank: Rank) -> None:
    """Which parameters have gradients is still agreed on: None stays None, zeros of one rank are zeros."""
    torch.manual_seed(0)
    model = Net()
    model.spare = nn.Parameter(torch.ones(7))
    outer = FSDP(model, use_orig_params=True)
    hook = Mean()
    outer.register_comm_hook(None, hook)
    loss_of(outer, 0, rank.rank).backward()
    assert model.spare.grad is None and model.first.weight.grad is not None
    assert len(hook.calls) == 1


@on_ranks(2)
def test_hook_that_fails(rank: Rank) -> None:
    """The hook's error comes out of backward, and a later step without failure is right."""
    model, reference = wrapped(rank)
    mean, broken = Mean(), [True]

    def hook(state: object, *tensors: torch.Tensor) -> None:
        if broken[0]:
            raise KeyError("mine")
        mean(state, *tensors)

    model.register_comm_hook(None, hook)
    with pytest.raises(KeyError, match="mine"):
        loss_of(model, 0, rank.rank).backward()
    broken[0] = False
    model.zero_grad()
    check_steps(rank, model, reference, steps=2)


@on_ranks(1)
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD], ids=lambda s: s.name)
def test_hook_on_one_rank(rank: Rank, strategy: ShardingStrategy) -> None:
    """Alone there is nothing to reduce: training goes on, whether the hook is called or not."""
    model, reference = wrapped(rank, strategy)
    model.register_comm_hook(None, Mean())
    check_steps(rank, model, reference, steps=2)


@on_ranks(2)
def test_hook_and_the_other_front_end(rank: Rank) -> None:
    """With a fully sharded part below the hook is refused everywhere, and the model trains without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Linear(8, 8), nn.Linear(8, DIM))
    reference = copy.deepcopy(model)
    fully_shard(model[1], mesh=rank.mesh)
    outer = FSDP(model)
    hook = Mean()
    with pytest.raises(ValueError, match="fully_shard") as caught:
        outer.register_comm_hook(None, hook)
    raised_everywhere(rank, caught.value)
    check_steps(rank, outer, reference)
    assert hook.calls == []


@on_ranks(2)
@both_forms
def test_hook_gets_every_bucket(rank: Rank, orig: bool) -> None:
    """Parameters of two dtypes are two calls."""
    model = nn.Sequential(nn.Linear(DIM, DIM), Narrow(nn.Linear(DIM, DIM).double()))
    outer = FSDP(model, use_orig_params=orig)
    hook = Mean()
    outer.register_comm_hook(None, hook)
    outer(torch.ones(1, DIM)).sum().backward()
    assert sorted(str(dtype) for _, _, dtype in hook.calls) == ["torch.float32", "torch.float64"]


# ---------------------------------------------------------------- bad input


@on_ranks(2)
@pytest.mark.parametrize("hook", [None, "mean", 3])
def test_no_function(rank: Rank, hook: Any) -> None:
    """What cannot be called is refused, and a hook can be registered afterwards."""
    model, _ = wrapped(rank)
    with pytest.raises(ValueError, match="expected a function"):
        model.register_comm_hook(None, hook)
    model.register_comm_hook(None, Mean())


@on_ranks(2)
def test_second_hook(rank: Rank) -> None:
    """A model has one hook; the first stays."""
    model, reference = wrapped(rank)
    first, second = Mean(), Mean()
    model.register_comm_hook(None, first)
    with pytest.raises(FullshardError, match="a hook is already"):
        model.register_comm_hook(None, second)
    check_steps(rank, model, reference)
    assert len(first.calls) == 3 and second.calls == []


@on_ranks(2)
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_hook_on_a_part(rank: Rank, ran: bool) -> None:
    """Only the root takes a hook."""
    model, reference = wrapped(rank)
    if ran:
        check_steps(rank, model, reference)
    with pytest.raises(FullshardError, match="outermost"):
        model.module.parts[0].register_comm_hook(None, Mean())


@on_ranks(4)
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_hook_with_hybrid_strategies(rank: Rank, strategy: ShardingStrategy) -> None:
    """Two reductions cannot be one hook: refused, also if only a unit below is hybrid; the model still trains."""
    model, reference = wrapped(rank, strategy)
    with pytest.raises(ValueError, match="hybrid"):
        model.register_comm_hook(None, Mean())
    check_steps(rank, model, reference)
    torch.manual_seed(0)
    outer = FSDP(nn.Sequential(FSDP(Part(), **placed(rank, strategy)), Part()))
    with pytest.raises(ValueError, match="hybrid"):
        outer.register_comm_hook(None, Mean())
