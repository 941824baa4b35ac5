"""Inputs and outputs of units in containers of any kind: found, cast, watched, and otherwise left as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compare import assert_close, assert_equal
from containers import CONTAINERS, UNKNOWN_CLASSES, Fields, pack, tensors_of
from front_ends import (
    COMPOSABLE,
    FRONT_ENDS,
    FrontEnd,
    assert_at_rest,
    assert_trains_alike,
    build,
    each_front_end,
    sharded_with_reference,
    unwrapped,
)
from fullshard import MixedPrecisionPolicy
from fullshard.comm import record
from models import Block, LossOf, batch, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks

F64, F32 = torch.float64, torch.float32
PACKINGS = [name for name in CONTAINERS if name != "tensor"]


class Packing(nn.Module):
    """Takes and returns two tensors in the containers of one packing; notes their dtypes."""

    def __init__(self, packing: str) -> None:
        super().__init__()
        self.left, self.right, self.packing = nn.Linear(6, 6), nn.Linear(6, 6), packing
        self.seen: list[torch.dtype] = []

    def forward(self, packed: Any, *, scale: Any = None) -> Any:
        left, right = tensors_of(packed)
        assert type(packed) in (type(pack(self.packing, left, right)), list)
        self.seen = [left.dtype, right.dtype]
        if scale is not None:
            right = right * tensors_of(scale)[0]
        return pack(self.packing, torch.tanh(self.left(left)), torch.tanh(self.right(right)))


class Packed(nn.Module):
    """A chain of modules that hand each other containers, positionally or by keyword."""

    def __init__(self, packing: str, by_keyword: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), Packing(packing), Packing(packing)])
        self.packing, self.by_keyword = packing, by_keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, final = self.layers
        x = first(x)
        packed = pack(self.packing, x, x + 1)
        packed = middle(packed=packed, scale=[{"x": x}]) if self.by_keyword else middle(packed)
        assert type(packed) is type(pack(self.packing, x, x))
        left, right = tensors_of(final(packed))
        return left * right


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, packing=PACKINGS, by_keyword=[False, True])
def test_tensors_in_any_container_are_watched(rank: Rank, front_end: FrontEnd, packing: str, by_keyword: bool) -> None:
    """At any depth: each unit's backward ends before that of the one before begins."""
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, build(Packed, packing, by_keyword))
    assert_trains_alike(model, reference, rank)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    reduced = list(dict.fromkeys(c.unit for c in seen if c.kind == "reduce_scatter"))
    order = ["layers.2", "layers.1", "layers.0"]
    # Inputs of classes that nobody knows cannot be watched: the end of the backward pass ends the unit's.
    assert sorted(reduced) == sorted(order) if packing == "plain" else reduced == order


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, packing=[name for name in PACKINGS if name not in UNKNOWN_CLASSES])
def test_tensors_in_any_container_are_cast(rank: Rank, front_end: FrontEnd, packing: str) -> None:
    """Floats are cast for the unit, the caller's own are untouched, and gradients flow back."""
    model, reference = sharded_with_reference(
        front_end, rank, build(Packing, packing).double(), [], **front_end.precision(F64, F32)
    )
    model.float()
    x = batch(rank.rank, 0, 4, 6).requires_grad_()
    given = pack(packing, x, x + 1)
    outputs = tensors_of(model(given, scale=(x,)))
    assert unwrapped(model).seen == [F64, F64] == [output.dtype for output in outputs]
    assert [tensor.dtype for tensor in tensors_of(given)] == [F32, F32] and tensors_of(given)[0] is x
    torch.stack(outputs).sum().backward()
    wide = x.detach().double().requires_grad_()
    expected = tensors_of(reference(pack(packing, wide, wide + 1), scale=(wide,)))
    torch.stack(expected).sum().backward()
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_close(ours, theirs, "output", rtol=1e-5, atol=1e-6)
    assert_close(x.grad, wide.grad.float(), "gradient of the input", rtol=1e-4, atol=1e-5)
    assert_at_rest(model)


class Identity(nn.Module):
    """Notes whether its query is its key, and passes on outputs that require no gradient beside one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.same: list[bool] = []

    def forward(self, query: torch.Tensor, key: torch.Tensor, bundle: Fields) -> dict[str, Any]:
        self.same.append(query is key and bundle.first is query)
        assert bundle.label == "label" and not bundle.others.requires_grad
        x = self.linear(query) + key
        return {"x": x * bundle.others, "mask": bundle.others, "argmax": query.argmax(-1), "detached": query.detach()}


@on_ranks(2)
@each_front_end
def test_identity_of_tensors(rank: Rank, front_end: FrontEnd) -> None:
    """A tensor passed twice is one object inside, as attention relies on; outputs without gradients come through."""
    model = front_end.wrap(build(Identity), rank, [])
    x, mask = batch(rank.rank, 0, 4, 6).requires_grad_(), torch.ones(6)
    bundle = Fields(x, mask, label="label")
    output = model(x, key=x, bundle=bundle)
    assert output["mask"] is mask and not output["argmax"].requires_grad and not output["detached"].requires_grad
    output["x"].sum().backward()
    assert_at_rest(model)
    model(x, x.clone(), bundle)
    assert unwrapped(model).same == [True, False]
    assert bundle.first is x and x.grad is not None  # the caller's own is not changed


class Cache:
    """Keys of all layers that have run."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Attention(Block):
    """Adds its output to the cache, and returns the mean of all that are there, and the cache as well."""

    def forward(self, x: Any) -> Any:
        x, cache = x if isinstance(x, tuple) else (x, Cache())
        cache.keys.append(super().forward(x))
        return x + torch.stack(cache.keys).mean(0), cache


@on_ranks(2)
@each_front_end
def test_cache_of_earlier_units(rank: Rank, front_end: FrontEnd) -> None:
    """What an object holds of earlier units changes nothing: each unit's backward ends before the one before begins."""
    plain = build(lambda: nn.Sequential(nn.Linear(6, 6), *(Attention(6) for _ in range(4))))
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, plain, ["1", "2", "3", "4"])

    def loss_at(step: int) -> LossOf:
        return lambda module, number: module(batch(number, step, 4, 6))[0].square().mean()

    assert_trains_alike(model, reference, rank, loss_at)
    loss = loss_at(0)(model, rank.rank)
    with record() as seen:
        loss.backward()
    assert list(dict.fromkeys(c.unit for c in seen if c.kind == "reduce_scatter")) == ["4", "3", "2", "1", ""]
    unsharded = [c.unit for c in seen if c.kind == "all_gather"]
    assert len(unsharded) == len(set(unsharded))


class Sequence(nn.LSTM):
    """An LSTM that notes the PackedSequence that it takes."""

    def forward(self, packed: Any) -> Any:  # type: ignore[override]
        self.taken = packed
        return super().forward(packed)[0]


@on_ranks(2)
def test_packed_sequences(rank: Rank) -> None:
    """A unit takes a PackedSequence, whose sizes stay on the CPU, and casts only its data."""
    model, reference = sharded_with_reference(
        COMPOSABLE, rank, build(Sequence, 12, 12), [], mp_policy=MixedPrecisionPolicy(F64, output_dtype=F32)
    )
    lengths = torch.tensor([2, 4], device="cpu")  # not sorted: the packed sequence carries the two orders as well
    values = batch(rank.rank, 0, 4, 2, 12)
    packed = nn.utils.rnn.pack_padded_sequence(values, lengths, batch_first=False, enforce_sorted=False)
    output = model(packed)
    expected = reference.double()(packed._replace(data=packed.data.double()))
    assert model.taken.data.dtype is F64 and model.taken.batch_sizes.dtype is torch.int64
    assert model.taken.batch_sizes.device.type == "cpu" and output.data.dtype is F32
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert_equal(getattr(output, name), getattr(expected, name), name)
    assert_close(output.data, expected.data.float(), "output", rtol=1e-5, atol=1e-7)
    output.data.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
