"""Tensor subclasses that say themselves what is all-gathered: training, calls, bytes, errors."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packed_tensor import (
    CASTS,
    Adapted,
    CastWeight,
    PackedWeight,
    RoundedWeight,
    ScaledWeight,
    SizedRoundedWeight,
    called,
    calls,
    casting,
    forget_calls,
    rounded,
    train_both,
    with_cast_weights,
)
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from compare import assert_close, assert_equal
from front_ends import CLOSE, COMPOSABLE
from fullshard import FullshardError, MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from fullshard.engine.hooks import in_backward
from fullshard.engine.ownership import unit_of
from models import Mlp, assert_at_rest, batch, held_bytes, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

KINDS = [RoundedWeight, SizedRoundedWeight, ScaledWeight]


class Adapters(nn.Module):
    """Layers with packed weights; the same ones for the same seed."""

    def __init__(self, *dims: int, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Adapted(i, o) for i, o in itertools.pairwise(dims))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def cast_pair(
    kind: type[CastWeight], rank: Rank, *dims: int, mesh: Any = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded model whose weights are ``kind``, and an unsharded one that casts as they do."""
    torch.manual_seed(7)
    reference = Mlp(*dims)
    model = with_cast_weights(copy.deepcopy(reference), kind)
    COMPOSABLE.wrap(model, rank, mesh=mesh, **options)
    return model, casting(reference, kind) if kind in CASTS else reference


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, None])
def test_frozen_packed_weights_train_adapters(rank: Rank, reshard: Any) -> None:
    """Adapters beside frozen packed weights, even and uneven, train as without sharding; those get no gradient."""
    forget_calls()
    model = COMPOSABLE.wrap(Adapters(16, 17, 3, 16), rank, reshard_after_forward=reshard)
    train_both(model, Adapters(16, 17, 3, 16), rank, 4, 16)
    pre, post, refill = (len(called(method)) for method in ("pre", "post", "refill"))
    assert not reshard or (pre, post, refill) == (12, 3, 9)  # three layers, two steps, in forward and in backward
    for layer in model.layers:
        assert isinstance(layer.weight, DTensor) and isinstance(layer.weight.to_local(), PackedWeight)
        assert not layer.weight.requires_grad and layer.weight.grad is None


@on_ranks(1, 4)
@each_value(kind=KINDS, reshard=[True, False, None])
def test_cast_weights_train(rank: Rank, kind: Any, reshard: Any) -> None:
    """Trainable weights that are cast for the all-gather train as unsharded ones that are cast in the forward."""
    model, reference = cast_pair(kind, rank, 16, 32, 5, 1, 16, reshard_after_forward=reshard)
    train_both(model, reference, rank, 4, 16, microbatches=2 if reshard is None else 1)
    weight = model.layers[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight.to_local(), kind)
    square_loss(0, 4, 16)(model, rank.rank).backward()
    assert isinstance(weight.grad, DTensor) and type(weight.grad.to_local()) is torch.Tensor


@on_ranks(4)
def test_arguments_of_the_protocol(rank: Rank) -> None:
    """Five-argument subclasses get the 1-D shard axis, global size and stride, the module and the unit's policy."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (MixedPrecisionPolicy(), low):
        forget_calls()
        model, reference = cast_pair(SizedRoundedWeight, rank, 8, 17, mesh=mesh, mp_policy=policy)
        x = batch(rank.rank, 0, 4, 8)
        output = model(x)
        ((weight, axis, size, stride, module, given),) = called("pre")
        assert axis.ndim == 1 and axis.size() == 2 and axis.get_group() == mesh["shard"].get_group()
        assert weight.shape == model.layers[0].weight.to_local().shape == ((9, 8), (8, 8))[rank.rank % 2]
        assert tuple(size) == (17, 8) and tuple(stride) == (8, 1)
        assert module is model.layers[0] and given is policy
        ((_, outputs, metadata, dtype),) = called("post")
        assert [tuple(each.shape) for each in outputs] == [(18, 8)]
        assert metadata == ("rounded", None) and dtype is (policy.param_dtype or torch.float32)
        assert output.dtype is dtype
        if policy is low:
            assert_equal(output, copy.deepcopy(reference).bfloat16()(x.bfloat16()), "output")
        output.float().square().mean().backward()
        assert model.layers[0].weight.grad.dtype is torch.float32


def pre_gather(self: torch.Tensor, mesh: Any) -> Any:
    calls.append(("patched", mesh.size()))
    return (self.to(torch.bfloat16),), None


@torch.no_grad()
def post_gather(self: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    (low,) = outputs
    assert low.dtype is torch.bfloat16 and metadata is None
    if out is not None:
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(low)
        return None
    full = low.to(dtype)
    return full, (low, full)


@on_ranks(2)
@pytest.mark.parametrize("kind", [SizedRoundedWeight, None], ids=["subclass", "methods set on plain tensors"])
def test_meta_initialization(rank: Rank, kind: Any) -> None:
    """Subclasses made on the meta device keep their class through ``to_empty`` and train."""
    torch.manual_seed(7)
    dims = (16, 17, 16) if kind else (16, 32, 16)
    reference = Mlp(*dims)
    with torch.device("meta"):
        model = Mlp(*dims) if kind is None else with_cast_weights(Mlp(*dims), kind)
    COMPOSABLE.wrap(model, rank, reshard_after_forward=True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.copy_(distribute_tensor(value.detach(), rank.mesh))
    for layer in model.layers:
        local = layer.weight._local_tensor
        if kind is None:
            local.fsdp_pre_all_gather = pre_gather.__get__(local)
            local.fsdp_post_all_gather = post_gather.__get__(local)
        else:
            assert isinstance(local, kind)
    forget_calls()
    train_both(model, casting(reference, kind or RoundedWeight), rank, 4, 16)
    assert kind is not None or calls == [("patched", 2)] * 8


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(rank: Rank, assign: bool) -> None:
    """State dicts hold DTensors on the subclass, and the next all-gather sees what was loaded, or written in place."""
    model = COMPOSABLE.wrap(Adapters(16, 32, 16), rank)
    x = batch(rank.rank, 0, 4, 16)
    model(x)
    other = Adapters(16, 32, 16, seed=6)
    expected = other(x)
    state = COMPOSABLE.wrap(other, rank).state_dict()
    weight = state["layers.0.weight"]
    assert isinstance(weight, DTensor) and isinstance(weight.to_local(), PackedWeight)
    model.load_state_dict(state, assign=assign)
    assert_close(model(x), expected, "output", **CLOSE)

    cast, _ = cast_pair(RoundedWeight, rank, 16, 32)
    cast(x)
    with torch.no_grad():
        cast.layers[0].weight.mul_(0.3)
    weight, bias = (p.full_tensor().detach() for p in cast.layers[0].parameters())
    cast.reshard()
    assert_equal(cast(x), torch.tanh(nn.functional.linear(x, rounded(weight), bias)), "output")


def no_split(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Cannot be cut, as NF4 with uneven rows."""
    if func in (torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor):
        raise NotImplementedError(f"{cls.__name__} does not support {func}")
    return RoundedWeight.__torch_dispatch__.__func__(cls, func, types, args, kwargs)


def low(weight: Any, mesh: Any, dtype: torch.dtype = torch.bfloat16, columns: int | None = None) -> Any:
    """What a weight returns for the all-gather; rank 1 in another dtype, or fewer columns."""
    if mesh.get_local_rank() == 0:
        dtype, columns = torch.bfloat16, None
    return (weight.inner.to(dtype)[:, :columns],), ("rounded", None)


PRE = "fsdp_pre_all_gather"
# Base class, what is changed, words of the message.
REFUSED: dict[str, tuple[type[CastWeight], dict[str, Any], str]] = {
    "WithoutPost": (CastWeight, {PRE: lambda self, mesh: None}, r"(?=.*weight).*fsdp_post_all_gather"),
    "WithoutPre": (CastWeight, {"fsdp_post_all_gather": lambda self, *_: None}, r"(?=.*weight).*fsdp_pre_all_gather"),
    "TwoArguments": (RoundedWeight, {PRE: lambda self, mesh, outer_size: None}, rf"(?=.*weight).*{PRE}.*outer_size"),
    "NoSplit": (RoundedWeight, {"__torch_dispatch__": classmethod(no_split)}, r"(?=.*weight)(?=.*\(6, 8\)).*NoSplit"),
    "OtherSize": (RoundedWeight, {PRE: lambda self, mesh: low(self, mesh, columns=-1)}, PRE),
    "OtherDtype": (RoundedWeight, {PRE: lambda self, mesh: low(self, mesh, torch.float16)}, PRE),
    "NoTuple": (RoundedWeight, {PRE: lambda self, mesh: self.inner.to(torch.bfloat16)}, PRE),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_subclasses_that_do_not_fit_are_refused(rank: Rank, name: str) -> None:
    """On every rank, with the parameter's name: missing methods, and results that differ between ranks."""
    base, changes, words = REFUSED[name]
    model = with_cast_weights(Mlp(8, 6), type(name, (base,), changes))
    with pytest.raises((TypeError, ValueError, FullshardError), match=f"(?s){words}"):
        COMPOSABLE.wrap(model, rank)(batch(rank.rank, 0, 4, 8))


class Growing(RoundedWeight):
    """Sends as many columns as ``hint`` says."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        (low,), metadata = super().fsdp_pre_all_gather(mesh)
        return (low if self.hint is None else low[:, : self.hint],), metadata


@on_ranks(2)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_sizes_that_change(rank: Rank, when: str) -> None:
    """Inner tensors of other sizes than at the first all-gather are refused on every rank, and the right ones go on."""
    model, _ = cast_pair(Growing, rank, 8, 8, 8, reshard_after_forward=True)
    x = batch(rank.rank, 0, 4, 8)
    expected = model(x).detach()
    local = model.layers[1].weight._local_tensor
    words = (
        r"layers\.1\.weight \(shape \(8, 8\).*Growing returned tensors \[\(4, 3\) torch\.bfloat16\]"
        r".*expected \[\(4, 8\) torch\.bfloat16\] as in the first all-gather"
    )
    loss = model(x).square().mean() if when == "backward" else None
    local.hint = 3
    with pytest.raises(FullshardError, match=words):
        loss.backward() if loss is not None else model(x)
    local.hint = None
    assert_equal(model(x).detach(), expected, "output")
    model(x).square().mean().backward()
    assert_at_rest(model)


@on_ranks(1, 2)
def test_example_of_the_docs(rank: Rank) -> None:
    """The packed weight of the docs trains."""
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "packed_weights.md").read_text()
    (snippet,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "torchao" not in code)
    run: dict[str, Any] = {"__name__": "snippet"}
    exec(snippet, run)
    assert run["loss"].item() < 1.0


class ReleasedInUse(RoundedWeight):
    """Says so, but returns what has arrived itself, if it is in the dtype of computation."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True


class OfThePass(CastWeight):
    """Sent as int8 with a scale for each row: rounded down for forward, and up for backward."""

    seen: list[int]  # bytes that the bucket holds after the all-gather
    held: Any

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        scale = self.inner.abs().amax(1, keepdim=True) / 100
        rounded = (torch.ceil if in_backward() else torch.floor)(self.inner / scale)
        return (rounded.to(torch.int8), scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, scale = outputs
        self.seen.append(self.held())
        full = codes.to(dtype) * scale
        if out is None:
            return full, (full,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


@on_ranks(2)
def test_other_values_for_backward(rank: Rank) -> None:
    """Each pass gets its own representation: exactly its bytes are sent, and they have memory until it is made."""
    torch.manual_seed(0)
    values = [torch.randn(8, 6), torch.randn(6, 8)]
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    for layer, value in zip(model, values, strict=True):
        layer.weight = nn.Parameter(OfThePass(value.clone()))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh, reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh)
    sizes, seen = [(8 * 6, 8 * 4), (6 * 8, 6 * 4)], []  # bytes of codes and scales
    for layer in model:
        (bucket,), local = unit_of(layer).buckets, layer.weight._local_tensor
        local.seen, local.held = seen, lambda bucket=bucket: held_bytes(bucket)
    x = batch(rank.rank, 0, 4, 6).requires_grad_()
    with record() as recorded:
        out = model(x)
        left = [held_bytes(unit_of(layer).buckets[0]) for layer in model]
        out.square().sum().backward()
    unsharded = [2 * each.nbytes for each in recorded if each.kind == "all_gather"]  # of two ranks
    assert unsharded == [nbytes for pair in [*sizes, *reversed(sizes)] for nbytes in pair]
    assert seen == [sum(pair) for pair in [*sizes, *reversed(sizes)]] and left == [0, 0]

    def as_seen(value: torch.Tensor, rounded: Any) -> torch.Tensor:
        scale = value.abs().amax(1, keepdim=True) / 100
        return rounded(value / scale) * scale

    (first, second), (first_back, second_back) = ([as_seen(v, r) for v in values] for r in (torch.floor, torch.ceil))
    hidden = x.detach() @ first.T
    of_hidden = 2 * hidden @ second.T @ second_back
    assert_close(x.grad, of_hidden @ first_back, "gradient of the input", **CLOSE)
    expected = of_hidden.T @ x.detach()
    dist.all_reduce(expected)
    assert_close(model[0].weight.grad.full_tensor(), expected / 2, "gradient of a weight", **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_outputs_that_are_released_in_use(rank: Rank) -> None:
    """They would be read after they were freed, which is an error; and so is any answer but a bool."""
    model = nn.Linear(6, 6, bias=False)
    model.weight = nn.Parameter(ReleasedInUse(model.weight.detach()))
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with pytest.raises(FullshardError, match="on the memory of what was all-gathered"):
        model(batch(rank.rank, 0, 4, 6))
    with pytest.MonkeyPatch.context() as patch:
        name = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
        patch.setattr(ReleasedInUse, name, lambda _: 1)
        other = nn.Linear(6, 6, bias=False)
        other.weight = nn.Parameter(ReleasedInUse(other.weight.detach()))
        with pytest.raises(TypeError, match="expected a bool, found 1"):
            fully_shard(other, mesh=rank.mesh)
