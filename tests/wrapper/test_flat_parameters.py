"""What users see of flat parameters: objects, names, shapes and values, in both modes, at rest and inside forward."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_models import (
    WRAPPED,
    adam,
    assert_at_rest,
    assert_trains_alike,
    pieces_of,
    slice_of,
    units,
    with_reference,
    wrap,
)

from compare import assert_equal, fqn_of
from fullshard import FlatParameter, FullyShardedDataParallel, ShardingStrategy
from fullshard.comm import record
from models import Mlp, Stack, batch, square_loss
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


# -------------------------------------------------------------------- visible flat parameters


@on_ranks(3)
def test_flat_parameter_is_what_is_registered(rank: Rank) -> None:
    """With ``use_orig_params=False`` a unit has one 1-D parameter: its slice, which knows what is in it.

    Its ``.grad`` is this rank's slice of all averaged gradients, and zero in between.
    """
    model, reference = with_reference(Mlp(5, 7, 3), rank)
    ((name, parameter),) = model.named_parameters()
    assert name == f"{WRAPPED}._flat_param"
    assert isinstance(parameter, FlatParameter) and isinstance(parameter, nn.Parameter)
    assert parameter.fqns == ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    assert parameter.shapes == tuple(p.shape for p in reference.parameters())
    assert parameter.requires_grad and parameter.grad is None and parameter.is_leaf
    assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    assert_equal(parameter.detach(), slice_of(list(reference.parameters()), rank), "slice")
    assert model.module._flat_param is parameter
    square_loss(0, 4, 5)(model, rank.rank).backward()
    ((_, after),) = model.named_parameters()
    assert after is parameter and parameter.grad is not None and parameter.grad.shape == parameter.shape
    if rank.world_size == 2:  # a mean of three has no exact sum
        totals = [torch.zeros_like(p) for p in reference.parameters()]
        for other in range(rank.world_size):
            reference.zero_grad()
            square_loss(0, 4, 5)(reference, other).backward()
            for total, plain in zip(totals, reference.parameters(), strict=True):
                total += plain.grad / rank.world_size
        assert_equal(parameter.grad, slice_of(totals, rank), "gradient")


@on_ranks(2)
def test_each_unit_has_its_flat_parameter(rank: Rank) -> None:
    """Flat parameters of nested units are named after the modules that they belong to; the root's comes first.

    At rest modules do not have their parameters registered, but their attributes are still there.
    """
    model, reference = with_reference(Stack(2), rank, BLOCKS[:2])
    assert [name for name, _ in model.named_parameters()] == [
        f"{WRAPPED}._flat_param",
        f"{WRAPPED}.blocks.0.{WRAPPED}._flat_param",
        f"{WRAPPED}.blocks.1.{WRAPPED}._flat_param",
    ]
    flats = list(model.parameters())
    assert flats[0].fqns == ("first.weight", "first.bias", "last.weight", "last.bias")
    assert flats[1].fqns == ("up.weight", "up.bias", "down.weight", "down.bias")
    for flat, block in zip(flats[1:], reference.blocks, strict=True):
        assert_equal(flat.detach(), slice_of(list(block.parameters()), rank), "block")
    inner = model.module.blocks[0].module
    assert "up.weight" not in dict(inner.named_parameters())
    expected = pieces_of(list(reference.blocks[0].parameters()), rank)
    for piece, value in zip((inner.up.weight, inner.up.bias), expected, strict=False):
        assert_equal(piece.detach(), value, "attribute")


@on_ranks(2)
def test_second_flat_parameters(rank: Rank) -> None:
    """Each dtype of a unit has its own flat parameter, as have frozen parameters, which need no gradient.

    The first keeps the plain name.
    """
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3).double())
    wrapped, reference = with_reference(model, rank)
    assert [(name, p.dtype) for name, p in wrapped.named_parameters()] == [
        (f"{WRAPPED}._flat_param", torch.float32),
        (f"{WRAPPED}._flat_param_1", torch.float64),
    ]
    first, second = wrapped.parameters()
    assert (first.fqns, second.fqns) == (("0.weight", "0.bias"), ("1.weight", "1.bias"))
    assert_equal(first.detach(), slice_of(list(reference[0].parameters()), rank), "float32")
    assert second.numel() >= -(-18 // rank.world_size)
    model = Mlp(5, 7, 3)
    model.layers[0].weight.requires_grad_(False)
    model.layers[1].bias.requires_grad_(False)
    wrapped = wrap(model, rank)
    assert {p.requires_grad: p.fqns for p in wrapped.parameters()} == {
        False: ("layers.0.weight", "layers.1.bias"),
        True: ("layers.0.bias", "layers.1.weight"),
    }
    square_loss(0, 4, 5)(wrapped, rank.rank).backward()
    assert {p.requires_grad: p.grad is not None for p in wrapped.parameters()} == {False: False, True: True}


# -------------------------------------------------------------------- original parameters


@on_ranks(2)
def test_original_parameters_stay_the_same_objects(rank: Rank) -> None:
    """With ``use_orig_params=True`` order, objects, flags and attributes are those from before, also after a step."""
    model = Stack(2)
    model.first.bias.requires_grad_(False)
    model.last.weight.tag = "mine"  # type: ignore[attr-defined]
    before = dict(model.named_parameters())
    wrapped = wrap(model, rank, BLOCKS[:2], use_orig_params=True)

    def check() -> None:
        after = dict(wrapped.named_parameters())
        assert [fqn_of(name) for name in after] == list(before)
        assert all(one is other for one, other in zip(after.values(), before.values(), strict=True))
        assert [p.requires_grad for p in after.values()].count(False) == 1
        assert not model.first.bias.requires_grad
        assert model.last.weight.tag == "mine"  # type: ignore[attr-defined]

    check()
    optimizer = torch.optim.Adam(wrapped.parameters())
    for step in range(2):
        square_loss(step)(wrapped, rank.rank).backward()
        check()
        optimizer.step()
        check()
    wrapped.state_dict()
    check()


@on_ranks(3)
def test_pieces_are_cut_from_the_concatenation(rank: Rank) -> None:
    """Each parameter is this rank's 1-D part of it, which may be empty; pieces of a unit share one slice.

    That of a parameter that is dense but not contiguous is cut from its memory as it lies.
    """
    model, reference = with_reference(Mlp(5, 7, 3), rank, use_orig_params=True)
    expected = pieces_of(list(reference.parameters()), rank)
    for (name, parameter), piece in zip(model.named_parameters(), expected, strict=True):
        assert parameter.dim() == 1 and type(parameter) is nn.Parameter
        assert_equal(parameter.detach(), piece, name)
    places = [(p.data_ptr(), p.numel()) for p in model.parameters() if p.numel()]
    numel = slice_of(list(reference.parameters()), rank).numel()
    assert places[-1][0] + 4 * places[-1][1] <= places[0][0] + 4 * numel
    held = sum(p.numel() for p in model.parameters())
    assert held < sum(p.numel() for p in reference.parameters())
    plain = nn.Linear(6, 4, bias=False)
    plain.weight.data = plain.weight.data.t().contiguous().t()
    memory = plain.weight.data.t().contiguous()
    (piece,) = wrap(plain, rank, use_orig_params=True).parameters()
    assert_equal(piece.detach(), pieces_of([memory], rank)[0], "piece of a transposed weight")


@on_ranks(2)
def test_alignment_and_empty_pieces(rank: Rank) -> None:
    """A 5x5 weight is cut 13 to 12; of a 7x5 weight and a bias of 7, the bias is empty on the first rank."""
    square = wrap(nn.Linear(5, 5, bias=False), rank, use_orig_params=True)
    assert [p.numel() for p in square.parameters()] == [13 - rank.rank]
    (flat,) = wrap(nn.Linear(5, 5, bias=False), rank).parameters()
    assert flat.numel() == 13
    weight, bias = wrap(nn.Linear(5, 7), rank, use_orig_params=True).parameters()
    assert (weight.numel(), bias.numel()) == [(22, 0), (13, 7)][rank.rank]
    assert bias.shape == ((0,) if rank.rank == 0 else (7,))
    (flat,) = wrap(nn.Linear(5, 7), rank).parameters()
    assert flat.numel() == 22


@on_ranks(2)
@BOTH
def test_without_a_shard_axis_shapes_are_the_original_ones(rank: Rank, original: bool) -> None:
    """NO_SHARD cuts nothing: original parameters keep their shapes and strides."""
    model = Mlp(5, 7, 3)
    model.layers[0].weight.data = model.layers[0].weight.data.t().contiguous().t()
    wrapped, reference = with_reference(
        model, rank, use_orig_params=original, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    if original:
        for (name, one), other in zip(wrapped.named_parameters(), reference.parameters(), strict=True):
            assert_equal(one.detach(), other.detach(), name)
            assert one.stride() == other.stride()
    else:
        (flat,) = wrapped.parameters()
        assert flat.numel() == 35 + 1 + 7 + 1 + 21 + 3 + 3
    assert_trains_alike(wrapped, reference, rank, loss=lambda step: square_loss(step, 4, 5))
    assert_at_rest(wrapped)


# -------------------------------------------------------------------- inside forward


class Looking(nn.Module):
    """A linear layer that notes what it sees of its parameters while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.seen: list[tuple[str, torch.Size]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [(name, p.shape) for name, p in self.named_parameters()]
        assert self.linear.weight.shape == (3, 5)
        return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize(("original", "strategy"), [(False, "FULL_SHARD"), (True, "SHARD_GRAD_OP")])
def test_parameters_inside_forward(rank: Rank, original: bool, strategy: str) -> None:
    """While a module runs, its parameters have their original names and full shapes; afterwards they are at rest.

    Also where unsharded parameters are kept for backward, what users see meanwhile is sharded.
    """
    model = wrap(Looking(), rank, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    before = {name: id(p) for name, p in model.named_parameters()}
    for _ in range(2):
        loss = square_loss(0, 4, 5)(model, rank.rank)
        assert model.module.seen == [("linear.weight", (3, 5)), ("linear.bias", (3,))]
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert all(p.dim() == 1 for p in model.parameters())
        loss.backward()
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert_at_rest(model)


Pair = namedtuple("Pair", ["first", "second"])


class Two(nn.Module):
    """Returns a named tuple of which maybe only one part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(self.one(x), self.other(x))


class OfTwo(nn.Module):
    """A unit that returns a named tuple, in another."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.last = Two(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        pair = self.two(x)
        assert isinstance(pair, Pair)
        return self.last(pair.first + pair.second if both else pair.second)


@on_ranks(2)
@pytest.mark.parametrize(("original", "both"), [(False, True), (True, False), (False, False)])
def test_named_tuples_are_watched(rank: Rank, original: bool, both: bool) -> None:
    """A unit whose outputs are in a named tuple keeps what its backward needs, also after saving a state dict."""
    model, reference = with_reference(OfTwo(), rank, ["two"], use_orig_params=original)

    def loss(step: int) -> Any:
        return lambda m, r: m(batch(r, step, 4, 6), both).square().mean()

    # In flat mode a gradient that is missing is zero, in the unsharded reference it is None.
    optimizers = adam(model.parameters(), weight_decay=0.0), adam(reference.parameters(), weight_decay=0.0)
    assert_trains_alike(model, reference, rank, optimizers, loss=loss, steps=2, grads=both or original)
    for _ in range(2):
        value = loss(0)(model, rank.rank)
        with record() as seen:
            value.backward()
        assert units(seen, "all_gather") == [] and sorted(units(seen, "reduce_scatter")) == ["", "two"]
        model.zero_grad()
        model.load_state_dict(model.state_dict())


# -------------------------------------------------------------------- many empty pieces


class Many(nn.Module):
    """Many parameters of one element each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((1,), 0.1 + i / count)) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat(list(self.weights)).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_thousand_empty_pieces(rank: Rank, foreach: bool) -> None:
    """Optimizers and clipping step over 500 empty pieces on each rank."""
    model, reference = with_reference(Many(1000), rank, use_orig_params=True)
    assert sum(p.numel() == 0 for p in model.parameters()) == 500
    ours = torch.optim.AdamW(model.parameters(), eps=1e-3, foreach=foreach)
    theirs = torch.optim.AdamW(reference.parameters(), eps=1e-3, foreach=foreach)
    assert_trains_alike(model, reference, rank, (ours, theirs), steps=2)
    square_loss()(model, rank.rank).backward()
    local = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9, foreach=foreach)
    assert torch.isfinite(local)


# -------------------------------------------------------------------- strides


class Strided(nn.Module):
    """Parameters that are not contiguous: channels_last, transposed, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.gaps = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [p.stride() for p in (self.conv.weight, self.transposed, self.gaps)]
        return self.conv(x).mean(dim=(2, 3)) @ (self.transposed + self.gaps).t()


@on_ranks(3)
@BOTH
def test_strides_are_kept(rank: Rank, original: bool) -> None:
    """Full parameters have the strides of the original ones (contiguous where those had gaps), and train alike."""
    plain = Strided()
    before = [p.stride() for p in (plain.conv.weight, plain.transposed)]
    model, reference = with_reference(plain, rank, use_orig_params=original)
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 2, 3, 5, 5))
    assert plain.seen == [*before, (4, 1)]
    with FullyShardedDataParallel.summon_full_params(model):
        assert [plain.conv.weight.stride(), plain.transposed.stride()] == before
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        assert state[name].shape == value.shape
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
