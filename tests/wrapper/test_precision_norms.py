"""Modules that compute in full precision amid others that do not: batch norms, unless the user says otherwise."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from parity import batch, built, units_of
from torch import nn

from compare import assert_close
from fullshard import FullyShardedDataParallel, MixedPrecision
from fullshard.comm import record
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy
from ranks import Rank, on_ranks

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)


class Conv(nn.Module):
    """A convolution with a norm behind it; notes the dtypes that go in and out of the norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), norm, nn.Linear(4, 2)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = self.norm(y)
        self.seen.append((y.dtype, z.dtype))
        return self.out(z.mean((2, 3)))


class Watched(nn.BatchNorm2d):
    """Notes the dtypes of its input and weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watched = (x.dtype, self.weight.dtype, self.running_mean.dtype)
        return super().forward(x)


def images(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, 3, 2, 5, 5)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_batch_norms_in_full_precision(rank: Rank, use_orig_params: bool) -> None:
    """With a policy and a low param_dtype each becomes its own unit, with casts around; a warning says so."""
    model = built(lambda: Conv(Watched(4)))
    norm, reference = model.norm, copy.deepcopy(model)
    with pytest.warns(UserWarning, match="Watched.*full precision"):
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}),
            mixed_precision=LOW,
            use_orig_params=use_orig_params,
        )
    assert units_of(wrapped) == ["", "conv", "norm"]  # the linear layer is the root's: it matches nothing
    with record() as seen:
        wrapped(images(rank.rank, 0)).float().square().mean().backward()
    assert norm.watched == (F32, F32, F32)
    assert model.seen == [(BF16, BF16)]  # siblings see their own dtype
    assert {c.dtype for c in seen if c.unit == "norm"} == {F32}
    assert {c.dtype for c in seen if c.unit == "conv"} == {BF16, F32}
    for peer in range(2):
        out = reference(images(peer, 0))
        (out.square().mean() / 2).backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        for (name, p), q in zip(wrapped.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, name, 0.1, 0.02)


@on_ranks(2)
def test_outputs_take_the_inputs_dtype(rank: Rank) -> None:
    """Casts around a batch norm give back what came in, whatever that is."""
    model = built(lambda: Conv(Watched(4)))
    norm = model.norm
    with pytest.warns(UserWarning, match="full precision"):
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}), mixed_precision=MixedPrecision(param_dtype=F16)
        )
    wrapped(images(rank.rank, 0)).float().sum().backward()
    assert model.seen == [(F16, F16)] and norm.watched == (F32, F32, F32)
    assert norm.running_mean.dtype is F32
    assert wrapped.state_dict()["norm.num_batches_tracked"].item() == 1


@on_ranks(2)
@pytest.mark.parametrize("kind", ["no policy", "no classes", "no precision", "only reduce"])
def test_batch_norms_left_to_the_unit(rank: Rank, kind: str) -> None:
    """Without a policy, a low param_dtype or classes to take care of, nothing is wrapped apart, and nothing warns."""
    precision: MixedPrecision | None = LOW
    policy: Any = ModuleWrapPolicy({nn.Conv2d})
    if kind == "no policy":
        policy = None
    elif kind == "no classes":
        precision = MixedPrecision(BF16, F32, BF16, _module_classes_to_ignore=())
    elif kind == "no precision":
        precision = None
    else:
        precision = MixedPrecision(reduce_dtype=BF16)
    model = built(lambda: Conv(nn.BatchNorm2d(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=precision)
    assert units_of(wrapped) == [""] + ["conv"] * (policy is not None)
    if kind != "no policy":  # torch has no batch norm of bfloat16 weights with float32 buffers for every shape
        wrapped(images(rank.rank, 0)).float().sum().backward()


@on_ranks(2)
def test_other_classes(rank: Rank) -> None:
    """The classes can be any; subclasses count; what the user chose himself for a module has precedence."""

    class Precise(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.watched = (x.dtype, self.weight.dtype)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(6, 6), Precise(6), nn.Linear(6, 6), Precise(6), nn.Linear(6, 6))
    one, two = model[1], model[3]
    own = MixedPrecision(param_dtype=F16, cast_forward_inputs=True)
    policy = CustomPolicy(lambda m: {"mixed_precision": own} if m is two else isinstance(m, nn.Linear))
    with pytest.warns(UserWarning, match="Precise.*full precision"):
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            mixed_precision=MixedPrecision(BF16, cast_forward_inputs=True, _module_classes_to_ignore=[nn.LayerNorm]),
        )
    assert units_of(wrapped) == ["", "0", "1", "2", "3", "4"]
    wrapped(batch(rank.rank, 0)).float().sum().backward()
    assert one.watched == (F32, F32) and two.watched == (F16, F16)


@on_ranks(2)
def test_every_module_a_unit(rank: Rank) -> None:
    """A policy that wraps everything wraps batch norms once, in full precision."""
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Sequential(Watched(4), nn.ReLU()), nn.Conv2d(4, 2, 1)))
    norm = model[1][0]
    with pytest.warns(UserWarning, match="full precision"):
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=always_wrap_policy, mixed_precision=LOW)
    assert units_of(wrapped) == ["", "0", "1", "1.0", "1.1", "2"]
    wrapped(images(rank.rank, 0)).float().sum().backward()
    assert norm.watched == (F32, F32, F32)


@on_ranks(2)
def test_ignored_batch_norms_are_left_alone(rank: Rank) -> None:
    """Who ignores a batch norm gets neither a unit nor casts."""
    model = built(lambda: Conv(Watched(4)))
    norm = model.norm
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}), mixed_precision=LOW, ignored_modules=[norm]
    )
    assert units_of(wrapped) == ["", "conv"]
    norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    norm.register_forward_hook(lambda _, args, out: out.bfloat16())
    wrapped(images(rank.rank, 0)).float().sum().backward()
    assert norm.watched == (F32, F32, F32) and norm.weight.shape == (4,)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_other_norms_need_nothing(rank: Rank, dtype: torch.dtype) -> None:
    """Layer norms, group norms and 1-D batch norms compute in low precision as any other module."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    wrapped = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(dtype, dtype, dtype))
    out = wrapped(batch(rank.rank, 0))
    out.float().sum().backward()
    assert out.dtype is dtype
    assert {p.grad.dtype for p in wrapped.parameters()} == {F32}
    assert wrapped.state_dict()["3.running_mean"].dtype is F32
