"""In which dtypes modules get their inputs, unit by unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from parity import batch
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.comm import record
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy
from ranks import Rank, on_ranks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
S = ShardingStrategy


class Probe(nn.Module):
    """A linear layer that notes the dtypes of its inputs, of its weight inside forward, and of its output."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inner = inner
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *more: Any, scale: torch.Tensor | None = None) -> torch.Tensor:
        rest = [value.dtype for value in (*more, scale) if isinstance(value, torch.Tensor)]
        self.seen.append((x.dtype, self.linear.weight.dtype, *rest))
        y = self.linear(x.to(self.linear.weight.dtype))
        return y if self.inner is None else self.inner(y.to(x.dtype))


@on_ranks(4)
@pytest.mark.parametrize("strategy", list(S), ids=lambda s: s.name)
def test_dtypes_by_strategy(rank: Rank, strategy: ShardingStrategy) -> None:
    """The same with every strategy: computed in param_dtype, reduced in reduce_dtype on both axes."""
    model = Probe(Probe())
    inner = model.inner
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard")) if strategy.hybrid else rank.mesh
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Probe}),
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32),
        device_mesh=mesh,
    )
    with record() as seen:
        wrapped(batch(rank.rank, 0)).float().sum().backward()
    assert model.seen == [(BF16, BF16)] == inner.seen
    gathers = {BF16} if strategy is not S.NO_SHARD else set()
    assert {c.dtype for c in seen} == gathers | {F32}


@on_ranks(2)
@pytest.mark.parametrize("root", [True, False], ids=["root", "no root"])
@pytest.mark.parametrize("inner", [True, False], ids=["inner", "no inner"])
def test_which_inputs_are_cast(rank: Rank, root: bool, inner: bool) -> None:
    """cast_root_forward_inputs is for the root, cast_forward_inputs for all others, and only for them."""
    model = Probe(Probe(Probe()))
    first, second = model.inner, model.inner.inner
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=inner, cast_root_forward_inputs=root)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Probe}), mixed_precision=precision)
    out = wrapped(batch(rank.rank, 0))
    at_root = BF16 if root else F32
    below = BF16 if inner else at_root
    assert model.seen == [(at_root, BF16)]
    assert first.seen == [(below, BF16)] == second.seen
    assert out.dtype is BF16  # what the last layer gave: outputs are left alone
    out.float().sum().backward()


@on_ranks(2)
def test_casts_of_one_unit(rank: Rank) -> None:
    """Units choose for themselves: one computes in half, its subgroup in full precision."""
    model = Probe(Probe(Probe()))
    first, second = model.inner, model.inner.inner
    half = MixedPrecision(param_dtype=F16, cast_forward_inputs=True)
    policy = CustomPolicy(lambda m: {"mixed_precision": half} if m is first else m is second)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    wrapped(batch(rank.rank, 0)).sum().backward()
    assert model.seen == [(F32, F32)]
    assert first.seen == [(F16, F16)]
    assert second.seen == [(F16, F32)]  # no precision, so no cast


class Pair(NamedTuple):
    """Activations by name."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    """Activations in a dataclass, one nested."""

    pair: Pair
    ids: torch.Tensor


@on_ranks(2)
def test_inputs_of_all_kinds(rank: Rank) -> None:
    """Floats are cast in keywords, tuples, dicts and dataclasses too; integers and the caller's own are left alone."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.seen: list[Any] = []

        def forward(self, data: Record, many: dict[str, Any], *, scale: torch.Tensor, flag: str) -> torch.Tensor:
            floats = (data.pair.left, data.pair.right, many["list"][0], scale)
            assert type(data) is Record and type(data.pair) is Pair and flag == "on"
            self.seen = [*(t.dtype for t in floats), data.ids.dtype, many["mask"].dtype]
            return self.linear(data.pair.left * scale)[data.ids]

    model = Reader()
    wrapped = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(param_dtype=BF16))
    x, ids = batch(rank.rank, 0).requires_grad_(), torch.tensor([0, 2])
    data = Record(Pair(x, x.detach()), ids)
    many = {"list": [x.detach().double()], "mask": ids > 1}
    wrapped(data, many, scale=torch.ones(6), flag="on").float().sum().backward()
    assert model.seen == [BF16] * 4 + [torch.int64, torch.bool]
    assert data.pair.left is x and x.dtype is F32 and many["list"][0].dtype is F64
    assert x.grad is not None and x.grad.dtype is F32 and x.grad.abs().sum() > 0


@on_ranks(2)
def test_no_cast_without_a_parameter_dtype(rank: Rank) -> None:
    """reduce_dtype or buffer_dtype alone leave inputs alone."""
    for precision in (MixedPrecision(reduce_dtype=BF16, cast_forward_inputs=True), MixedPrecision(buffer_dtype=BF16)):
        model = Probe()
        wrapped = FullyShardedDataParallel(model, mixed_precision=precision)
        wrapped(batch(rank.rank, 0).double())
        assert model.seen == [(F64, F32)]
