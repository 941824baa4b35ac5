"""Mixed precision of the composable front end: output dtypes, inputs as they are, methods, autocast, batch norms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_equal
from front_ends import (
    COMPOSABLE,
    FRONT_ENDS,
    FrontEnd,
    assert_same_gradients,
    build,
    each_front_end,
    full_gradients,
    sharded_with_reference,
)
from fullshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fullshard.comm import record
from fullshard.engine import settings
from models import Stack, batch
from pairwise import each_value
from ranks import Rank, on_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FP32_REDUCE = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)


class Through(nn.Module):
    """Multiplies by a weight; remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 3.0))
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x * self.weight.to(x.dtype)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self.weight.dtype is BF16
        return x * self.weight


@on_ranks(2)
def test_inputs_left_alone_and_methods_that_cast(rank: Rank) -> None:
    """Without input casts the same objects arrive beside cast weights; registered methods cast like ``forward``."""
    x = torch.arange(6.0)
    policy = MixedPrecisionPolicy(BF16, output_dtype=F16, cast_forward_inputs=False)
    model = fully_shard(Through(), mesh=rank.mesh, mp_policy=policy)
    assert model(x).dtype is F16
    assert model.seen is x
    model = fully_shard(Through(), mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16, F32, F64))
    register_fsdp_forward_method(model, "encode")
    assert model.encode(x).dtype is F64


@on_ranks(2)
def test_autocast_around_units(rank: Rank) -> None:
    """Without a policy (None is its default) autocast alone decides in which dtypes units compute."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 2), mp_policy=None, offload_policy=None)
    for enabled in (False, True):
        logs: list[list[Any]] = [[], []]
        for module, log in zip((model, reference), logs, strict=True):
            for block in module.blocks:
                block.up.register_forward_hook(lambda _, args, out, log=log: log.append((args[0].dtype, out.dtype)))
            with torch.autocast("cpu", dtype=BF16, enabled=enabled):
                output = module(batch(0, 0, 4, 6))
            output.float().sum().backward()
        assert logs[0] == logs[1]
        assert_same_gradients(model, reference, rtol=1e-6, atol=1e-7)


@on_ranks(2)
@pytest.mark.parametrize("own_unit", [False, True], ids=["buffers-cast", "own-unit"])
def test_batch_norm(rank: Rank, own_unit: bool) -> None:
    """Buffers are never cast: batch norm trains in a bf16 unit once users cast them, or in fp32 as its own unit."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if not own_unit:
        model[1].running_mean, model[1].running_var = torch.zeros(6, dtype=BF16), torch.ones(6, dtype=BF16)
    expected = copy.deepcopy(model).bfloat16()
    expected.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    if own_unit:
        expected[1].float()
        expected[1].register_forward_pre_hook(lambda _, args: (args[0].float(),))
        expected[1].register_forward_hook(lambda _, args, output: output.bfloat16())
        fully_shard(model[1], mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(F32, output_dtype=BF16))
    fully_shard(model, mesh=rank.mesh, mp_policy=FP32_REDUCE)
    for step in range(2):
        x = batch(rank.rank, step, 8, 6)
        ours, theirs = model(x), expected(x)
        assert_equal(ours, theirs, "output")
        ours.float().sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert_equal(ours, theirs, name)
    assert model[1].running_mean.dtype is (F32 if own_unit else BF16)
    assert all(isinstance(p.grad, DTensor) and p.grad.dtype is F32 for p in model.parameters())


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, when=["before", "after", "one of two"])
def test_grad_dtype(rank: Rank, front_end: FrontEnd, when: str) -> None:
    """``grad_dtype`` of parameters, set before sharding or on sharded parameters, is the dtype of their gradients."""
    model = nn.Linear(4, 4, device=rank.device, dtype=BF16)
    if when != "after":
        model.weight.grad_dtype = F32
    if when == "before":
        model.bias.grad_dtype = F32
    model = front_end.wrap(model, rank, [], **front_end.precision(None, F32))
    if when == "after":
        for parameter in model.parameters():
            parameter.grad_dtype = F32
    x = torch.full((1, 4), 256.0 if rank.rank else 2.0, device=rank.device, dtype=BF16)
    for step in (1, 2):  # the mean of 257 * 2 and 2, if they are not rounded to 8 bits
        model(x).sum().backward()
        if rank.rank:
            model(x.new_ones(1, 4)).sum().backward()
        else:
            model(x.new_zeros(1, 4)).sum().backward()
        gradients = full_gradients(model)
        for name, value in (("weight", 129.5), ("bias", 2.0)):
            dtype = BF16 if (when, name) == ("one of two", "bias") and not front_end.flat else F32
            expected = torch.full_like(gradients[name], value * step, dtype=dtype)
            assert_equal(gradients[name], expected, f"gradient of {name}")


@on_ranks(2)
@each_front_end
def test_grad_dtype_through_a_change_of_dtype(rank: Rank, front_end: FrontEnd) -> None:
    """A parameter that ``to`` casts has gradients of its own dtype unless ``grad_dtype`` was set, and trains on."""
    model = front_end.wrap(nn.Linear(4, 4, device=rank.device), rank, [])
    for dtype in (BF16, F32):
        model.to(dtype)
        model(torch.ones(1, 4, device=rank.device, dtype=dtype)).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
        model.zero_grad()


@on_ranks(2)
@each_value(compute=[None, F32, BF16, F16], reduce=[None, F32, BF16, F16], stored=[F32, BF16])
def test_dtype_of_reductions(rank: Rank, compute: Any, reduce: Any, stored: torch.dtype) -> None:
    """It is that of FSDP2 of the installed torch, also where the policy does not say it."""
    seen: list[tuple[torch.dtype, torch.dtype | None]] = []
    for shard, policy in ((fully_shard, MixedPrecisionPolicy), (theirs.fully_shard, theirs.MixedPrecisionPolicy)):
        model = shard(nn.Linear(6, 6, dtype=stored), mesh=rank.mesh, mp_policy=policy(compute, reduce))
        reduced: list[torch.dtype] = []
        model.set_all_reduce_hook(lambda gradients, reduced=reduced: reduced.append(gradients.dtype))
        model(batch(rank.rank, 0, 4, 6).to(stored)).sum().backward()
        seen.append((*reduced, model.weight.grad.dtype))
    assert seen[0] == seen[1]


@on_ranks(2)
@pytest.mark.parametrize("in_param_dtype", [True, False])
def test_both_meanings_of_no_reduce_dtype(rank: Rank, in_param_dtype: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.15 the dtype of computation; from then on the parameter's ``grad_dtype``, the widest of a unit."""
    monkeypatch.setattr(settings, "REDUCES_IN_PARAM_DTYPE", in_param_dtype)
    model = nn.Linear(6, 6)
    model.weight.grad_dtype = BF16
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16))
    reduced: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda gradients: reduced.append(gradients.dtype))
    model(batch(rank.rank, 0, 4, 6)).sum().backward()
    assert set(reduced) == {BF16 if in_param_dtype else F32}
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (BF16, F32)


class Router(nn.Module):
    """Computes with a weight in fp32, and with another one in the dtype of computation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [self.gate.weight.dtype, self.expert.weight.dtype, self.scale.dtype]
        return self.gate(x.to(self.gate.weight.dtype)) * self.scale + self.expert(x)


@on_ranks(2)
@each_value(layout=["per_parameter", "ragged"], chosen=[F32, F64, F16])
def test_a_dtype_for_each_parameter(rank: Rank, layout: str, chosen: torch.dtype) -> None:
    """Any dtype, several in one unit: all-gathered and computed in it; bytes are exact; asked once for each."""
    torch.manual_seed(0)
    model, asked = Router(), []

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter)
        return chosen if parameter is gate else None

    gate, parameters = model.gate.weight, list(model.parameters())
    policy = MixedPrecisionPolicy(BF16, F32, param_dtype_override_fn=override)
    fully_shard(model, mesh=rank.mesh, mp_policy=policy, layout=layout)
    assert sorted(map(id, asked)) == sorted(map(id, parameters))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with record() as seen:
            each(batch(rank.rank, 0, 4, 16)).sum().backward()
        assert each.dtypes == [chosen, BF16, BF16]
        assert each.gate.weight.grad.dtype is F32
        sent = {c.dtype: c.nbytes for c in seen if c.kind == "all_gather"}
        if layout == "per_parameter":  # this rank receives half of the elements
            assert sent.keys() == {chosen, BF16} and sent[chosen] == 128 * chosen.itemsize
            assert 0 <= sent[BF16] - 144 * 2 < 64  # of padding
    assert len(asked) == len(parameters)
