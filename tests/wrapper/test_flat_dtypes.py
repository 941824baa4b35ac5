"""Wrappers of parameters of any dtype, mixed, frozen, scalar, integer or complex, and what ``to()`` does to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapper_models import (
    CLOSE,
    adam,
    assert_at_rest,
    assert_like,
    assert_trains_alike,
    backward,
    units,
    with_reference,
    wrap,
)

from compare import assert_equal, fqn_of
from fullshard import FlatParameter, FullyShardedDataParallel, ShardingStrategy
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import LossOf, Mlp, Stack, batch, square_loss
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
BLOCKS = ["blocks.0", "blocks.1"]


class Mixed(nn.Module):
    """Layers of three dtypes, scalars, and frozen parameters of integer, bool and uint8."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)
        self.two = nn.Linear(5, 7).double()
        self.three = nn.Linear(7, 3).bfloat16()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(-0.5, dtype=torch.float64))
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, True]), requires_grad=False)
        self.code = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)[:, self.order] * self.mask * self.scale
        x = self.two(x.double()) + self.shift + self.code
        return self.three(x.bfloat16()).float()


@on_ranks(2, 3)
@BOTH
def test_any_mixture_of_dtypes(rank: Rank, original: bool) -> None:
    """Parameters of several dtypes in one unit train; integers, bools and scalars are just there."""
    model, reference = with_reference(Mixed(), rank, use_orig_params=original)
    if original:
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in reference.parameters()]
    else:
        dtypes = {p.dtype for p in model.parameters()}
        assert dtypes == {p.dtype for p in reference.parameters()} and len(dtypes) == len(list(model.parameters()))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {
            torch.float32,
            torch.float64,
            torch.bfloat16,
        }
    # In bfloat16 gradients of two ranks are rounded on their way.
    assert_trains_alike(model, reference, rank, rtol=2e-2, atol=1e-3)
    assert_at_rest(model)
    for name, value in reference.named_parameters():
        if not value.is_floating_point():
            assert_equal(model.state_dict()[name], value.detach(), name)


class Scalars(nn.Module):
    """Nothing but scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(float(i))) for i in range(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x.square() + self.b * x + self.c


@on_ranks(2, 4)
@BOTH
def test_scalars(rank: Rank, original: bool) -> None:
    """0-D parameters keep their shape when full, and lie on one rank each."""
    model, reference = with_reference(Scalars(), rank, use_orig_params=original)
    with FullyShardedDataParallel.summon_full_params(model):
        assert [p.shape for p in model.parameters()] == [torch.Size([])] * 3
    assert sum(p.numel() for p in model.parameters()) <= 5
    assert_trains_alike(model, reference, rank)


class Waves(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x.to(torch.complex64) @ self.waves).abs())


@on_ranks(2)
@BOTH
def test_complex_parameters(rank: Rank, original: bool) -> None:
    """Complex parameters train as unsharded ones do."""
    model, reference = with_reference(Waves(), rank, use_orig_params=original)
    optimizers = tuple(torch.optim.SGD(of.parameters(), lr=0.05, momentum=0.9) for of in (model, reference))
    assert_trains_alike(model, reference, rank, optimizers)  # type: ignore[arg-type]


class Coded(nn.Module):
    """A layer beside a frozen table of any dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.table = nn.Parameter((3 * torch.rand(5, 3)).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.view_as_real(self.table.to(torch.complex64)).sum(dim=(0, 2))


@on_ranks(2, 3)
@BOTH
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float16, torch.complex128],
    ids=str,
)
def test_frozen_table_of_any_dtype(rank: Rank, original: bool, dtype: torch.dtype) -> None:
    """Whatever the dtype of a frozen parameter, it arrives as it is."""
    model, reference = with_reference(Coded(dtype), rank, use_orig_params=original)
    assert_trains_alike(model, reference, rank)
    assert_equal(model.state_dict()["table"], reference.table.detach(), "table")


class Viewed(nn.Module):
    """Parameters whose memory is shared: one row for all, conjugated, and two parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(8, 6)
        self.rows = nn.Parameter(torch.randn(1, 6).expand(4, 6))
        self.conjugate = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())
        self.first, self.second = nn.Parameter(both[:4]), nn.Parameter(both[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.rows + self.first * self.second).t() * self.conjugate).abs()


@on_ranks(2)
@BOTH
def test_parameters_that_are_views(rank: Rank, original: bool) -> None:
    """They become parameters of their own with the same values, and train as such."""
    plain = Viewed()
    reference = Viewed()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            setattr(reference, name, nn.Parameter(parameter.resolve_conj().clone().contiguous()))
    model = wrap(plain, rank, use_orig_params=original)
    assert_like(model, reference)
    optimizers = tuple(torch.optim.SGD(of.parameters(), lr=0.05) for of in (model, reference))
    assert_trains_alike(model, reference, rank, optimizers)  # type: ignore[arg-type]


# -------------------------------------------------------------------- to another dtype

MOVES: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda m: m.to(torch.float64), torch.float64),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "there and back": (lambda m: m.double().float(), torch.float32),
    "nothing": (lambda m: m.to(torch.empty(0).device), torch.float32),
}


def typed_loss(dtype: torch.dtype) -> Callable[[int], LossOf]:
    """The mean square of outputs for inputs in ``dtype``."""

    def of_step(step: int) -> LossOf:
        return lambda model, rank: model(batch(rank, step, 4, 6).to(dtype)).float().square().mean()

    return of_step


@on_ranks(2)
@BOTH
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("when", ["before the first forward", "between steps"])
def test_to_another_dtype(rank: Rank, original: bool, move: str, when: str) -> None:
    """``to``, ``half`` and the like change all parameters of a wrapped model, which goes on as a plain one does."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    if when == "between steps":
        assert_trains_alike(model, reference, rank, steps=2)
    function, dtype = MOVES[move]
    before = list(model.parameters())
    assert function(model) is model
    function(reference)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_like(model, reference, rtol=1e-2 if dtype.itemsize < 4 else 1e-4, atol=1e-6)
    with record() as seen:
        output = model(batch(5, 0, 4, 6).to(dtype))
    assert {c.dtype for c in seen} == {dtype}
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype.itemsize >= 4 else {"rtol": 3e-2, "atol": 2e-3}
    torch.testing.assert_close(output, reference(batch(5, 0, 4, 6).to(dtype)), **tolerance)
    model.zero_grad()
    reference.zero_grad()
    optimizers = tuple(torch.optim.SGD(of.parameters(), lr=0.05, momentum=0.9) for of in (model, reference))
    assert_trains_alike(model, reference, rank, optimizers, loss=typed_loss(dtype), **tolerance)  # type: ignore[arg-type]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {dtype}
    assert_at_rest(model)


@on_ranks(2)
@BOTH
def test_gradients_move_along(rank: Rank, original: bool) -> None:
    """Gradients follow their parameters to another dtype, as those of plain modules do."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original)
    backward(model, reference, rank, square_loss())
    model.double()
    reference.double()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
    assert_like(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@BOTH
def test_optimizer_survives_a_move(rank: Rank, original: bool) -> None:
    """The optimizer from before ``to()`` trains the same parameter objects."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=original)
    ours, theirs = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (model, reference))
    assert_trains_alike(model, reference, rank, (ours, theirs), steps=1)
    model.double()
    reference.double()
    assert_trains_alike(model, reference, rank, (ours, theirs), loss=typed_loss(torch.float64))


@on_ranks(2)
def test_part_of_a_unit_in_another_dtype(rank: Rank) -> None:
    """Moving one layer of a unit splits the unit's parameters by dtype."""
    model, reference = with_reference(Mlp(6, 5, 4), rank, use_orig_params=True)
    for of in (model.module, reference):
        of.layers[1].double()
        of.layers[0].register_forward_hook(lambda module, args, output: output.double())
    assert_trains_alike(model, reference, rank, loss=typed_loss(torch.float32))
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
    assert len(nested_units(model)[0].buckets) == 2


@on_ranks(2, 3)
@BOTH
def test_dtypes_become_one_after_a_regrouped_move(rank: Rank, original: bool) -> None:
    """A unit of two dtypes that is moved to one of them keeps every value, and trains on."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3).double())
    model[0].register_forward_hook(lambda module, args, output: output.to(model[1].weight.dtype))
    wrapped = wrap(model, rank, use_orig_params=original)
    reference = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    reference.load_state_dict(wrapped.state_dict())
    assert_trains_alike(wrapped.float(), reference, rank)
    assert {p.dtype for p in wrapped.parameters()} == {torch.float32}


@on_ranks(2, 3)
def test_freezing_then_a_regrouped_move(rank: Rank) -> None:
    """What was frozen since wrapping, and then moved to another dtype, keeps every value."""
    model, reference = with_reference(Stack(1), rank, BLOCKS[:1], use_orig_params=True)
    for of in (model.module, reference):
        of.first.weight.requires_grad_(False)
        of.blocks[0].up.bias.requires_grad_(False)
        of.double()
    assert_like(model, reference)
    assert_trains_alike(model, reference, rank, loss=typed_loss(torch.float64))


# -------------------------------------------------------------------- frozen


def freeze_some(model: nn.Module) -> nn.Module:
    """Freeze a weight of the root, a bias of one block, and all of another block."""
    model.first.weight.requires_grad_(False)
    model.blocks[0].up.bias.requires_grad_(False)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    return model


@on_ranks(2, 3)
@BOTH
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_frozen_beside_trainable(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """Frozen parameters stay as they are, get no gradient, and cost no reduction."""
    model, reference = with_reference(
        freeze_some(Stack(2)), rank, BLOCKS, use_orig_params=original, sharding_strategy=strategy
    )
    assert_trains_alike(model, reference, rank)
    loss = square_loss()(model, rank.rank)
    with record() as seen:
        loss.backward()
    kind = "all_reduce" if strategy is ShardingStrategy.NO_SHARD else "reduce_scatter"
    assert sorted(units(seen, kind)) == ["", "blocks.0"]
    assert all(p.requires_grad or p.grad is None for p in model.parameters())
    # 6 + 3*6 + 3 of the root and 12*6 + 6*12 + 6 of the block are trained; the rest is padding and presence.
    assert 21 + 6 + 150 <= sum(c.numel for c in seen if c.kind == kind) <= 21 + 6 + 150 + 60
    assert_at_rest(model)


@on_ranks(2)
@BOTH
def test_all_frozen(rank: Rank, original: bool) -> None:
    """Nothing to train: forwards work, with and without inputs that need gradients, and nothing is reduced."""
    model, reference = with_reference(Stack(1).requires_grad_(False), rank, BLOCKS[:1], use_orig_params=original)
    inputs = batch(0, 0, 4, 6).requires_grad_()
    with record() as seen:
        output = model(inputs)
        output.sum().backward()
    assert units(seen, "reduce_scatter") == []
    expected = torch.autograd.grad(reference(inputs).sum(), inputs)[0]
    assert_equal(inputs.grad, expected, "input gradient")
    assert all(p.grad is None for p in model.parameters())
    assert not model(batch(0, 0, 4, 6)).requires_grad
    assert_at_rest(model)


def toggled(model: nn.Module, names: set[str]) -> None:
    """Train only those parameters that are not in ``names``."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(fqn_of(name) not in names)


@on_ranks(2)
def test_freezing_between_steps(rank: Rank) -> None:
    """Original parameters can be frozen and unfrozen between any two steps; the optimizer leaves frozen ones alone."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=True)
    optimizers = adam(model.parameters()), adam(reference.parameters())
    block = {f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    frozen: list[set[str]] = [set(), {"first.weight", "blocks.0.up.bias"}, block, set(), {"last.weight"} | block]
    for step, names in enumerate(frozen):
        toggled(model, names)
        toggled(reference, names)
        for of in (model, reference):
            of.zero_grad()
        backward(model, reference, rank, square_loss(step))
        assert {fqn_of(n) for n, p in model.named_parameters() if p.grad is None} == names
        assert_like(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
        assert_like(model, reference, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_freezing_flat_parameters_between_steps(rank: Rank) -> None:
    """Visible flat parameters can be frozen and unfrozen as a whole."""
    model, reference = with_reference(Stack(2), rank, BLOCKS)
    optimizers = adam(model.parameters()), adam(reference.parameters())
    for step, frozen in enumerate([False, True, True, False]):
        for of in (model.module, reference):
            of.blocks[0].requires_grad_(not frozen)
        backward(model, reference, rank, square_loss(step))
        assert_like(model, reference, grads=True, **CLOSE)
        flat = model.module.blocks[0].module._flat_param
        assert isinstance(flat, FlatParameter) and (flat.grad is None) == frozen
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_like(model, reference, **CLOSE)


@on_ranks(2)
@BOTH
def test_unfreezing_what_was_frozen_when_wrapped(rank: Rank, original: bool) -> None:
    """Parameters that were frozen when wrapped, and at first forwards, can be trained later."""
    plain = Stack(2)
    plain.blocks.requires_grad_(False)
    model, reference = with_reference(plain, rank, BLOCKS, use_orig_params=original)
    assert_trains_alike(model, reference, rank, steps=1)
    for of in (model, reference):
        of.requires_grad_(True)
        of.zero_grad()
    assert_trains_alike(model, reference, rank)
    assert all(p.grad is None or p.requires_grad for p in model.parameters())


@on_ranks(2)
def test_frozen_integers_beside_frozen_floats(rank: Rank) -> None:
    """A quantised layer: codes and scales are frozen, the adapter beside them is trained."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(-128, 127, (3, 6), dtype=torch.int8), requires_grad=False)
            self.scales = nn.Parameter(torch.rand(3, 1), requires_grad=False)
            self.adapter = nn.Linear(6, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.codes * self.scales / 128).t() + self.adapter(x)

    for original in (False, True):
        model: Any = Quantised()
        reference = copy.deepcopy(model)
        wrapped = wrap(model, rank, use_orig_params=original)
        assert sum(p.requires_grad for p in wrapped.parameters()) == 1
        assert_trains_alike(wrapped, reference, rank)
