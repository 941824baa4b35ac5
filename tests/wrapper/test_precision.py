"""MixedPrecision: which buffers and inputs are cast, gradients that stay low, and modules in full precision.

What is computed and reduced in which dtype is tested for all front ends in tests/training/test_low_precision.py.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from wrapped import both_forms, built, units_of

from compare import assert_close, assert_equal
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision
from fullshard.comm import record
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy
from models import Mlp, batch, square_loss
from ranks import Rank, on_ranks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)


def inputs(rank: Rank, step: int = 0) -> torch.Tensor:
    return batch(rank.rank, step, 4, 6)


# -------------------------------------------------------------------- gradients


@on_ranks(2)
@both_forms
@pytest.mark.parametrize("reduce", [None, F16], ids=str)
def test_keep_low_precision_grads(rank: Rank, reduce: torch.dtype | None, orig: bool) -> None:
    """Gradients stay in the dtype in which they were reduced, in which they add up; the values are the same."""
    gradients = []
    for keep in (False, True):
        precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce, keep_low_precision_grads=keep)
        wrapped = FSDP(built(Mlp, 6, 7, 3), mixed_precision=precision, use_orig_params=orig)
        gradients.append([])
        for _ in range(2):
            square_loss()(wrapped, rank.rank).backward()
            present = [p for p in wrapped.parameters() if p.grad is not None]
            assert {p.grad.dtype for p in present} == {(reduce or BF16) if keep else F32}
            assert {p.dtype for p in present} == {F32}
            gradients[-1] += [p.grad.float().clone() for p in present]
        wrapped.zero_grad()
    for low, full in zip(*gradients, strict=True):
        assert_close(low, full, "gradient", 1e-2, 1e-6)


# -------------------------------------------------------------------- buffers


def buffered(*inner: nn.Module) -> nn.Sequential:
    """A layer with buffers of several kinds, and a batch norm's, which change; ``seen`` has their dtypes in forward."""
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), *inner)
    table = torch.arange(6) / 7
    for name, buffer in {"table": table, "wide": table.double(), "ids": torch.arange(6), "nothing": None}.items():
        module.register_buffer(name, buffer)
    module.register_buffer("hidden", table.clone(), persistent=False)
    module.seen = []
    buffers = ("table", "wide", "ids", "hidden")
    module.register_forward_pre_hook(lambda m, _: m.seen.append(tuple(getattr(m, name).dtype for name in buffers)))
    return module


@on_ranks(2)
@both_forms
def test_buffer_dtype(rank: Rank, orig: bool) -> None:
    """Buffers of floats are cast before the first forward and stay so; state dicts have them in their own dtypes."""
    model = buffered(buffered())
    inner = model[2]
    reference = copy.deepcopy(model)
    wrapped = FSDP(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module is inner),
        mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16, _module_classes_to_ignore=()),
        use_orig_params=orig,
    )
    original = reference.state_dict()
    for step in range(2):
        wrapped(inputs(rank, step)).float().sum().backward()
        state = wrapped.state_dict()
        assert {name: value.dtype for name, value in state.items()} == {n: v.dtype for n, v in original.items()}
        for name in ("table", "2.wide"):
            assert_equal(state[name], original[name].to(BF16).to(state[name].dtype), name)
        assert_equal(state["1.running_mean"], model[1].running_mean.float(), "mean")
        assert state["1.running_mean"].abs().sum() > 0 and state["1.num_batches_tracked"].item() == step + 1
        assert {m.table.dtype for m in (model, inner)} == {BF16}  # in training again
        assert_equal(state["0.weight"], original["0.weight"], "weight")
    assert model.seen == [(BF16, BF16, torch.int64, BF16)] * 2 == inner.seen
    assert model.nothing is None
    wrapped.load_state_dict(original)
    wrapped(inputs(rank)).float().sum().backward()
    assert model.seen[-1] == (BF16, BF16, torch.int64, BF16)


@on_ranks(2)
def test_buffers_left_alone(rank: Rank) -> None:
    """Without buffer_dtype, and in ignored modules, buffers keep their dtype."""
    for own in (None, F16):
        model = buffered(buffered())
        inner = model[2]
        precision = MixedPrecision(param_dtype=BF16, buffer_dtype=own)
        wrapped = FSDP(model, ignored_modules=[inner, model[1]], mixed_precision=precision)
        for module in (inner, model[1]):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        wrapped(inputs(rank)).float().sum().backward()
        assert inner.seen == [(F32, F64, torch.int64, F32)]
        assert model.seen == [(own or F32, own or F64, torch.int64, own or F32)]


@on_ranks(2)
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["one", "each"])
def test_shared_buffers(rank: Rank, policy: Any) -> None:
    """A buffer that modules share stays shared, and the tensor that others hold, when it is cast, saved and loaded."""
    table = torch.arange(6) / 7
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    for layer in layers:
        layer.register_buffer("table", table)
    original = table.clone()
    precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    wrapped = FSDP(nn.Sequential(*layers), auto_wrap_policy=policy, mixed_precision=precision)
    for _ in range(2):
        wrapped(inputs(rank))
        assert [layer.table is table for layer in layers] == [True, True]
        assert table.dtype is BF16
        state = wrapped.state_dict()
        for name in ("0.table", "1.table"):
            assert_equal(state[name], original.to(BF16).float(), name)
        wrapped.load_state_dict(state)


# -------------------------------------------------------------------- inputs


class Probe(nn.Module):
    """A linear layer that notes the dtypes of its inputs, and of its weight inside forward."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inner = inner
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.linear.weight.dtype))
        y = self.linear(x.to(self.linear.weight.dtype))
        return y if self.inner is None else self.inner(y.to(x.dtype))


@on_ranks(2)
def test_which_inputs_are_cast(rank: Rank) -> None:
    """cast_root_forward_inputs is for the root, cast_forward_inputs for all others; no parameter dtype, no casts."""
    for root in (True, False):
        for inner in (True, False):
            model = Probe(Probe(Probe()))
            probes = [model, model.inner, model.inner.inner]
            precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=inner, cast_root_forward_inputs=root)
            wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Probe}), mixed_precision=precision)
            out = wrapped(inputs(rank))
            at_root = BF16 if root else F32
            below = BF16 if inner else at_root
            assert [probe.seen for probe in probes] == [[(at_root, BF16)], [(below, BF16)], [(below, BF16)]]
            assert out.dtype is BF16  # what the last layer gave: outputs are left alone
    for precision in (MixedPrecision(reduce_dtype=BF16, cast_forward_inputs=True), MixedPrecision(buffer_dtype=BF16)):
        model = Probe()
        FSDP(model, mixed_precision=precision)(inputs(rank).double())
        assert model.seen == [(F64, F32)]
    model = Probe(Probe(Probe()))
    first, second = model.inner, model.inner.inner
    half = MixedPrecision(param_dtype=F16, cast_forward_inputs=True)
    policy = CustomPolicy(lambda m: {"mixed_precision": half} if m is first else m is second)
    FSDP(model, auto_wrap_policy=policy)(inputs(rank)).sum().backward()
    assert model.seen == [(F32, F32)] and first.seen == [(F16, F16)]
    assert second.seen == [(F16, F32)]  # no precision, so no cast


# -------------------------------------------------------------------- norms


class Watched(nn.BatchNorm2d):
    """Notes the dtypes of its input and weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watched = (x.dtype, self.weight.dtype, self.running_mean.dtype)
        return super().forward(x)


class Conv(nn.Module):
    """A convolution with a norm behind it; notes the dtypes that go in and out of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), Watched(4), nn.Linear(4, 2)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = self.norm(y)
        self.seen.append((y.dtype, z.dtype))
        return self.out(z.mean((2, 3)))


def images(rank: int) -> torch.Tensor:
    return batch(rank, 0, 3, 2, 5, 5)


@on_ranks(2)
@pytest.mark.parametrize(("orig", "low"), [(False, BF16), (True, F16)])
def test_batch_norms_in_full_precision(rank: Rank, orig: bool, low: torch.dtype) -> None:
    """With a policy and a low param_dtype each becomes its own unit, with casts around; a warning says so."""
    model = built(Conv)
    norm, reference = model.norm, copy.deepcopy(model)
    precision = MixedPrecision(param_dtype=low, reduce_dtype=F32)
    with pytest.warns(UserWarning, match="Watched.*full precision"):
        wrapped = FSDP(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}), mixed_precision=precision, use_orig_params=orig
        )
    assert units_of(wrapped) == ["", "conv", "norm"]  # the linear layer is the root's: it matches nothing
    with record() as seen:
        wrapped(images(rank.rank)).float().square().mean().backward()
    assert norm.watched == (F32, F32, F32)
    assert model.seen == [(low, low)]  # siblings see their own dtype
    assert {c.dtype for c in seen if c.unit == "norm"} == {F32}
    assert {c.dtype for c in seen if c.unit == "conv"} == {low, F32}
    for peer in range(2):
        (reference(images(peer)).square().mean() / 2).backward()
    with FSDP.summon_full_params(wrapped, with_grads=True):
        for (name, p), q in zip(wrapped.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, name, 0.1, 0.02)


@on_ranks(2)
def test_batch_norms_left_to_the_unit(rank: Rank) -> None:
    """Without a policy, a low param_dtype or classes to take care of, or if ignored, batch norms are no units."""
    policy = ModuleWrapPolicy({nn.Conv2d})
    for options, units in (
        ({"auto_wrap_policy": None, "mixed_precision": LOW}, [""]),
        ({"mixed_precision": MixedPrecision(BF16, F32, BF16, _module_classes_to_ignore=())}, ["", "conv"]),
        ({"mixed_precision": None}, ["", "conv"]),
        ({"mixed_precision": MixedPrecision(reduce_dtype=BF16)}, ["", "conv"]),
        ({"mixed_precision": LOW, "ignored": True}, ["", "conv"]),
    ):
        model = built(Conv)
        norm = model.norm
        if options.pop("ignored", False):
            options["ignored_modules"] = [norm]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if "ignored_modules" in options else "error")
            wrapped = FSDP(model, **{"auto_wrap_policy": policy, **options})
        assert units_of(wrapped) == units
    norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    norm.register_forward_hook(lambda _, args, out: out.bfloat16())
    wrapped(images(rank.rank)).float().sum().backward()
    assert norm.watched == (F32, F32, F32) and norm.weight.shape == (4,)


@on_ranks(2)
def test_other_classes(rank: Rank) -> None:
    """The classes can be any; subclasses count; what the user chose for a module has precedence."""

    class Precise(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.watched = (x.dtype, self.weight.dtype)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(6, 6), Precise(6), nn.Linear(6, 6), Precise(6), nn.Linear(6, 6))
    one, two = model[1], model[3]
    own = MixedPrecision(param_dtype=F16, cast_forward_inputs=True)
    policy = CustomPolicy(lambda m: {"mixed_precision": own} if m is two else isinstance(m, nn.Linear))
    precision = MixedPrecision(BF16, cast_forward_inputs=True, _module_classes_to_ignore=[nn.LayerNorm])
    with pytest.warns(UserWarning, match="Precise.*full precision"):
        wrapped = FSDP(model, auto_wrap_policy=policy, mixed_precision=precision)
    assert units_of(wrapped) == ["", "0", "1", "2", "3", "4"]
    wrapped(inputs(rank)).float().sum().backward()
    assert one.watched == (F32, F32) and two.watched == (F16, F16)
    conv = built(Conv)
    norm = conv.norm
    with pytest.warns(UserWarning, match="full precision"):
        wrapped = FSDP(conv, auto_wrap_policy=always_wrap_policy, mixed_precision=LOW)
    assert units_of(wrapped) == ["", "conv", "norm", "out"]
    wrapped(images(rank.rank)).float().sum().backward()
    assert norm.watched == (F32, F32, F32)
