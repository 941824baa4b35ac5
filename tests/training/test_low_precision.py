"""Mixed precision, against a hand-written run: in which dtypes units gather, compute, add up and reduce; moves."""

from __future__ import annotations

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
    both_backward,
    build,
    each_front_end,
    full_gradients,
    sgd,
    sharded_with_reference,
    unit_names,
    unwrapped,
)
from fullshard.comm import Collective, record
from fullshard.engine.ownership import nested_units
from models import LossOf, Mlp, Stack, batch, square_loss, tiny_units
from pairwise import each_value, pairwise
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
        landed = mean_over_ranks(terms).to(parameter.dtype)
        parameter.grad = landed if parameter.grad is None else parameter.grad + landed


def wire(collectives: list[Collective], kind: str) -> set[torch.dtype]:
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
            assert (wire(seen, "all_gather"), wire(seen, "all_reduce")) == (set(), reduced)
        else:
            assert (wire(seen, "all_gather"), wire(seen, "reduce_scatter")) == ({computed}, reduced)
        reference_gradients(master, precision, rank.world_size, *losses[:2])
        reference_gradients(master, precision, rank.world_size, losses[2])
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {F32}
        assert_same_gradients(model, master, rtol=0.0, atol=0.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, master)
    assert_at_rest(model)


@on_ranks(2)
@pairwise(front_end=FRONT_ENDS, param=[None, BF16, F64], reduce=[None, F32, BF16, F16])
def test_every_combination_to_the_bit(rank: Rank, front_end: FrontEnd, param: Any, reduce: Any) -> None:
    """Gradients and weights have the bits of a hand-written run; wires carry the dtypes chosen."""
    train_and_compare(rank, front_end, Precision(param, reduce))


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, strategy=STRATEGIES, precision=[LOW, Precision(BF16), Precision(None, BF16)])
def test_strategies_to_the_bit(rank: Rank, front_end: FrontEnd, strategy: str, precision: Precision) -> None:
    """However long parameters are kept, and without sharding them, the bits are the same."""
    train_and_compare(rank, front_end, precision, strategy=strategy)


@pytest.mark.cpu_only("other back ends round at every hop, and add in another order")
@on_ranks(4)
@each_value(front_end=FRONT_ENDS, precision=[LOW, Precision(BF16), Precision(F16)])
def test_sums_of_four_ranks(rank: Rank, front_end: FrontEnd, precision: Precision) -> None:
    """Sums of more than two half-precision terms are rounded once."""
    train_and_compare(rank, front_end, precision)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, then=["born in bf16", F32, F64])
def test_models_moved_to_other_dtypes(rank: Rank, then: Any, front_end: FrontEnd) -> None:
    """Born in bf16, moved before the first forward or after steps: the wire keeps its dtypes, shards have their own."""
    master = build(Stack, 2).to(BF16)
    model = wrap(front_end, rank, master, LOW)
    for dtype in [BF16] if then == "born in bf16" else [then, BF16, then]:
        for module in (model, master):
            module.zero_grad()
            module.to(dtype)
        with record() as seen:
            square_loss()(model, rank.rank).backward()
        assert (wire(seen, "all_gather"), wire(seen, "reduce_scatter")) == ({BF16}, {F32})
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
        reference_gradients(master, LOW, rank.world_size, square_loss())
        assert_same_gradients(model, master, rtol=0.0, atol=0.0)


@on_ranks(2)
@each_front_end
def test_computing_in_more_than_is_kept(rank: Rank, front_end: FrontEnd) -> None:
    """Parameters in bfloat16 can be computed and reduced in float32; a first forward of frozen ones changes nothing."""
    master = build(Stack, 2)
    for master_, precision in ((copy.deepcopy(master).bfloat16(), Precision(F32, F32)), (master, LOW)):
        model = wrap(front_end, rank, master_, precision)
        model.requires_grad_(False)
        square_loss(5)(model, rank.rank)
        model.requires_grad_(True)
        with record() as seen:
            square_loss()(model, rank.rank).backward()
        assert wire(seen, "reduce_scatter") == {F32}
        reference_gradients(master_, precision, rank.world_size, square_loss())
        assert_same_gradients(model, master_, rtol=0.0, atol=0.0)


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
        inputs = torch.full((4,), value), index == late_at
        if index < len(values) - 1:
            with front_end.no_sync(model):
                model(*inputs).float().sum().backward()
        else:
            model(*inputs).float().sum().backward()


def gradients_of(model: nn.Module) -> tuple[float | None, float | None]:
    """The one value of both gradients."""
    found = full_gradients(model)
    values = []
    for name in ("weight", "late"):
        gradient = found[name]
        assert gradient is None or (gradient.dtype is F32 and gradient.unique().numel() == 1)
        values.append(None if gradient is None or (name == "late" and not gradient.any()) else gradient[0].item())
    return values[0], values[1]


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


@on_ranks(4)
@each_value(front_end=FRONT_ENDS, precision=[Precision(F16), Precision(None, F16)])
def test_fp16_sums_do_not_overflow(rank: Rank, precision: Precision, front_end: FrontEnd) -> None:
    """fp16 ends at 65504: means of gradients whose sum is beyond it are right, for they are divided before."""
    model = wrap(front_end, rank, Scale(), precision, units=[])
    model(torch.full((4,), 120000.0 / rank.world_size)).float().sum().backward()
    assert gradients_of(model)[0] == torch.tensor(120000.0 / rank.world_size).half().item()


@on_ranks(2)
@pytest.mark.parametrize(("factor", "value", "expected"), [(1.0, 40000.0, float("inf")), (8.0, 60000.0, 15000.0)])
def test_fp16_divide_factor(rank: Rank, factor: float, value: float, expected: float) -> None:
    """A factor of one's own is split likewise; a sum that nobody divides does overflow."""
    model = wrap(COMPOSABLE, rank, Scale(), Precision(F16), units=[])
    model.set_gradient_divide_factor(factor)
    model(torch.full((4,), value)).float().sum().backward()
    assert gradients_of(model)[0] == torch.tensor(expected).half().item()


# -------------------------------------------------------------------- what is cast


class Kinds(nn.Module):
    """Parameters of several dtypes in one unit; those that are packed data are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.short = nn.Parameter(torch.randn(6, dtype=BF16))
        self.wide = nn.Parameter(torch.randn(6, dtype=F64), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(-3, 3, dtype=torch.int8), requires_grad=False)
        self.table = nn.Parameter(torch.arange(6).to(torch.uint16), requires_grad=False)
        self.packed = nn.Parameter(torch.randn(6).to(torch.float8_e4m3fn), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(6) % 2 == 0, requires_grad=False)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = ("weight", "short", "wide", "phase", "codes", "table", "packed", "mask")
        self.seen = {name: getattr(self, name).detach().clone() for name in names}
        x = x.to(self.weight.dtype)
        scale = self.codes.to(x.dtype) + self.packed.to(x.dtype) + self.wide.to(x.dtype) + self.mask
        return x @ self.weight * scale * self.phase.abs().to(x.dtype) + self.short


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, precision=[Precision(), LOW, LOW])
def test_parameters_of_many_dtypes_in_one_unit(rank: Rank, front_end: FrontEnd, precision: Precision) -> None:
    """Floats are cast; integers, complex numbers and one-byte floats travel as they are, and nothing is an error."""
    master = build(Kinds)
    model = wrap(front_end, rank, master, precision, units=[])
    with record() as seen:
        model(batch(rank.rank, 0, 4, 6).to(BF16)).float().square().mean().backward()
    for name, parameter in master.named_parameters():
        value = parameter.detach()
        if precision.param is not None and name in ("weight", "short", "wide"):
            value = value.to(precision.param)
        assert_equal(unwrapped(model).seen[name], value, name)
    assert wire(seen, "reduce_scatter") == ({F32} if precision.reduce else {F32, BF16})
    assert_same_values(model, master)
    found = {name: gradient.dtype for name, gradient in full_gradients(model).items() if gradient is not None}
    assert found == {"weight": F32, "short": BF16}


class Probe(nn.Module):
    """Notes the dtypes of its input, of what its caller made, and of its weight; calls what is inside."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(6, 6), inner
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append((x.dtype, None if made is None else made.dtype, self.linear.weight.dtype))
        y = self.linear(x.to(self.linear.weight.dtype))
        return y if self.inner is None else self.inner(y.to(x.dtype), torch.ones(6))


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, inner=["nothing", "fp16", "fp16 as it is", "fp16"], outer=["bf16", "nothing"])
def test_each_unit_casts_by_its_own_policy(rank: Rank, outer: str, inner: str, front_end: FrontEnd) -> None:
    """Also what was made in fp32 inside its parent; and only if it is to cast inputs."""
    choices = {
        "nothing": {},
        "bf16": front_end.precision(BF16),
        "fp16": front_end.precision(F16),
        "fp16 as it is": front_end.precision(F16, cast_inputs=False),
    }
    model = Probe(Probe())
    child = model.inner
    model.inner = front_end.wrap(child, rank, [], **choices[inner])
    model = front_end.wrap(model, rank, [], **choices[outer])
    model(batch(rank.rank, 0, 4, 6)).float().sum().backward()
    given = BF16 if outer == "bf16" else F32
    assert unwrapped(model).seen == [(given, None, given)]
    weight = F32 if inner == "nothing" else F16
    assert child.seen == [(F16, F16, F16) if inner == "fp16" else (given, F32, weight)]
    assert {p.grad.dtype for p in model.parameters()} == {F32}


# -------------------------------------------------------------------- moves by to(dtype) and the like

MOVES: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda m: m.to(torch.float64), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "there and back": (lambda m: m.double().float(), torch.float32),
    "nothing": (lambda m: m.to(torch.empty(0).device), torch.float32),
}
WHEN: dict[str, Callable[[Any, Rank], object]] = {
    "before the first forward": lambda model, rank: None,
    "after steps": lambda model, rank: None,
    "after a forward": lambda model, rank: square_loss(5)(model, rank.rank),
    "unsharded": lambda model, rank: getattr(model.blocks[0], "unshard", lambda: None)(),
}


def typed_loss(dtype: torch.dtype) -> Callable[[int], LossOf]:
    """The mean square of outputs for inputs in ``dtype``."""
    return lambda step: lambda model, rank: model(batch(rank, step, 4, 6).to(dtype)).float().square().mean()


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, move=MOVES, when=WHEN)
def test_moves_of_the_whole_model(rank: Rank, front_end: FrontEnd, move: str, when: str) -> None:
    """Parameters stay the same objects; gathers, reductions and training go on in the new dtype."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    optimizers = [sgd(m, 0.05, momentum=0.9) for m in (model, reference)]
    if when == "after steps":
        assert_trains_alike(model, reference, rank, steps=2, optimizers=optimizers)
        optimizers = [sgd(m, 0.05, momentum=0.9) for m in (model, reference)]
    WHEN[when](model, rank)
    function, dtype = MOVES[move]
    before = list(model.parameters()) if when != "unsharded" else []
    assert function(model) is model
    function(reference)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=bool(before)))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_same_values(model, reference, **({"rtol": 1e-2, "atol": 1e-6} if dtype.itemsize < 4 else CLOSE))
    tolerance = CLOSE if dtype.itemsize >= 4 else {"rtol": 5e-2, "atol": 3e-3}
    with record() as seen:
        assert_trains_alike(model, reference, rank, typed_loss(dtype), optimizers=optimizers, **tolerance)
    assert {c.dtype for c in seen} <= {dtype}


@on_ranks(2)
@each_front_end
def test_gradients_move_along(rank: Rank, front_end: FrontEnd) -> None:
    """Gradients that are there move with the parameters, further ones are added, and an old optimizer steps."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 1))
    optimizers = [sgd(m, 0.1) for m in (model, reference)]
    both_backward(model, reference, rank, square_loss())
    for module in (model, reference):
        module.double()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
    assert_same_gradients(model, reference)
    both_backward(model, reference, rank, typed_loss(torch.float64)(1))
    assert_same_gradients(model, reference)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_values(model, reference, **CLOSE)


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
