"""MixedPrecision: what is computed, sent, added up, kept and saved in which dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity import Block, Net, assert_states_alike, assert_trains_alike, batch, built, mean_square
from torch import nn

from compare import assert_close, assert_equal
from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from models import tiny_units
from ranks import Rank, on_ranks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
S = ShardingStrategy
BLOCKS = ModuleWrapPolicy({Block})
MODES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


def dtypes_of(seen: list[Any], kinds: set[str]) -> set[torch.dtype]:
    return {c.dtype for c in seen if c.kind in kinds}


def casting_gradients(model: nn.Module, dtype: torch.dtype, *losses: torch.Tensor) -> list[list[torch.Tensor]]:
    """Per batch the gradients of a model that is computed in ``dtype``, in this dtype."""
    found = []
    for x in losses:
        low = copy.deepcopy(model).to(dtype)
        mean_square(low, x.to(dtype)).backward()
        found.append([p.grad for p in low.parameters()])
    return found


# -------------------------------------------------------------------- what is sent


@on_ranks(2)
@MODES
@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        (MixedPrecision(), F32, F32),
        (MixedPrecision(param_dtype=BF16), BF16, BF16),
        (MixedPrecision(param_dtype=BF16, reduce_dtype=F32), BF16, F32),
        (MixedPrecision(reduce_dtype=BF16), F32, BF16),
        (MixedPrecision(param_dtype=F16), F16, F16),
        (MixedPrecision(param_dtype=BF16, reduce_dtype=F16), BF16, F16),
        (MixedPrecision(reduce_dtype=F64), F32, F64),
        (MixedPrecision(buffer_dtype=BF16), F32, F32),
    ],
    ids=["none", "bf16", "bf16-f32", "f32-bf16", "f16", "bf16-f16", "f32-f64", "buffers"],
)
def test_dtypes_that_travel(
    rank: Rank, precision: MixedPrecision, gathered: torch.dtype, reduced: torch.dtype, use_orig_params: bool
) -> None:
    """Parameters travel in param_dtype, gradients in reduce_dtype or else param_dtype; shards stay as they were."""
    model = built(Net).requires_grad_(True)
    with tiny_units():  # of which none would be gathered in backward
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=BLOCKS, mixed_precision=precision, use_orig_params=use_orig_params
        )
    with record() as forward:
        loss = mean_square(wrapped, batch(rank.rank, 0))
    kinds = {c.kind for c in forward}
    with record() as backward:
        loss.backward()
    assert {c.dtype for c in forward} == {gathered}
    assert dtypes_of(backward, kinds) == {gathered}
    assert dtypes_of(backward, {c.kind for c in backward} - kinds) == {reduced}
    assert {p.dtype for p in wrapped.parameters()} == {F32}
    assert {p.grad.dtype for p in wrapped.parameters() if p.grad is not None} == {F32}


# -------------------------------------------------------------------- values


@on_ranks(2)
@MODES
@pytest.mark.parametrize("reduce", [F32, BF16, None], ids=str)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)
def test_gradients_to_the_bit(
    rank: Rank, strategy: ShardingStrategy, reduce: torch.dtype | None, use_orig_params: bool
) -> None:
    """Gradients are those of a model in bfloat16, averaged in the reduce dtype, and put into float32."""
    model = built(Net)
    per_rank = casting_gradients(model, BF16, batch(0, 0), batch(1, 0))
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=BLOCKS,
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=reduce, buffer_dtype=BF16),
        use_orig_params=use_orig_params,
    )
    mean_square(wrapped, batch(rank.rank, 0)).backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        found = {name: p.grad.clone() for name, p in wrapped.named_parameters()}
    for (name, gradient), *each in zip(found.items(), *per_rank, strict=True):
        total = each[0].to(reduce or BF16) + each[1].to(reduce or BF16)
        assert_equal(gradient, (total / 2).float(), name)


@on_ranks(2)
@MODES
def test_accumulation_in_the_reduce_dtype(rank: Rank, use_orig_params: bool) -> None:
    """Gradients of four microbatches add up in float32, not in bfloat16, also without sync."""
    model = built(Net)
    by_rank = [casting_gradients(model, BF16, *(batch(r, step) for step in range(4))) for r in range(2)]
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=BLOCKS,
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32, buffer_dtype=BF16),
        use_orig_params=use_orig_params,
    )
    with wrapped.no_sync():
        for step in range(3):
            mean_square(wrapped, batch(rank.rank, step)).backward()
    mean_square(wrapped, batch(rank.rank, 3)).backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        found = {name: p.grad.clone() for name, p in wrapped.named_parameters()}
    for index, (name, gradient) in enumerate(found.items()):
        sums = [sum(micro[index].float() for micro in micros) for micros in by_rank]
        assert_close(gradient, (sums[0] + sums[1]) / 2, name, 1e-6, 1e-9)


@on_ranks(2)
@MODES
@pytest.mark.parametrize("precision", [MixedPrecision(BF16, F32, BF16), MixedPrecision(F16, F32)], ids=["bf16", "f16"])
def test_training_in_low_precision(rank: Rank, precision: MixedPrecision, use_orig_params: bool) -> None:
    """Several steps stay as close to full precision as the dtype allows, and master weights are full precision."""
    model = built(Net)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=BLOCKS, mixed_precision=precision, use_orig_params=use_orig_params
    )
    assert_trains_alike(wrapped, reference, rank, rtol=0.05, atol=0.02, microbatches=2)
    assert not all(torch.equal(v, v.to(precision.param_dtype).to(v.dtype)) for v in wrapped.state_dict().values())


@on_ranks(2)
@MODES
def test_half_precision_sums_do_not_overflow(rank: Rank, use_orig_params: bool) -> None:
    """float16 gradients near the largest number are averaged, though their sum is too large for the dtype."""
    model = nn.Linear(3, 1, bias=False)
    wrapped = FullyShardedDataParallel(
        model, mixed_precision=MixedPrecision(param_dtype=F16), use_orig_params=use_orig_params
    )
    wrapped(torch.full((1, 3), 60000.0)).sum().backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        assert_equal(model.weight.grad, torch.full((1, 3), 60000.0).half().float(), "gradient")


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


# -------------------------------------------------------------------- gradients that stay low, frozen, moved


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


@on_ranks(2)
@MODES
def test_frozen_at_first_then_trained(rank: Rank, use_orig_params: bool) -> None:
    """A unit that was frozen in its first forward is reduced in the reduce dtype once it is trained."""
    model = built(Net)
    model.blocks[0].requires_grad_(False)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=BLOCKS,
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32, buffer_dtype=BF16),
        use_orig_params=use_orig_params,
    )
    mean_square(wrapped, batch(rank.rank, 0)).backward()
    wrapped.zero_grad()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(True)
    with record() as seen:
        mean_square(wrapped, batch(rank.rank, 1)).backward()
    assert {c.dtype for c in seen if c.unit == "blocks.0"} == {BF16, F32}
    expected = casting_gradients(built(Net), BF16, batch(0, 1), batch(1, 1))
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        for (name, p), *each in zip(wrapped.named_parameters(), *expected, strict=True):
            assert_equal(p.grad, (each[0].float() + each[1].float()) / 2, name)


@on_ranks(2)
@MODES
@pytest.mark.parametrize("start", [BF16, F64], ids=str)
def test_moved_before_the_first_forward(rank: Rank, start: torch.dtype, use_orig_params: bool) -> None:
    """Parameters made in another dtype and moved afterwards are gathered and reduced as the policy says."""
    wrapped = FullyShardedDataParallel(
        built(Net).to(start),
        auto_wrap_policy=BLOCKS,
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32),
        use_orig_params=use_orig_params,
    )
    wrapped.to(F32)
    with record() as seen:
        mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert {c.dtype for c in seen} == {BF16, F32}
    assert {p.dtype for p in wrapped.parameters()} == {F32}
    assert {p.grad.dtype for p in wrapped.parameters() if p.grad is not None} == {F32}


@on_ranks(2)
@MODES
def test_what_has_no_precision_to_choose(rank: Rank, use_orig_params: bool) -> None:
    """Integer and complex parameters keep their dtype beside others that are cast."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.index = nn.Parameter(torch.randperm(6), requires_grad=False)
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.randn(6, dtype=F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (self.index.dtype, self.phase.dtype, self.wide.dtype) == (torch.int64, torch.complex64, BF16)
            return self.linear(x)[:, self.index] * self.phase.abs() + self.wide

    model = built(Mixed)
    reference = copy.deepcopy(model)
    wrapped = FullyShardedDataParallel(
        model, mixed_precision=MixedPrecision(BF16, F32), use_orig_params=use_orig_params
    )
    mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert_states_alike(wrapped, reference)


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


@on_ranks(2)
@MODES
def test_computing_in_more_than_is_kept(rank: Rank, use_orig_params: bool) -> None:
    """Parameters in bfloat16 can be computed and reduced in float32."""
    wrapped = FullyShardedDataParallel(
        built(Net).bfloat16(), use_orig_params=use_orig_params, mixed_precision=MixedPrecision(F32, F32)
    )
    with record() as seen:
        out = wrapped(batch(rank.rank, 0).bfloat16())
        out.sum().backward()
    assert out.dtype is F32 and {c.dtype for c in seen} == {F32}
    assert {p.dtype for p in wrapped.parameters()} == {BF16} == {p.grad.dtype for p in wrapped.parameters()}
