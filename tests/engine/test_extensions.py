"""Tensor subclasses that say themselves what is gathered: training, bytes on the wire, calls, errors."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tensor import (
    Adapted,
    CastWeight,
    PackedWeight,
    RoundedWeight,
    ScaledWeight,
    SizedPackedWeight,
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
from fullshard import FullshardError, fully_shard
from fullshard.comm import record
from models import Mlp, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
AFTER_ADAM: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}


class Adapters(nn.Module):
    """Two layers with packed weights; the same ones for the same seed."""

    def __init__(self, *dims: int, kind: type[PackedWeight] = PackedWeight) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Adapted(i, o, kind) for i, o in itertools.pairwise(dims))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def shard_layers(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_both(
    model: nn.Module, reference: nn.Module, rank: Rank, width: int, steps: int = 3, microbatches: int = 1
) -> None:
    """Adam steps on both. Losses at every step, the trainable parameters at the end."""
    ours, theirs = (torch.optim.Adam(trainable(m), lr=1e-2) for m in (model, reference))
    for step in range(steps):
        for microbatch in range(microbatches):
            loss_of = square_loss(microbatches * step + microbatch, 4, width)
            loss = loss_of(model, rank.rank)
            with torch.no_grad():
                expected = loss_of(reference, rank.rank)
            assert_close(loss.detach(), expected, f"loss of step {step}", **AFTER_ADAM)
            loss.backward()
            reference_backward(reference, rank.world_size, loss_of)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    expected_values = dict(reference.named_parameters())
    full = {name: p.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    for name, value in full.items():  # packed weights have no full tensor of floats
        assert_close(value.detach(), expected_values[name].detach(), name, **AFTER_ADAM)


def cast_pair(
    kind: type[CastWeight], rank: Rank, *dims: int, mesh: Any = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded model whose weights are ``kind``, and an unsharded one that casts as they do."""
    torch.manual_seed(7)
    reference = Mlp(*dims)
    model = with_cast_weights(copy.deepcopy(reference), kind)
    return shard_layers(model, rank.mesh if mesh is None else mesh, **options), casting(reference, kind)


# Training.


@on_ranks(2)
@each_value(reshard=[True, False, None], kind=[PackedWeight, SizedPackedWeight])
def test_frozen_packed_weights_train_adapters(rank: Rank, reshard: Any, kind: Any) -> None:
    """Adapters beside frozen packed weights, even and uneven, train as without sharding.

    Packed weights get no gradient.
    """
    dims = (16, 32, 16) if kind is PackedWeight else (16, 17, 3, 16)
    model = shard_layers(Adapters(*dims, kind=kind), rank.mesh, reshard_after_forward=reshard)
    train_both(model, Adapters(*dims, kind=kind), rank, 16)
    for layer in model.layers:
        weight = layer.weight
        assert isinstance(weight, DTensor) and isinstance(weight.to_local(), kind)
        assert not weight.requires_grad and weight.grad is None


@on_ranks(1, 2)
@each_value(reshard=[True, False, None], kind=[RoundedWeight, SizedRoundedWeight, ScaledWeight])
def test_cast_weights_train(rank: Rank, kind: Any, reshard: Any) -> None:
    """Trainable weights that are cast for the gather train as unsharded ones that are cast in the forward.

    On one rank the protocol runs all the same: the cast is part of the model.
    """
    model, reference = cast_pair(kind, rank, 16, 32, 16, reshard_after_forward=reshard)
    train_both(model, reference, rank, 16, microbatches=2 if reshard is None else 1)
    weight = model.layers[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight.to_local(), kind)


@on_ranks(4)
@pytest.mark.parametrize("kind", [RoundedWeight, SizedRoundedWeight, ScaledWeight])
def test_uneven_cast_weights(rank: Rank, kind: Any) -> None:
    """There may be any number of rows, also fewer than ranks, whether the subclass pads its inputs or we do."""
    for rows in (5, 1):
        model, reference = cast_pair(kind, rank, 8, rows, 8)
        train_both(model, reference, rank, 8, steps=2)


@on_ranks(2)
@pytest.mark.parametrize("kind", [RoundedWeight, ScaledWeight])
def test_gradients_of_cast_weights(rank: Rank, kind: Any) -> None:
    """One step's gradients are bitwise those of the reference, and plain tensors."""
    model, reference = cast_pair(kind, rank, 16, 32, 16)
    square_loss(0, 4, 16)(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss(0, 4, 16))
    for layer, expected in zip(model.layers, reference.layers, strict=True):
        gradient = layer.weight.grad
        assert isinstance(gradient, DTensor) and type(gradient.to_local()) is torch.Tensor
        assert_equal(gradient.full_tensor(), expected.weight.grad, "gradient")


@on_ranks(4)
def test_hybrid_sharding_passes_the_shard_axis(rank: Rank) -> None:
    """On a (replicate, shard) mesh the subclass sees the 1-D shard axis only."""
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    forget_calls()
    model, reference = cast_pair(SizedRoundedWeight, rank, 16, 32, 16, mesh=mesh)
    train_both(model, reference, rank, 16, steps=1)
    for arguments in called("pre"):
        seen = arguments[1]
        assert seen.ndim == 1 and seen.size() == 2
        assert seen.get_group() == mesh["shard"].get_group()


# What travels.


def received(collectives: list[Any]) -> int:
    return sum(c.nbytes for c in collectives if c.kind == "all_gather")


@on_ranks(2)
@pytest.mark.parametrize("kind", [PackedWeight, SizedPackedWeight])
def test_packed_bytes_travel(rank: Rank, kind: Any) -> None:
    """A gather moves codes and scales, a bit more than a quarter of the weight's bytes, and nothing else."""
    model = shard_layers(Adapters(256, 512, 256, kind=kind), rank.mesh)
    with record() as collectives, torch.no_grad():
        model(batch(rank.rank, 0, 4, 256))
    packed = sum(512 * 256 + 4 * rows for rows in (512, 256))
    adapters = 2 * 4 * (256 * 4 + 4 * 512)
    expected = (packed + adapters) // rank.world_size * (rank.world_size - 1)
    assert expected <= received(collectives) <= 1.02 * expected  # alignment


@on_ranks(2)
@pytest.mark.parametrize(("kind", "itemsize"), [(RoundedWeight, 2), (ScaledWeight, 1)])
def test_cast_bytes_travel(rank: Rank, kind: Any, itemsize: int) -> None:
    """Gathers move the low precision, reductions the gradients' own."""
    model, _ = cast_pair(kind, rank, 256, 512, 256, reshard_after_forward=True)
    with record() as collectives:
        square_loss(0, 4, 256)(model, rank.rank).backward()
    weights, biases = 2 * 256 * 512 // 2, (512 + 256) // 2  # elements that this rank receives
    gathers = 2  # in forward and in backward
    expected = gathers * (itemsize * weights + 4 * biases)
    assert expected <= received(collectives) <= 1.02 * expected
    reduced = sum(c.nbytes for c in collectives if c.kind == "reduce_scatter")
    assert 4 * (weights + biases) <= reduced <= 1.02 * 4 * (weights + biases)


@on_ranks(2)
def test_unit_of_nothing_but_cast_weights(rank: Rank) -> None:
    """A unit need not hold a plain parameter beside them."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 6, bias=False))
    model = fully_shard(with_cast_weights(copy.deepcopy(plain), ScaledWeight), mesh=rank.mesh)
    x = batch(rank.rank, 0, 4, 8)
    assert_equal(model(x), casting(plain, ScaledWeight)(x), "output")


# Calls.


@on_ranks(2)
def test_arguments_of_the_protocol(rank: Rank) -> None:
    """Five-argument subclasses get mesh, global size and stride, the module and the unit's policy."""
    forget_calls()
    model, _ = cast_pair(SizedRoundedWeight, rank, 8, 17)
    model(batch(rank.rank, 0, 4, 8))
    ((weight, mesh, size, stride, module, policy),) = called("pre")
    assert mesh.ndim == 1 and mesh.size() == 2
    assert isinstance(weight, SizedRoundedWeight)
    assert weight.shape == model.layers[0].weight.to_local().shape == ((9, 8), (8, 8))[rank.rank]
    assert tuple(size) == (17, 8) and tuple(stride) == (8, 1)
    assert module is model.layers[0]
    assert policy.param_dtype is None
    ((_, outputs, metadata, dtype),) = called("post")
    assert [tuple(output.shape) for output in outputs] == [(18, 8)]
    assert metadata == ("rounded", None) and dtype is torch.float32


@on_ranks(2)
def test_first_gather_creates_and_later_ones_refill(rank: Rank) -> None:
    """``fsdp_post_all_gather`` makes the full parameter once; every later gather fills the same one."""
    forget_calls()
    model = shard_layers(Adapters(16, 32, 16), rank.mesh, reshard_after_forward=True)
    for step in range(3):
        square_loss(step, 4, 16)(model, rank.rank).backward()
    pre, post, refill = (len(called(method)) for method in ("pre", "post", "refill"))
    assert (pre, post, refill) == (12, 2, 10)  # two layers, three steps, gathered in forward and in backward


@on_ranks(2)
@pytest.mark.parametrize("kind", [RoundedWeight, ScaledWeight])
def test_full_parameter_is_the_same_object(rank: Rank, kind: Any) -> None:
    """What the module holds while it computes is one parameter; at rest neither it nor what is gathered has memory."""
    forget_calls()
    model, _ = cast_pair(kind, rank, 16, 32, reshard_after_forward=True)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    for step in range(2):
        square_loss(step, 4, 16)(model, rank.rank).backward()
        assert seen[-1] is seen[0]
        assert seen[0].untyped_storage().nbytes() == 0
    assert isinstance(seen[0], nn.Parameter) and seen[0].requires_grad
    tensors = [outputs[0] for _, outputs, *_ in called("post") + called("refill")]
    assert len(tensors) == (4 if kind is RoundedWeight else 0)  # the other one's are not written down
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


@on_ranks(2)
def test_what_is_put_on_the_local_tensor_is_seen(rank: Rank) -> None:
    """The gather asks the very object that ``weight._local_tensor`` is, so that scales may be left on it."""
    model, reference = cast_pair(RoundedWeight, rank, 16, 32, 16, reshard_after_forward=True)
    ours, theirs = (torch.optim.Adam(m.parameters()) for m in (model, reference))
    for step in range(3):
        for layer in model.layers:
            layer.weight._local_tensor.hint = step
        forget_calls()
        loss_of = square_loss(step, 4, 16)
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert [arguments[2] for arguments in called("pre")] == [step] * 4
        assert [arguments[2] for arguments in called("refill")] == [("rounded", step)] * (4 if step else 2)
        ours.step()
        theirs.step()


@on_ranks(2)
def test_mixed_precision_is_passed_on(rank: Rank) -> None:
    """The subclass learns in which dtype the unit computes, and what it returns is used as it is."""
    from fullshard import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    forget_calls()
    model, reference = cast_pair(SizedRoundedWeight, rank, 16, 32, mp_policy=policy)
    x = batch(rank.rank, 0, 4, 16)
    output = model(x)
    assert output.dtype is torch.bfloat16
    assert called("pre")[0][5] is policy
    assert called("post")[0][3] is torch.bfloat16
    low = copy.deepcopy(reference).bfloat16()
    assert_equal(output, low(x.bfloat16()), "output")
    output.float().square().mean().backward()
    assert model.layers[0].weight.grad.dtype is torch.float32


# Where the values come from.


@on_ranks(2)
def test_meta_initialization(rank: Rank) -> None:
    """Subclasses made on the meta device keep their class through ``to_empty`` and train."""
    torch.manual_seed(7)
    reference = Mlp(16, 17, 16)
    with torch.device("meta"):
        model = with_cast_weights(Mlp(16, 17, 16), SizedRoundedWeight)
    shard_layers(model, rank.mesh)
    model.to_empty(device="cpu")
    assert isinstance(model.layers[0].weight.to_local(), SizedRoundedWeight)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.copy_(distribute_tensor(value.detach(), rank.mesh))
    train_both(model, casting(reference, SizedRoundedWeight), rank, 16)


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
def test_methods_set_on_plain_tensors_before_the_first_forward(rank: Rank) -> None:
    """The methods may also be set on the local tensors of plain parameters, after sharding and materialising."""
    torch.manual_seed(7)
    reference = Mlp(16, 32, 16)
    with torch.device("meta"):
        model = Mlp(16, 32, 16)
    shard_layers(model, rank.mesh, reshard_after_forward=True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.copy_(distribute_tensor(value.detach(), rank.mesh))
    for layer in model.layers:
        local = layer.weight._local_tensor
        local.fsdp_pre_all_gather = pre_gather.__get__(local)
        local.fsdp_post_all_gather = post_gather.__get__(local)
    forget_calls()
    train_both(model, casting(reference, RoundedWeight), rank, 16)
    assert calls == [("patched", 2)] * len(calls) and len(calls) >= 3 * 4


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(rank: Rank, assign: bool) -> None:
    """State dicts hold DTensors on the subclass, and the next gather sees what was loaded."""
    model = shard_layers(Adapters(16, 32, 16), rank.mesh)
    x = batch(rank.rank, 0, 4, 16)
    model(x)
    with torch.random.fork_rng():
        other = Adapters(16, 32, 16)
        for layer in other.layers:
            layer.weight = nn.Parameter(PackedWeight.pack(torch.randn(layer.weight.shape)), requires_grad=False)
    expected = other(x)
    state = shard_layers(other, rank.mesh).state_dict()
    assert isinstance(state["layers.0.weight"], DTensor)
    assert isinstance(state["layers.0.weight"].to_local(), PackedWeight)
    model.load_state_dict(state, assign=assign)
    assert_close(model(x), expected, "output", **CLOSE)


@on_ranks(2)
def test_values_written_in_place_are_seen(rank: Rank) -> None:
    """Writing to a sharded parameter by hand changes what the next gather gives."""
    model, _ = cast_pair(RoundedWeight, rank, 16, 32)
    x = batch(rank.rank, 0, 4, 16)
    model(x)
    with torch.no_grad():
        model.layers[0].weight.mul_(0.3)
    layer = model.layers[0]
    weight, bias = layer.weight.full_tensor(), layer.bias.full_tensor()
    model.reshard()
    assert_equal(model(x), torch.tanh(nn.functional.linear(x, rounded(weight.detach()), bias)), "output")


# Errors.


class WithoutPost(CastWeight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError("must not be called")


class WithoutPre(CastWeight):
    def fsdp_post_all_gather(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("must not be called")


class TwoArguments(RoundedWeight):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        raise AssertionError("must not be called")


class NoSplit(CastWeight):
    """Cannot be cut, as NF4 with uneven rows."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor):
            raise NotImplementedError(f"NoSplit does not support {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    fsdp_pre_all_gather = RoundedWeight.fsdp_pre_all_gather
    fsdp_post_all_gather = RoundedWeight.fsdp_post_all_gather


def shard_and_run(rank: Rank, kind: Any, *dims: int) -> None:
    model = with_cast_weights(Mlp(*dims), kind)
    shard_layers(model, rank.mesh)(batch(rank.rank, 0, 4, dims[0]))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WithoutPost, r"(?s)weight.*fsdp_post_all_gather|fsdp_post_all_gather.*weight"),
        (WithoutPre, r"(?s)weight.*fsdp_pre_all_gather|fsdp_pre_all_gather.*weight"),
        (TwoArguments, r"(?s)(?=.*weight)fsdp_pre_all_gather.*outer_size|weight.*fsdp_pre_all_gather.*outer_size"),
        (NoSplit, r"(?s)(?=.*weight)(?=.*\(6, 8\)).*NoSplit"),
    ],
)
def test_incomplete_subclasses_are_refused(rank: Rank, kind: Any, words: str) -> None:
    """One method without the other, another number of arguments, an operation that it lacks: the parameter is named."""
    with pytest.raises((TypeError, ValueError), match=words):
        shard_and_run(rank, kind, 8, 6)


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


@on_ranks(2)
@pytest.mark.parametrize("kind", [Lopsided, OtherDtype, NotTensors])
def test_wrong_inputs_raise_on_every_rank(rank: Rank, kind: Any) -> None:
    """Inputs that do not match between ranks, or are no tuple, fail everywhere and leave nobody waiting."""
    with pytest.raises((TypeError, ValueError, FullshardError), match="fsdp_pre_all_gather"):
        shard_and_run(rank, kind, 8, 6)


@on_ranks(1, 2)
def test_example_of_the_docs(rank: Rank) -> None:
    """The packed weight of the docs trains."""
    page = (Path(__file__).parents[2] / "docs" / "extensions.md").read_text()
    (snippet,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "torchao" not in code)
    run: dict[str, Any] = {"__name__": "snippet"}
    exec(snippet, run)
    assert run["loss"].item() < 1.0
