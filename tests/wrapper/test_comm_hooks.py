"""``register_comm_hook``: the user's reduction in the engine's place, and the transport that leaves it to the user."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from wrapped import (
    CLOSE,
    DIM,
    FULL,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    Block,
    assert_same_outputs,
    backward,
    both_backward,
    both_forms,
    built,
    check_gradients,
    check_steps,
    placed,
    raised_everywhere,
    reference_backward,
    wrapped,
)

from compare import assert_equal
from fullshard import FullshardError, MixedPrecision, ShardingStrategy, comm_hooks, fully_shard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.comm import CommRequest, GradScaling, HookedTransport, Operand, make_transport, record
from fullshard.engine.ownership import nested_units
from ranks import Rank, on_ranks

MEAN = GradScaling(1.0, 2.0)  # of two ranks


class Mean:
    """A hook that reduces by itself, of either kind, and notes what it was called with; it is not a function."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, list[int], set[torch.dtype]]] = []

    def __call__(self, state: object, *tensors: torch.Tensor) -> None:
        assert all(t.dim() == 1 and t.is_contiguous() for t in tensors)
        self.seen.append((state, [t.numel() for t in tensors], {t.dtype for t in tensors}))
        mean = tensors[0].float()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        mine = mean if len(tensors) == 1 else mean.chunk(dist.get_world_size())[dist.get_rank()]
        tensors[-1].copy_(mine)


# -------------------------------------------------------------------- the transport


def numbers(rank: Rank, numel: int) -> Operand:
    """A reduce-scatter of ``numel`` elements per rank, of whole numbers."""
    region = torch.arange(rank.world_size * numel, dtype=torch.float32) * (rank.rank + 1)
    return Operand(torch.full((numel,), -1.0), region)


def sums(rank: Rank, numel: int) -> torch.Tensor:
    """What :func:`numbers` add up to on this rank."""
    total = sum(range(1, rank.world_size + 1))
    return torch.arange(rank.world_size * numel, dtype=torch.float32).chunk(rank.world_size)[rank.rank] * total


@on_ranks(2)
def test_reduce_scatter(rank: Rank) -> None:
    """The hook gets the first operand of each request that is not empty; the others are reduced underneath."""
    seen: list[Any] = []
    transport = HookedTransport(make_transport(rank.group, rank.device), "mine", lambda *each: seen.append(each))
    requests = [
        CommRequest("a", [numbers(rank, 5), numbers(rank, 2), numbers(rank, 70_000)], MEAN),
        CommRequest("b", [numbers(rank, 3)]),
        CommRequest("c", []),
        CommRequest("d", [numbers(rank, 0), numbers(rank, 2)], GradScaling(2.0, 1.0)),
    ]
    with record() as collectives:
        for work in transport.reduce_scatter(requests):
            work.wait()
    firsts = [request.operands[0] for request in requests[:2]]
    assert [each[0] for each in seen] == ["mine"] * 2
    assert [[t.data_ptr() for t in each[1:]] for each in seen] == [
        [first.unsharded.data_ptr(), first.shard.data_ptr()] for first in firsts
    ]
    for first in firsts:
        assert_equal(first.shard, torch.full_like(first.shard, -1.0), "untouched, as is the hook's region")
        assert_equal(first.unsharded, numbers(rank, first.shard.numel()).unsharded, "not divided")
    for operand in (*requests[0].operands[1:], requests[3].operands[1]):
        assert_equal(operand.shard, sums(rank, operand.shard.numel()) / 2, "others")
    assert [(c.kind, c.unit, c.numel) for c in collectives] == [
        ("reduce_scatter", request.unit, operand.unsharded.numel())
        for request in requests
        for operand in request.operands
    ]


@on_ranks(2)
def test_hook_that_raises_on_one_rank(rank: Rank) -> None:
    """The user's exception comes out, on this rank only; all other messages have arrived, and the group goes on."""

    def hook(state: object, grad: torch.Tensor, shard: torch.Tensor) -> None:
        if rank.rank == 1 and shard.numel() == 3:
            raise ZeroDivisionError("of the user")

    transport = make_transport(rank.group, rank.device)
    with pytest.raises(TypeError, match=r"communication hook: expected a function hook.*found str"):
        HookedTransport(transport, None, "allreduce")  # type: ignore[arg-type]
    requests = [CommRequest("a", [numbers(rank, 3), numbers(rank, 2)]), CommRequest("b", [numbers(rank, 70_000)] * 2)]
    with pytest.raises(ZeroDivisionError, match="of the user") if rank.rank == 1 else contextlib.nullcontext():
        for work in HookedTransport(transport, None, hook).reduce_scatter(requests):
            work.wait()
    for request in requests:
        assert_equal(request.operands[1].shard, sums(rank, request.operands[1].shard.numel()), "arrived")
    after = numbers(rank, 3)
    for work in transport.reduce_scatter([CommRequest("c", [after])]):
        work.wait()
    assert_equal(after.shard, sums(rank, 3), "the group goes on")


# -------------------------------------------------------------------- the wrapper


def sizes(model: nn.Module, world_size: int) -> list[list[int]]:
    """What the hook is called with, in the order of backward."""
    units = list(reversed(nested_units(model)))
    slices = [bucket.layout.slice_numel for unit in units for bucket in unit.buckets]  # type: ignore[attr-defined]
    return [[n * world_size, n] if world_size else [n] for n in slices]


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "orig"), [(FULL, False), (GRAD_OP, True), (NO_SHARD, True), (NO_SHARD, False)])
def test_hook_in_place_of_the_reduction(rank: Rank, strategy: ShardingStrategy, orig: bool) -> None:
    """It is called once per unit and synchronized backward, with the padded gradient and this rank's shard, if any."""
    model, reference = wrapped(rank, strategy, use_orig_params=orig)
    hook, state = Mean(), object()
    model.register_comm_hook(state, hook)
    with model.no_sync():
        backward(rank, model, 0)
    assert hook.seen == []
    backward(rank, model, 1)
    reference_backward(rank, reference, 0, 1)
    check_gradients(model, reference)
    expected = sizes(model, 0 if strategy is NO_SHARD else rank.world_size)
    assert sorted(numels for _, numels, _ in hook.seen) == sorted(expected)
    assert all(given is state and dtypes == {torch.float32} for given, _, dtypes in hook.seen)
    check_steps(rank, model, reference, steps=2)
    assert len(hook.seen) == 9


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "compress"), [(FULL, "none"), (NO_SHARD, "none"), (FULL, "fp16"), (NO_SHARD, "bf16")]
)
def test_hooks_of_the_library(rank: Rank, strategy: ShardingStrategy, compress: str) -> None:
    """The library's hooks, which are PyTorch's own, average in the dtype that they say, also after the first steps."""
    model, reference = wrapped(rank, strategy, use_orig_params=True)
    check_steps(rank, model, reference)
    if compress == "none":
        name = "allreduce_hook" if strategy is NO_SHARD else "reduce_scatter_hook"
        model.register_comm_hook(comm_hooks.DefaultState(rank.group), getattr(comm_hooks, name))
        assert getattr(comm_hooks, name) is getattr(default_hooks, name)
    else:
        state = comm_hooks.LowPrecisionState(rank.group)
        model.register_comm_hook(state, getattr(comm_hooks, f"{compress}_compress_hook"))
    both_backward(rank, model, reference)
    if compress == "bf16":  # it really does round: gradients are representable in its dtype
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.dtype is torch.float32
            assert_equal(p.grad.bfloat16().float(), p.grad, name)
    tolerance = {"none": CLOSE, "fp16": {"rtol": 2e-3, "atol": 2e-4}, "bf16": {"rtol": 2e-2, "atol": 2e-3}}[compress]
    check_gradients(model, reference, **tolerance)
    assert all(hasattr(default_hooks, name) for name in comm_hooks.__all__)


@on_ranks(2)
@both_forms
def test_dtypes_and_missing_gradients(rank: Rank, orig: bool) -> None:
    """The hook gets gradients in the reduce dtype, once per dtype of a unit, and leaves them in the shards' dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        precision = MixedPrecision(torch.bfloat16, dtype)
        model, _ = wrapped(rank, use_orig_params=orig, mixed_precision=precision)
        hook = Mean()
        model.register_comm_hook(None, hook)
        backward(rank, model)
        assert all(dtypes == {dtype} for _, _, dtypes in hook.seen)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM).double())
    inner[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    inner.spare = nn.Parameter(torch.ones(7))
    outer, hook = FSDP(inner, use_orig_params=orig), Mean()
    outer.register_comm_hook(None, hook)
    outer(torch.ones(1, DIM)).sum().backward()
    assert sorted(str(*dtypes) for _, _, dtypes in hook.seen) == ["torch.float32", "torch.float64"]
    assert not orig or (inner.spare.grad is None and inner[0].weight.grad is not None)


@on_ranks(2)
def test_hook_that_fails(rank: Rank) -> None:
    """The hook's error, or that its result has another dtype or size, comes out of backward; the next step is right."""
    model, reference = wrapped(rank)
    mean, broken = Mean(), ["raises", "casts", "cuts"]

    def hook(state: object, grad: torch.Tensor, shard: torch.Tensor) -> None:
        if broken[:1] == ["raises"]:
            raise KeyError("mine")
        mean(state, grad, shard)
        if broken:
            shard.data = shard.data.half() if broken[0] == "casts" else shard.data[:2]

    model.register_comm_hook(None, hook)
    for kind, words in (
        (KeyError, "mine"),
        (TypeError, r"hook: expected .* \d+ elements of .*32 for unit '.*', found \d+ of .*16"),
        (TypeError, "hook: expected .*, found 2 of"),
    ):
        with pytest.raises(kind, match=words):
            backward(rank, model)
        model.zero_grad()
        broken.pop(0)
    check_steps(rank, model, reference)


@on_ranks(2)
def test_hooks_that_are_refused(rank: Rank) -> None:
    """What cannot be called, a second one, on a part of a model or around ``fully_shard``; the model trains on."""
    model, reference = wrapped(rank)
    for hook in (None, "mean", 3):
        with pytest.raises(ValueError, match="expected a function"):
            model.register_comm_hook(None, hook)
    for _ in range(2):
        with pytest.raises(FullshardError, match="outermost"):
            model.module.blocks[0].register_comm_hook(None, Mean())
        assert_same_outputs(rank, model, reference)
    first, second = Mean(), Mean()
    model.register_comm_hook(None, first)
    with pytest.raises(FullshardError, match="a hook is already"):
        model.register_comm_hook(None, second)
    check_steps(rank, model, reference)
    assert len(first.seen) == 3 and second.seen == []
    plain = built(lambda: nn.Sequential(Block(), Block()))
    reference = copy.deepcopy(plain)
    fully_shard(plain[0], mesh=rank.mesh)
    outer = FSDP(plain)
    with pytest.raises(ValueError, match="fully_shard") as caught:
        outer.register_comm_hook(None, second)
    raised_everywhere(rank, caught.value)
    check_steps(rank, outer, reference)


@on_ranks(4)
def test_hooks_with_hybrid_strategies(rank: Rank) -> None:
    """Two reductions cannot be one hook: refused, also if only a unit below is hybrid."""
    one, other = (FSDP(Block(), **placed(rank, strategy)) for strategy in HYBRID)
    for hybrid in (one, FSDP(nn.Sequential(other))):
        with pytest.raises(ValueError, match="hybrid"):
            hybrid.register_comm_hook(None, Mean())
