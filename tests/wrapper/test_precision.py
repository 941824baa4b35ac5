"""MixedPrecision: what is computed, sent, added up, kept and saved in which dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity import Block, Net, assert_states_alike, batch, built, mean_square
from torch import nn

from compare import assert_close, assert_equal
from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy
from ranks import Rank, on_ranks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
S = ShardingStrategy
BLOCKS = ModuleWrapPolicy({Block})
MODES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


def casting_gradients(model: nn.Module, dtype: torch.dtype, *losses: torch.Tensor) -> list[list[torch.Tensor]]:
    """Per batch the gradients of a model that is computed in ``dtype``, in this dtype."""
    found = []
    for x in losses:
        low = copy.deepcopy(model).to(dtype)
        mean_square(low, x.to(dtype)).backward()
        found.append([p.grad for p in low.parameters()])
    return found


# -------------------------------------------------------------------- values


@on_ranks(4)
@MODES
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_strategies_agree(rank: Rank, offload: bool, use_orig_params: bool) -> None:
    """Computed in bfloat16 and reduced in float32, gradients are the same with every strategy, offloaded or not."""
    by_rank = casting_gradients(built(Net), BF16, *(batch(r, 0) for r in range(4)))
    for strategy in S:
        wrapped = FullyShardedDataParallel(
            built(Net),
            sharding_strategy=strategy,
            auto_wrap_policy=BLOCKS,
            mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32, buffer_dtype=BF16),
            cpu_offload=CPUOffload(offload_params=offload),
            use_orig_params=use_orig_params,
            device_mesh=rank.make_mesh(2, 2) if strategy.hybrid else rank.mesh,
        )
        mean_square(wrapped, batch(rank.rank, 0)).backward()
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            for (name, p), *each in zip(wrapped.named_parameters(), *by_rank, strict=True):
                assert_close(p.grad, sum(g.float() for g in each) / 4, f"{name} with {strategy}", 1e-6, 1e-9)


# -------------------------------------------------------------------- gradients that stay low


@on_ranks(2)
@MODES
@pytest.mark.parametrize("reduce", [None, F16], ids=str)
def test_keep_low_precision_grads(rank: Rank, reduce: torch.dtype | None, use_orig_params: bool) -> None:
    """Gradients stay in the dtype in which they were reduced; the values are the same."""
    gradients = []
    for keep in (False, True):
        wrapped = FullyShardedDataParallel(
            built(Net),
            auto_wrap_policy=BLOCKS,
            mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=reduce, keep_low_precision_grads=keep),
            use_orig_params=use_orig_params,
        )
        mean_square(wrapped, batch(rank.rank, 0)).backward()
        present = [p for p in wrapped.parameters() if p.grad is not None]
        assert {p.grad.dtype for p in present} == {(reduce or BF16) if keep else F32}
        assert {p.dtype for p in present} == {F32}
        gradients.append([p.grad.float().clone() for p in present])
        mean_square(wrapped, batch(rank.rank, 0)).backward()  # adds up in the same dtype
        gradients[-1] += [p.grad.float() for p in present]
        assert {p.grad.dtype for p in present} == {(reduce or BF16) if keep else F32}
        torch.optim.SGD(present, lr=0.1).zero_grad()
    for low, full in zip(gradients[1], gradients[0], strict=True):
        assert_close(low, full, "gradient", 1e-2, 1e-6)


# -------------------------------------------------------------------- buffers


class Buffered(nn.Module):
    """Buffers of several kinds; notes their dtypes."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inner = inner
        self.register_buffer("table", torch.arange(6) / 7)
        self.register_buffer("wide", torch.arange(6).double() / 7)
        self.register_buffer("ids", torch.arange(6))
        self.register_buffer("hidden", torch.arange(6) / 7, persistent=False)
        self.register_buffer("nothing", None)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(b.dtype for b in (self.table, self.wide, self.ids, self.hidden)))
        x = self.linear(x) + (self.table + self.wide + self.hidden).to(x.dtype)
        return x if self.inner is None else self.inner(x)


@on_ranks(2)
@MODES
@pytest.mark.parametrize("param", [BF16, None], ids=str)
def test_buffer_dtype(rank: Rank, param: torch.dtype | None, use_orig_params: bool) -> None:
    """Buffers of floats are cast before the first forward and stay so; state dicts have them as they were."""
    model = Buffered(Buffered())
    inner = model.inner
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Buffered}),
        mixed_precision=MixedPrecision(param_dtype=param, buffer_dtype=BF16),
        use_orig_params=use_orig_params,
    )
    assert_states_alike(wrapped, reference)  # before the first forward
    for step in range(2):
        wrapped(batch(rank.rank, step)).float().sum().backward()
        assert {m.table.dtype for m in (model, inner)} == {BF16}
        state = wrapped.state_dict()
        assert {name: value.dtype for name, value in state.items()} == {
            name: value.dtype for name, value in reference.state_dict().items()
        }
        for name in ("table", "inner.wide"):
            assert_equal(state[name], reference.state_dict()[name].to(BF16).to(state[name].dtype), name)
        assert {m.table.dtype for m in (model, inner)} == {BF16}  # in training again
        for name in ("linear.weight", "inner.linear.bias"):
            assert_equal(state[name], reference.state_dict()[name], name)
    assert model.seen == [(BF16, BF16, torch.int64, BF16)] * 2 == inner.seen
    assert model.nothing is None
    wrapped.load_state_dict(reference.state_dict())
    assert model.table.dtype is BF16
    wrapped(batch(rank.rank, 2)).float().sum().backward()
    assert model.seen[-1] == (BF16, BF16, torch.int64, BF16)


@on_ranks(2)
def test_buffers_left_alone(rank: Rank) -> None:
    """Without buffer_dtype, and in ignored modules, buffers keep their dtype."""
    for precision in (MixedPrecision(param_dtype=BF16), MixedPrecision(param_dtype=BF16, buffer_dtype=F16)):
        model = Buffered(Buffered())
        inner = model.inner
        wrapped = FullyShardedDataParallel(
            model, ignored_modules=[inner], mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Buffered})
        )
        inner.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        wrapped(batch(rank.rank, 0)).float().sum().backward()
        assert inner.seen == [(F32, F64, torch.int64, F32)]
        own = precision.buffer_dtype
        assert model.seen == [(own or F32, own or F64, torch.int64, own or F32)]


@on_ranks(2)
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["one", "each"])
def test_shared_buffers(rank: Rank, policy: Any) -> None:
    """A buffer that modules share stays shared, and the tensor that others hold, when it is cast, saved and loaded."""
    table = torch.arange(6) / 7
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    layers = list(model)
    for layer in layers:
        layer.register_buffer("table", table)
    original = table.clone()
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    )
    for _ in range(2):
        wrapped(batch(rank.rank, 0))
        assert [layer.table is table for layer in layers] == [True, True]
        assert table.dtype is BF16
        state = wrapped.state_dict()
        for name in ("0.table", "1.table"):
            assert_equal(state[name], original.to(BF16).float(), name)
        wrapped.load_state_dict(state)


@on_ranks(2)
@MODES
def test_buffers_that_change(rank: Rank, use_orig_params: bool) -> None:
    """State dicts have what training has made of buffers in low precision."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, mixed_precision=MixedPrecision(BF16, BF16, BF16)
    )
    for step in range(3):
        wrapped(batch(rank.rank, step))
        state = wrapped.state_dict()
        assert_equal(state["1.running_mean"], model[1].running_mean.float(), "mean")
        assert state["1.running_mean"].abs().sum() > 0 and state["1.num_batches_tracked"].item() == step + 1


# -------------------------------------------------------------------- inputs


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


@on_ranks(2)
def test_no_cast_without_a_parameter_dtype(rank: Rank) -> None:
    """reduce_dtype or buffer_dtype alone leave inputs alone."""
    for precision in (MixedPrecision(reduce_dtype=BF16, cast_forward_inputs=True), MixedPrecision(buffer_dtype=BF16)):
        model = Probe()
        wrapped = FullyShardedDataParallel(model, mixed_precision=precision)
        wrapped(batch(rank.rank, 0).double())
        assert model.seen == [(F64, F32)]
