"""Mixed precision, against a hand-written run: in which dtypes units all-gather, compute and reduce; moves."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_equal
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FRONT_ENDS,
    ORIGINAL,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    full_gradients,
    sgd,
    sharded_with_reference,
    step_and_clear,
    unit_names,
    unwrapped,
)
from fullshard.comm import Collective, record
from fullshard.engine.ownership import nested_units
from models import LossOf, Mlp, Stack, batch, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
Grads = list["torch.Tensor | None"]


# -------------------------------------------------------------------- the hand-written reference


@dataclass(frozen=True)
class Precision:
    """What is computed and reduced in; None as in the front ends."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @property
    def name(self) -> str:
        return f"{self.param}-{self.reduce}".replace("torch.", "")


LOW = Precision(BF16, F32)


def casting_copy(master: nn.Module, precision: Precision, units: Sequence[str]) -> nn.Module:
    """A plain copy with weights cast, and hooks that cast the inputs of ``units``."""
    model = copy.deepcopy(master)
    for parameter in model.parameters():
        parameter.grad = None
        if precision.param is not None:
            parameter.data = parameter.data.to(precision.param)
    for name in units if precision.param is not None else ():
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: cast(precision.param, args))
    return model


def cast(dtype: torch.dtype | None, value: Any) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return torch.utils._pytree.tree_map(one, value)


def local_gradients(
    master: nn.Module, precision: Precision, units: Sequence[str], rank: int, losses: Sequence[LossOf]
) -> Grads:
    """One rank's gradients, added up over microbatches in the reduce dtype."""
    model = casting_copy(master, precision, units)
    totals: Grads = [None for _ in model.parameters()]
    for loss in losses:
        model.zero_grad()
        loss(model, rank).backward()
        for index, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                gradient, before = parameter.grad.to(precision.reduce or parameter.dtype), totals[index]
                totals[index] = gradient if before is None else before + gradient
    return totals


def mean_over_ranks(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean in the dtype of the terms, as the engine documents it for gloo."""
    dtype, count = terms[0].dtype, len(terms)
    before, after = (2, count / 2) if dtype is F16 and count > 1 else (1, count)
    terms = [term * (1 / before) for term in terms]
    wide = F32 if dtype in (F16, BF16) and count > 2 else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return (total * (1 / after)).to(dtype)


def reference_gradients(master: nn.Module, precision: Precision, world_size: int, *losses: LossOf) -> None:
    """Add to ``master.grad`` what one synchronized backward after unsynchronized ones has to give."""
    units = [*unit_names(master), ""]
    by_rank = [local_gradients(master, precision, units, rank, losses) for rank in range(world_size)]
    for parameter, gradients in zip(master.parameters(), zip(*by_rank, strict=True), strict=True):
        if all(gradient is None for gradient in gradients):
            continue
        like = next(gradient for gradient in gradients if gradient is not None)
        terms = [torch.zeros_like(like) if gradient is None else gradient for gradient in gradients]
        reduced = mean_over_ranks(terms).to(parameter.dtype)
        parameter.grad = reduced if parameter.grad is None else parameter.grad + reduced


def dtypes_of(collectives: list[Collective], kind: str) -> set[torch.dtype]:
    """Of the messages of one kind."""
    return {c.dtype for c in collectives if c.kind == kind}


def wrap(front_end: FrontEnd, rank: Rank, master: nn.Module, precision: Precision, **options: Any) -> Any:
    """A copy of ``master`` in that precision."""
    options.update(front_end.precision(precision.param, precision.reduce))
    return front_end.wrap(copy.deepcopy(master), rank, **options)


# -------------------------------------------------------------------- every combination


def train_and_compare(rank: Rank, front_end: FrontEnd, precision: Precision, **options: Any) -> None:
    """Train with accumulation (two microbatches, then one) and require the bits of the reference."""
    master = build(Stack, 2)
    with tiny_units():
        model = wrap(front_end, rank, master, precision, **options)
    optimizers = [sgd(m, 0.5, momentum=0.5) for m in (model, master)]
    for step in range(2):
        losses = [square_loss(3 * step + micro) for micro in range(3)]
        with record() as seen:
            with front_end.no_sync(model):
                losses[0](model, rank.rank).backward()
            losses[1](model, rank.rank).backward()
            losses[2](model, rank.rank).backward()
        computed = precision.param or F32
        reduced = {precision.reduce or computed}
        if options.get("strategy") == "NO_SHARD":
            assert (dtypes_of(seen, "all_gather"), dtypes_of(seen, "all_reduce")) == (set(), reduced)
        else:
            assert (dtypes_of(seen, "all_gather"), dtypes_of(seen, "reduce_scatter")) == ({computed}, reduced)
        reference_gradients(master, precision, rank.world_size, *losses[:2])
        reference_gradients(master, precision, rank.world_size, losses[2])
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {F32}
        assert_same_gradients(model, master, rtol=0.0, atol=0.0)
        step_and_clear(*optimizers)
    assert_same_values(model, master)
    assert_at_rest(model)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS,
    strategy=STRATEGIES,
    precision=[Precision(param, reduce) for param in (None, BF16, F64) for reduce in (None, F32, BF16, F16)],
)
def test_every_combination_to_the_bit(rank: Rank, front_end: FrontEnd, strategy: str, precision: Precision) -> None:
    """Gradients and weights have the bits of a hand-written run; messages have the dtypes chosen.

    However long parameters stay unsharded, and without sharding them, the bits are the same.
    """
    train_and_compare(rank, front_end, precision, strategy=strategy)


@pytest.mark.cpu_only("other back ends round at every hop, and add in another order")
@on_ranks(4)
@each_value(front_end=FRONT_ENDS, precision=[LOW, Precision(BF16), Precision(F16)])
def test_sums_of_four_ranks(rank: Rank, front_end: FrontEnd, precision: Precision) -> None:
    """Sums of more than two half-precision terms are rounded once."""
    train_and_compare(rank, front_end, precision)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS,
    precision=[LOW, LOW, LOW, Precision(F32, F32)],
    dtypes=[[BF16], [F32, BF16, F32], [F64, BF16, F64], [BF16]],
)
def test_models_in_other_dtypes(rank: Rank, front_end: FrontEnd, precision: Precision, dtypes: Any) -> None:
    """Born in bf16 or moved: messages keep their dtypes, shards have their own.

    A first forward of frozen parameters changes nothing about it.
    """
    master = build(Stack, 2).to(BF16)
    model = wrap(front_end, rank, master, precision)
    model.requires_grad_(False)
    square_loss(5)(model, rank.rank)
    model.requires_grad_(True)
    for dtype in dtypes:
        for module in (model, master):
            module.zero_grad()
            module.to(dtype)
        with record() as seen:
            square_loss()(model, rank.rank).backward()
        assert (dtypes_of(seen, "all_gather"), dtypes_of(seen, "reduce_scatter")) == ({precision.param}, {F32})
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
        reference_gradients(master, precision, rank.world_size, square_loss())
        assert_same_gradients(model, master, rtol=0.0, atol=0.0)


# -------------------------------------------------------------------- adding up


class Scale(nn.Module):
    """One weight whose gradient is the sum of the input; ``late`` is a second one that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.late = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, with_late: bool = False) -> torch.Tensor:
        return self.weight * x + self.late * x if with_late else self.weight * x


def accumulate(front_end: FrontEnd, model: Any, values: Sequence[float], late_at: int = -1) -> None:
    """One microbatch per value, all but the last without synchronization; the gradient of each is the value."""
    for index, value in enumerate(values):
        last = index == len(values) - 1
        with contextlib.nullcontext() if last else front_end.no_sync(model):
            model(torch.full((4,), value), index == late_at).float().sum().backward()


def gradients_of(model: nn.Module) -> tuple[float | None, float | None]:
    """The one value of both gradients."""
    found = full_gradients(model)
    weight, late = found["weight"], found["late"]
    assert all(each is None or (each.dtype is F32 and each.unique().numel() == 1) for each in (weight, late))
    return None if weight is None else weight[0].item(), None if late is None or not late.any() else late[0].item()


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS,
    precision=[Precision(), LOW, Precision(BF16, F64), Precision(BF16), Precision(None, BF16)],
)
def test_microbatches_add_up_in_the_reduce_dtype(rank: Rank, precision: Precision, front_end: FrontEnd) -> None:
    """256 + 1 + 1 + 1 is 259, but in bf16 it stays 256: what adds up has the reduce dtype from the first on."""
    expected = 256.0 if (precision.reduce or precision.param) is BF16 else 259.0
    model = wrap(front_end, rank, Scale(), precision, units=[])
    accumulate(front_end, model, [256.0, 1.0, 1.0, 1.0])
    assert gradients_of(model) == (expected, None)
    model.zero_grad()
    for value in (256.0, 1.0, 1.0, 1.0):  # reduced every time, they add up in the dtype of the shards
        model(torch.full((4,), value)).float().sum().backward()
    assert gradients_of(model) == (259.0, None)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_calls_before_one_backward_add_up_in_the_reduce_dtype(rank: Rank, strategy: str, front_end: FrontEnd) -> None:
    """256 + 1 is 257 of two calls in one forward and of two forwards; in bf16 it would stay 256."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, *values: float) -> torch.Tensor:
            return sum((self.scale(torch.full((4,), value)).float() for value in values), torch.zeros(4)).sum()

    model = wrap(front_end, rank, Calls(), LOW, units=["scale"], strategy=strategy)
    for loss in (lambda: model(256.0, 1.0), lambda: model(256.0) + model(1.0), lambda: model(1.0, 256.0)):
        model.zero_grad()
        loss().backward()
        assert_equal(full_gradients(model)["scale.weight"], torch.full((4,), 257.0), "gradient")


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, reduce=[None, F32])
def test_parameter_first_used_in_the_last_microbatch(rank: Rank, reduce: Any, front_end: FrontEnd) -> None:
    """A fresh gradient beside accumulated ones is no error on any rank, also if one rank alone has it."""
    for late_rank in (None, 1):
        model = wrap(front_end, rank, Scale(), Precision(BF16, reduce), units=[])
        accumulate(front_end, model, [256.0, 1.0, 1.0], late_at=2 if late_rank in (None, rank.rank) else -1)
        assert gradients_of(model) == (258.0 if reduce is F32 else 256.0, 1.0 if late_rank is None else 0.5)


# -------------------------------------------------------------------- what is cast


class Kinds(nn.Module):
    """Parameters of several dtypes in one unit, and what the forward sees of them; packed data are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.short = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, dtype=BF16))
        for dtype in (F64, torch.complex64, torch.int8, torch.uint16, torch.float8_e4m3fn, torch.bool):
            value = torch.randn(6).to(dtype) if dtype.is_floating_point else torch.arange(6).to(dtype)
            self.register_parameter(str(dtype).removeprefix("torch."), nn.Parameter(value, requires_grad=False))
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        return x.to(self.weight.dtype) @ self.weight + self.short


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, precision=[Precision(), LOW, LOW])
def test_parameters_of_many_dtypes_in_one_unit(rank: Rank, front_end: FrontEnd, precision: Precision) -> None:
    """Floats are cast; integers, complex numbers and one-byte floats are sent as they are, and nothing is an error."""
    master = build(Kinds)
    model = wrap(front_end, rank, master, precision, units=[])
    with record() as seen:
        model(batch(rank.rank, 0, 4, 6).to(BF16)).float().square().mean().backward()
    for name, parameter in master.named_parameters():
        value = parameter.detach()
        if precision.param is not None and name in ("weight", "short", "float64"):
            value = value.to(precision.param)
        assert_equal(unwrapped(model).seen[name], value, name)
    assert dtypes_of(seen, "reduce_scatter") == ({F32} if precision.reduce else {F32, BF16})
    assert_same_values(model, master)
    found = {name: gradient.dtype for name, gradient in full_gradients(model).items() if gradient is not None}
    assert found == {"weight": F32, "short": BF16}


# -------------------------------------------------------------------- moves by to(dtype) and the like

MOVES: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda m: m.to(torch.float64), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "there and back": (lambda m: m.double().float(), torch.float32),
    "nothing": (lambda m: m.to(torch.empty(0).device), torch.float32),
}


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, move=MOVES, steps=[0, 1, 1, 0, 1])
def test_moves_of_the_whole_model(rank: Rank, front_end: FrontEnd, move: str, steps: int) -> None:
    """Before and after steps, parameters stay the same objects; messages and training go on in the new dtype."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    assert_trains_alike(model, reference, rank, steps=steps)
    function, dtype = MOVES[move]
    before = list(model.parameters())
    optimizers = [sgd(m, 0.05, momentum=0.9) for m in (model, reference)]
    assert function(model) is model
    function(reference)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_same_values(model, reference, **({"rtol": 1e-2, "atol": 1e-6} if dtype.itemsize < 4 else CLOSE))
    tolerance = CLOSE if dtype.itemsize >= 4 else {"rtol": 5e-2, "atol": 3e-3}

    def loss_at(step: int) -> LossOf:
        return lambda module, number: module(batch(number, step, 4, 6).to(dtype)).float().square().mean()

    with record() as seen:
        assert_trains_alike(model, reference, rank, loss_at, optimizers=optimizers, **tolerance)
    assert {c.dtype for c in seen} <= {dtype}


@on_ranks(3)
@each_value(front_end=[COMPOSABLE, ORIGINAL], frozen=[False, True])
def test_part_of_a_unit(rank: Rank, frozen: bool, front_end: FrontEnd) -> None:
    """Converting part of a unit gives it a second bucket; moved back, or both to one dtype, it keeps every value."""
    model, reference = sharded_with_reference(front_end, rank, build(Mlp, 6, 5, 4), [])
    for module in (unwrapped(model), reference):
        module.layers[0].bias.requires_grad_(not frozen)
        module.layers[1].double()
        module.layers[0].register_forward_hook(lambda _, args, out, m=module: out.to(m.layers[1].weight.dtype))
    assert_trains_alike(model, reference, rank)
    assert {b.shard_buffer.dtype for b in nested_units(model)[0].buckets} == {torch.float32, torch.float64}
    for module in (model, reference):
        module.float()
    assert_trains_alike(model, reference, rank)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_moves_elsewhere_keep_everything(rank: Rank) -> None:
    """A move to where the shards are keeps parameters and memory; one elsewhere takes values and gradients along."""
    model = COMPOSABLE.wrap(build(Stack, 1), rank)
    square_loss()(model, rank.rank).backward()
    before = [(id(p), p.to_local().data_ptr(), id(p.grad)) for p in model.parameters()]
    model.to(rank.device).float()
    assert [(id(p), p.to_local().data_ptr()) for p in model.parameters()] == [entry[:2] for entry in before]
    values = [(p.to_local().clone(), p.grad.to_local().clone()) for p in model.parameters()]
    model.cpu()
    for p, (value, gradient) in zip(model.parameters(), values, strict=True):
        assert p.device.type == p.grad.device.type == "cpu"
        assert_close(p.to_local(), value.cpu(), "value", rtol=0)
        assert_close(p.grad.to_local(), gradient.cpu(), "gradient", rtol=0)
    assert [len(unit.buckets) for unit in nested_units(model)] == [1, 1]
    assert_at_rest(model)
