"""Tensor subclasses that say themselves what is gathered: training, bytes on the wire, calls, errors."""

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
    with_cast_weights,
)
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from compare import assert_close, assert_equal
from front_ends import AFTER_ADAM, CLOSE
from fullshard import FullshardError, MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from fullshard.engine.hooks import in_backward
from fullshard.engine.ownership import unit_of
from models import Mlp, assert_at_rest, batch, held_bytes, reference_backward, square_loss
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


def shard_layers(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train_both(model: nn.Module, reference: nn.Module, rank: Rank, width: int, microbatches: int = 1) -> None:
    """Two Adam steps on both. Losses at every step, the trainable parameters at the end."""
    trainable = [[p for p in m.parameters() if p.requires_grad] for m in (model, reference)]
    optimizers = [torch.optim.Adam(parameters, lr=1e-2) for parameters in trainable]
    for number in range(2 * microbatches):
        loss_of = square_loss(number, 4, width)
        loss = loss_of(model, rank.rank)
        with torch.no_grad():
            assert_close(loss.detach(), loss_of(reference, rank.rank), f"loss {number}", **AFTER_ADAM)
        loss.backward()
        reference_backward(reference, rank.world_size, loss_of)
        if (number + 1) % microbatches == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = [p.full_tensor().detach() for p in trainable[0]]  # packed weights have no full tensor of floats
    for ours, theirs in zip(found, trainable[1], strict=True):
        assert_close(ours, theirs.detach(), f"parameter of shape {tuple(theirs.shape)}", **AFTER_ADAM)


def cast_pair(
    kind: type[CastWeight], rank: Rank, *dims: int, mesh: Any = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded model whose weights are ``kind``, and an unsharded one that casts as they do."""
    torch.manual_seed(7)
    reference = Mlp(*dims)
    model = with_cast_weights(copy.deepcopy(reference), kind)
    shard_layers(model, rank.mesh if mesh is None else mesh, **options)
    return model, casting(reference, kind) if kind in CASTS else reference


# ---------------------------------------------------------------- training


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, None])
def test_frozen_packed_weights_train_adapters(rank: Rank, reshard: Any) -> None:
    """Adapters beside frozen packed weights, even and uneven, train as without sharding; those get no gradient.

    ``fsdp_post_all_gather`` makes the full parameter once; every later gather fills the same one.
    """
    forget_calls()
    model = shard_layers(Adapters(16, 17, 3, 16), rank.mesh, reshard_after_forward=reshard)
    train_both(model, Adapters(16, 17, 3, 16), rank, 16)
    pre, post, refill = (len(called(method)) for method in ("pre", "post", "refill"))
    assert not reshard or (pre, post, refill) == (12, 3, 9)  # three layers, two steps, in forward and in backward
    for layer in model.layers:
        assert isinstance(layer.weight, DTensor) and isinstance(layer.weight.to_local(), PackedWeight)
        assert not layer.weight.requires_grad and layer.weight.grad is None


@on_ranks(1, 4)
@each_value(kind=KINDS, reshard=[True, False, None])
def test_cast_weights_train(rank: Rank, kind: Any, reshard: Any) -> None:
    """Trainable weights that are cast for the gather train as unsharded ones that are cast in the forward.

    There may be any number of rows, also fewer than ranks, whether the subclass pads its inputs or we do. On one rank
    the protocol runs all the same: the cast is part of the model.
    """
    model, reference = cast_pair(kind, rank, 16, 32, 5, 1, 16, reshard_after_forward=reshard)
    train_both(model, reference, rank, 16, microbatches=2 if reshard is None else 1)
    weight = model.layers[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight.to_local(), kind)
    square_loss(0, 4, 16)(model, rank.rank).backward()
    assert isinstance(weight.grad, DTensor) and type(weight.grad.to_local()) is torch.Tensor


# ---------------------------------------------------------------- what travels, and what is called


@on_ranks(4)
def test_arguments_of_the_protocol(rank: Rank) -> None:
    """Five-argument subclasses get the 1-D shard axis, global size and stride, the module and the unit's policy.

    They learn in which dtype the unit computes, and what they return is used as it is.
    """
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


@on_ranks(2)
@pytest.mark.parametrize("kind", [RoundedWeight, ScaledWeight])
def test_full_parameter_is_the_same_object(rank: Rank, kind: Any) -> None:
    """What the module holds while it computes is one parameter; at rest neither it nor what is gathered has memory.

    The gather asks the very object that ``weight._local_tensor`` is, so that scales may be left on it.
    """
    forget_calls()
    model, _ = cast_pair(kind, rank, 16, 32, reshard_after_forward=True)
    seen: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    for step in range(2):
        model.layers[0].weight._local_tensor.hint = step
        square_loss(step, 4, 16)(model, rank.rank).backward()
        assert seen[-1] is seen[0]
        assert seen[0].untyped_storage().nbytes() == 0
    assert isinstance(seen[0], nn.Parameter) and seen[0].requires_grad
    if kind is RoundedWeight:  # the other one's calls are not written down in full
        assert [arguments[2] for arguments in called("pre")] == [0, 0, 1, 1]
        assert [arguments[2] for arguments in called("refill")] == [("rounded", step) for step in (0, 1, 1)]
        tensors = [outputs[0] for _, outputs, *_ in called("post") + called("refill")]
        assert len(tensors) == 4 and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


# ---------------------------------------------------------------- where the values come from


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
    """Subclasses made on the meta device keep their class through ``to_empty`` and train.

    The methods may also be set on the local tensors of plain parameters, after sharding and materializing.
    """
    torch.manual_seed(7)
    dims = (16, 17, 16) if kind else (16, 32, 16)
    reference = Mlp(*dims)
    with torch.device("meta"):
        model = Mlp(*dims) if kind is None else with_cast_weights(Mlp(*dims), kind)
    shard_layers(model, rank.mesh, reshard_after_forward=True)
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
    train_both(model, casting(reference, kind or RoundedWeight), rank, 16)
    assert kind is not None or calls == [("patched", 2)] * 8


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(rank: Rank, assign: bool) -> None:
    """State dicts hold DTensors on the subclass, and the next gather sees what was loaded, or written in place."""
    model = shard_layers(Adapters(16, 32, 16), rank.mesh)
    x = batch(rank.rank, 0, 4, 16)
    model(x)
    other = Adapters(16, 32, 16, seed=6)
    expected = other(x)
    state = shard_layers(other, rank.mesh).state_dict()
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


# ---------------------------------------------------------------- errors


class WithoutPost(CastWeight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError("must not be called")


class WithoutPre(CastWeight):
    def fsdp_post_all_gather(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("must not be called")


class TwoArguments(RoundedWeight):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        raise AssertionError("must not be called")


class NoSplit(RoundedWeight):
    """Cannot be cut, as NF4 with uneven rows."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor):
            raise NotImplementedError(f"NoSplit does not support {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Lopsided(RoundedWeight):
    """Returns inputs of another size on rank 1."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        rows = self.inner.to(torch.bfloat16)
        return (rows[:, :-1] if mesh.get_local_rank() == 1 else rows,), ("rounded", None)


class OtherDtype(RoundedWeight):
    """Returns inputs of another dtype on rank 1."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner.to(torch.float16 if mesh.get_local_rank() == 1 else torch.bfloat16),), ("rounded", None)


class NotTensors(RoundedWeight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self.inner.to(torch.bfloat16)


# What is refused -> words of the message.
REFUSED: dict[type[CastWeight], str] = {
    WithoutPost: r"(?=.*weight).*fsdp_post_all_gather",
    WithoutPre: r"(?=.*weight).*fsdp_pre_all_gather",
    TwoArguments: r"(?=.*weight).*fsdp_pre_all_gather.*outer_size",
    NoSplit: r"(?=.*weight)(?=.*\(6, 8\)).*NoSplit",
    Lopsided: "fsdp_pre_all_gather",
    OtherDtype: "fsdp_pre_all_gather",
    NotTensors: "fsdp_pre_all_gather",
}


@on_ranks(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused(rank: Rank, kind: Any) -> None:
    """One method without the other, another number of arguments, an operation that it lacks: the parameter is named.

    Inputs that do not match between ranks, or are no tuple, fail everywhere and leave nobody waiting.
    """
    with pytest.raises((TypeError, ValueError, FullshardError), match=f"(?s){REFUSED[kind]}"):
        shard_layers(with_cast_weights(Mlp(8, 6), kind), rank.mesh)(batch(rank.rank, 0, 4, 8))


class Growing(RoundedWeight):
    """Sends as many columns as ``hint`` says."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        (low,), metadata = super().fsdp_pre_all_gather(mesh)
        return (low if self.hint is None else low[:, : self.hint],), metadata


@on_ranks(2)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_sizes_that_change(rank: Rank, when: str) -> None:
    """Inner tensors of other sizes than at the first gather are refused on every rank, and the right ones go on.

    Without the check they would be padded to the old sizes, and the layer compute with shifted rows.
    """
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
    """Travels as int8 with a scale for each row: rounded down for forward, and up for backward."""

    seen: list[int]  # bytes that the bucket holds when everything has arrived
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
    """Each pass gets its own representation: exactly its bytes travel, and they have memory until it is made."""
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
    gathered = [2 * each.nbytes for each in recorded if each.kind == "all_gather"]  # of two ranks
    assert gathered == [nbytes for pair in [*sizes, *reversed(sizes)] for nbytes in pair]
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
