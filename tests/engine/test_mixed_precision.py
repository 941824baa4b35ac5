"""Mixed precision: in which dtypes a unit gathers, computes, adds up, reduces and lands, against a hand-written run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_equal, assert_models_equal
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import Collective, record
from models import Language, LossOf, Mlp, Stack, assert_at_rest, batch, shard_blocks, tokens
from ranks import Rank, on_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FP32_REDUCE = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
Grads = list["torch.Tensor | None"]


# -------------------------------------------------------------------- the hand-written reference


def casting_copy(master: nn.Module, policy: MixedPrecisionPolicy, units: Sequence[str]) -> nn.Module:
    """A plain copy with weights cast, and hooks that cast the inputs of ``units`` and the output of the whole."""
    model = copy.deepcopy(master)
    for parameter in model.parameters():
        parameter.grad = None
        if policy.param_dtype is not None:
            parameter.data = parameter.data.to(policy.param_dtype)
    for name in units:
        module = model.get_submodule(name)
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            module.register_forward_pre_hook(lambda _, args: cast(policy.param_dtype, args))
        if policy.output_dtype is not None and not name:  # what blocks return goes into layers of the root
            module.register_forward_hook(lambda _, args, output: cast(policy.output_dtype, output))
    return model


def cast(dtype: torch.dtype | None, value: Any) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return torch.utils._pytree.tree_map(one, value)


def local_gradients(
    master: nn.Module, policy: MixedPrecisionPolicy, units: Sequence[str], losses: Sequence[Callable[[nn.Module], Any]]
) -> Grads:
    """One rank's gradients, added up over microbatches in the reduce dtype."""
    model = casting_copy(master, policy, units)
    totals: Grads = [None for _ in model.parameters()]
    for loss in losses:
        model.zero_grad()
        loss(model).backward()
        for index, parameter in enumerate(model.parameters()):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to(policy.reduce_dtype or parameter.dtype)
            before = totals[index]
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


def reference_gradients(
    master: nn.Module,
    policy: MixedPrecisionPolicy,
    units: Sequence[str],
    world_size: int,
    loss_of: LossOf,
    *more: LossOf,
) -> None:
    """Add to ``master.grad`` what one synced backward after unsynced ones has to give."""
    losses = [loss_of, *more]
    by_rank = [
        local_gradients(master, policy, units, [lambda m, f=f, r=rank: f(m, r) for f in losses])
        for rank in range(world_size)
    ]
    for parameter, gradients in zip(master.parameters(), zip(*by_rank, strict=True), strict=True):
        if all(gradient is None for gradient in gradients):
            continue
        like = next(gradient for gradient in gradients if gradient is not None)
        terms = [torch.zeros_like(like) if gradient is None else gradient for gradient in gradients]
        landed = mean_over_ranks(terms).to(parameter.dtype)
        parameter.grad = landed if parameter.grad is None else parameter.grad + landed


def unit_names(model: nn.Module) -> list[str]:
    return [*(f"blocks.{index}" for index in range(len(model.blocks))), ""]


def loss_at(step: int = 0) -> LossOf:
    return lambda model, rank: model(batch(rank, step, 4, 6)).float().square().mean()


def wire(collectives: list[Collective], kind: str) -> set[torch.dtype]:
    return {c.dtype for c in collectives if c.kind == kind}


# -------------------------------------------------------------------- every combination


def train_and_compare(rank: Rank, policy: MixedPrecisionPolicy, steps: int = 2) -> None:
    """Train with accumulation (two microbatches, then one) and require the bits of the reference."""
    torch.manual_seed(0)
    master = Stack(2)
    model, units = copy.deepcopy(master), unit_names(master)
    for name in units:
        own = replace(policy, output_dtype=None) if name else policy
        fully_shard(model.get_submodule(name), mesh=rank.mesh, mp_policy=own)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (model, master)]
    for step in range(steps):
        with record() as seen:
            model.set_requires_gradient_sync(False)
            loss_at(3 * step)(model, rank.rank).backward()
            model.set_requires_gradient_sync(True)
            loss_at(3 * step + 1)(model, rank.rank).backward()
            loss_at(3 * step + 2)(model, rank.rank).backward()
        computed = policy.param_dtype or F32
        assert wire(seen, "all_gather") == ({computed} if rank.world_size > 1 else set())
        assert wire(seen, "reduce_scatter") == ({policy.reduce_dtype or computed} if rank.world_size > 1 else set())
        reference_gradients(master, policy, units, rank.world_size, loss_at(3 * step), loss_at(3 * step + 1))
        reference_gradients(master, policy, units, rank.world_size, loss_at(3 * step + 2))
        assert_models_equal(model, master, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, master)
    assert_at_rest(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("reduce", [None, F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("param", [None, F32, BF16, F16, F64], ids=str)
def test_every_combination(rank: Rank, param: torch.dtype | None, reduce: torch.dtype | None) -> None:
    """Losses, gradients and weights have the bits of a hand-written run; wires carry the dtypes chosen."""
    for output in (None, F32, BF16, F64):
        train_and_compare(rank, MixedPrecisionPolicy(param, reduce, output), steps=1 if output else 2)


@pytest.mark.cpu_only("other back ends round at every hop, and add in another order")
@on_ranks(4)
@pytest.mark.parametrize(
    "policy",
    [FP32_REDUCE, MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(F16), MixedPrecisionPolicy(None, BF16, F16)],
    ids=["bf16-fp32", "bf16", "fp16", "fp32-bf16"],
)
def test_four_ranks(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """Sums of more than two half-precision terms are rounded once."""
    train_and_compare(rank, policy)


@on_ranks(2)
def test_dtypes_of_everything(rank: Rank) -> None:
    """Every unit returns ``output_dtype``; weights at rest, gradients and optimizer state stay in fp32."""
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        # The hooks of the module are inside the unit: they see its input cast, and its output before the cast.
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        fully_shard(layer, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16, F32, F64))
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(F16, F32, F32))
    optimizer = torch.optim.Adam(model.parameters())
    output = model(batch(rank.rank, 0, 4, 6))
    assert (output.dtype, seen) == (F32, [F16, BF16, BF16, BF16, BF16, F64])
    output.sum().backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    everything = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
    assert {tensor.dtype for tensor in everything} == {F32}
    with torch.no_grad():
        assert (model(batch(rank.rank, 0, 4, 6)).dtype, seen[6:]) == (F32, seen[:6])


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_bytes_on_the_wire(rank: Rank, dtype: torch.dtype) -> None:
    """Gathers take the bytes of ``param_dtype``, reductions those of ``reduce_dtype`` (plus presence numbers)."""
    model = nn.Linear(128, 128)
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(dtype, F32))
    with record() as seen:
        model(batch(rank.rank, 0, 4, 128)).sum().backward()
    elements, presence = 128 * 128 + 128, 16 // F32.itemsize  # two numbers, padded to 16 bytes
    n = rank.world_size
    gathered = sum(c.nbytes for c in seen if c.kind == "all_gather")
    reduced = sum(c.nbytes for c in seen if c.kind == "reduce_scatter")
    assert gathered == elements * dtype.itemsize * (n - 1) // n
    assert reduced == (elements + n * presence) * F32.itemsize * (n - 1) // n


# -------------------------------------------------------------------- adding up


class Scale(nn.Module):
    """One weight whose gradient is the sum of the input; ``late`` is a second one that only some calls use."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))
        self.late = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: torch.Tensor, with_late: bool = False) -> torch.Tensor:
        return self.weight * x + self.late * x if with_late else self.weight * x


def accumulate(model: nn.Module, values: Sequence[float], **late_at: int) -> None:
    """One microbatch per value, all but the last without sync; the gradient of each is the value."""
    for index, value in enumerate(values):
        model.set_requires_gradient_sync(index == len(values) - 1)
        model(torch.full((4,), value), index == late_at.get("late_at")).float().sum().backward()


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(BF16, F32), 259.0),
        (MixedPrecisionPolicy(BF16, F64), 259.0),
        (MixedPrecisionPolicy(BF16), 256.0),
        (MixedPrecisionPolicy(None, BF16), 256.0),
        (MixedPrecisionPolicy(), 259.0),
    ],
    ids=["bf16-fp32", "bf16-fp64", "bf16-None", "fp32-bf16", "fp32"],
)
def test_microbatches_add_up_in_the_reduce_dtype(rank: Rank, policy: MixedPrecisionPolicy, expected: float) -> None:
    """256 + 1 + 1 + 1 is 259, but in bf16 it stays 256: what adds up has the reduce dtype from the first on."""
    model = fully_shard(Scale(), mesh=rank.mesh, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.full((4,), 256.0)).float().sum().backward()
    dtype = policy.reduce_dtype or policy.param_dtype or F32
    pending = model.get_pending_gradients()
    assert {entry.unreduced.dtype for entry in pending.values()} == {dtype}
    accumulate(model, [1.0, 1.0, 1.0])
    assert_equal(model.weight.grad.full_tensor(), torch.full((4,), expected), "gradient")
    assert model.late.grad is None


class Calls(nn.Module):
    """Calls a unit once per value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, *values: float) -> torch.Tensor:
        return sum((self.scale(torch.full((4,), value)).float() for value in values), torch.zeros(4)).sum()


@on_ranks(1, 2)
@pytest.mark.parametrize("setting", [True, None], ids=["reshard", "default"])
def test_calls_before_one_backward_add_up_in_the_reduce_dtype(rank: Rank, setting: bool | None) -> None:
    """256 + 1 is 257 in every step, of two calls in one forward and of two forwards; in bf16 it would stay 256."""
    model = Calls()
    for module in (model.scale, model):
        fully_shard(module, mesh=rank.mesh, mp_policy=FP32_REDUCE, reshard_after_forward=setting)
    losses = (lambda: model(256.0, 1.0), lambda: model(256.0) + model(1.0), lambda: model(1.0, 256.0))
    for loss in losses:
        model.zero_grad()
        loss().backward()
        assert_equal(model.scale.weight.grad.full_tensor(), torch.full((4,), 257.0), "gradient")


@on_ranks(2)
def test_sharded_microbatches_add_up_in_the_shards_dtype(rank: Rank) -> None:
    """Reduced every time, gradients add up in the dtype of the shards, whatever they were reduced in."""
    model = fully_shard(Scale(), mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16, BF16))
    for value in (256.0, 1.0, 1.0, 1.0):
        model(torch.full((4,), value)).float().sum().backward()
    assert_equal(model.weight.grad.full_tensor(), torch.full((4,), 259.0), "gradient")


@on_ranks(2)
@pytest.mark.parametrize("reduce", [None, F32], ids=str)
def test_parameter_first_used_in_the_last_microbatch(rank: Rank, reduce: torch.dtype | None) -> None:
    """A fresh gradient beside accumulated ones is no error on any rank, also if one rank alone has it."""
    for late_rank in (None, 1):
        model = fully_shard(Scale(), mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16, reduce))
        use = late_rank is None or late_rank == rank.rank
        accumulate(model, [256.0, 1.0, 1.0], late_at=2 if use else -1)
        expected = 258.0 if reduce is F32 else 256.0
        assert_equal(model.weight.grad.full_tensor(), torch.full((4,), expected), "weight")
        late = 1.0 if late_rank is None else 0.5
        assert_equal(model.late.grad.full_tensor(), torch.full((4,), late), "late")


@on_ranks(2)
@pytest.mark.parametrize("first", ["frozen", "trainable"])
def test_frozen_and_unfrozen_between_microbatches(rank: Rank, first: str) -> None:
    """Whichever way round parameters are frozen, and whenever, their gradients keep the reduce dtype."""
    model = fully_shard(Scale(), mesh=rank.mesh, mp_policy=FP32_REDUCE)
    model.late.requires_grad_(first == "trainable")
    with record() as seen:
        model(torch.full((4,), 3.0), True).float().sum().backward()
        model.late.requires_grad_(first == "frozen")
        accumulate(model, [256.0, 1.0, 1.0], late_at=2)
    assert wire(seen, "reduce_scatter") == {F32}
    assert_equal(model.weight.grad.full_tensor(), torch.full((4,), 261.0), "weight")
    assert_equal(model.late.grad.full_tensor(), torch.full((4,), 1.0 if first == "frozen" else 3.0), "late")
    assert model.late.grad.dtype is F32


@on_ranks(1, 2)
def test_all_frozen_at_first(rank: Rank) -> None:
    """A unit that is frozen as a whole at its first forward reduces in the right dtype once it is not."""
    master = Stack(2)
    model = shard_blocks(copy.deepcopy(master), rank, mp_policy=FP32_REDUCE)
    model.blocks[0].requires_grad_(False)
    loss_at(0)(model, rank.rank).backward()
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    with record() as seen:
        loss_at(1)(model, rank.rank).backward()
    assert wire(seen, "reduce_scatter") <= {F32}
    reference_gradients(master, FP32_REDUCE, unit_names(master), rank.world_size, loss_at(1))
    assert_models_equal(model, master, grads=True)


# -------------------------------------------------------------------- fp16


@on_ranks(2, 4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(F16), MixedPrecisionPolicy(None, F16)], ids=["all", "reduce"])
def test_fp16_sums_do_not_overflow(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """fp16 ends at 65504: means of gradients whose sum is beyond it are right, for they are divided before."""
    model = fully_shard(Scale(), mesh=rank.mesh, mp_policy=policy)
    model(torch.full((4,), 120000.0 / rank.world_size)).float().sum().backward()
    expected = torch.full((4,), 120000.0 / rank.world_size).half().float()
    assert_equal(model.weight.grad.full_tensor(), expected, "gradient")


@on_ranks(2)
@pytest.mark.parametrize(("factor", "value", "expected"), [(1.0, 40000.0, float("inf")), (8.0, 60000.0, 15000.0)])
def test_fp16_divide_factor(rank: Rank, factor: float, value: float, expected: float) -> None:
    """A factor of one's own is split likewise; a sum that nobody divides does overflow."""
    model = fully_shard(Scale(), mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(F16))
    model.set_gradient_divide_factor(factor)
    model(torch.full((4,), value)).float().sum().backward()
    assert_equal(model.weight.grad.full_tensor(), torch.full((4,), expected).half().float(), "gradient")


# -------------------------------------------------------------------- models in other dtypes


@on_ranks(1, 2)
@pytest.mark.parametrize("then", [None, F32, F64], ids=str)
def test_model_initialised_in_bf16(rank: Rank, then: torch.dtype | None) -> None:
    """Born in bf16, moved or not before the first forward: gradients reduce as given and land in the weights' dtype."""
    master = Stack(2).to(BF16)
    model = shard_blocks(copy.deepcopy(master), rank, mp_policy=FP32_REDUCE)
    if then is not None:
        model.to(then)
        master.to(then)
    with record() as seen:
        loss_at(0)(model, rank.rank).backward()
    assert wire(seen, "all_gather") <= {BF16} and wire(seen, "reduce_scatter") <= {F32}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {then or BF16}
    reference_gradients(master, FP32_REDUCE, unit_names(master), rank.world_size, loss_at(0))
    assert_models_equal(model, master, grads=True)


@on_ranks(2)
def test_move_after_steps(rank: Rank) -> None:
    """``to(dtype)`` after some steps takes effect with the next forward; what was chosen for the wire stays."""
    master = Stack(2)
    model = shard_blocks(copy.deepcopy(master), rank, mp_policy=FP32_REDUCE)
    for dtype in (F32, BF16, F64):
        for module in (model, master):
            module.zero_grad()
            module.to(dtype)
        with record() as seen:
            loss_at(0)(model, rank.rank).backward()
        assert (wire(seen, "all_gather"), wire(seen, "reduce_scatter")) == ({BF16}, {F32})
        reference_gradients(master, FP32_REDUCE, unit_names(master), rank.world_size, loss_at(0))
        assert_models_equal(model, master, grads=True)


class Odd(nn.Module):
    """Parameters of several dtypes in one unit; those that are packed data are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.short = nn.Parameter(torch.randn(6, dtype=BF16))
        self.wide = nn.Parameter(torch.randn(6, dtype=F64), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(-3, 3, dtype=torch.int8), requires_grad=False)
        self.packed = nn.Parameter(torch.randn(6).to(torch.float8_e4m3fn), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(6) % 2 == 0, requires_grad=False)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        x = x.to(self.weight.dtype)
        scale = self.codes.to(x.dtype) + self.packed.to(x.dtype) + self.wide.to(x.dtype) + self.mask
        return x @ self.weight * scale + self.short


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), FP32_REDUCE], ids=["none", "bf16-fp32"])
def test_parameters_of_many_dtypes_in_one_unit(rank: Rank, policy: MixedPrecisionPolicy) -> None:
    """Floats are cast, integers and one-byte floats travel as they are, and nothing is an error."""
    torch.manual_seed(1)
    master = Odd()
    dtypes = {name: parameter.dtype for name, parameter in master.named_parameters()}
    model = fully_shard(copy.deepcopy(master), mesh=rank.mesh, mp_policy=policy)
    with record() as seen:
        loss = model(batch(rank.rank, 0, 4, 6).to(BF16)).float().square().mean()
        loss.backward()
    for name, parameter in master.named_parameters():
        value = parameter.detach()
        if policy.param_dtype is not None and name in ("weight", "short", "wide"):
            value = value.to(policy.param_dtype)
        assert_equal(model.seen[name], value, name)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    reduced = {F32} if policy.reduce_dtype else {F32, BF16}
    assert wire(seen, "reduce_scatter") == (reduced if rank.world_size > 1 else set())
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name: grad.dtype for name, grad in grads.items()} == {"weight": F32, "short": BF16}


@on_ranks(2)
@pytest.mark.parametrize("own_unit", [False, True], ids=["buffers-cast", "own-unit"])
def test_batch_norm(rank: Rank, own_unit: bool) -> None:
    """Buffers are never cast: batch norm trains in a bf16 unit once users cast them, or in fp32 as its own unit."""
    torch.manual_seed(2)
    master = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if not own_unit:
        master[1].running_mean, master[1].running_var = torch.zeros(6, dtype=BF16), torch.ones(6, dtype=BF16)
    model = copy.deepcopy(master)
    if own_unit:
        fully_shard(model[1], mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(F32, output_dtype=BF16))
    fully_shard(model, mesh=rank.mesh, mp_policy=FP32_REDUCE)
    expected = casting_copy(master, MixedPrecisionPolicy(BF16), [""])
    if own_unit:
        expected[1].weight.data, expected[1].bias.data = master[1].weight.data.clone(), master[1].bias.data.clone()
        expected[1].register_forward_pre_hook(lambda _, args: cast(F32, args))
        expected[1].register_forward_hook(lambda _, args, output: output.to(BF16))
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
@pytest.mark.parametrize("output", [None, F32], ids=str)
def test_token_ids_are_never_cast(rank: Rank, output: torch.dtype | None) -> None:
    """A language model takes integer ids; the uses of its tied weight add up in the reduce dtype too."""
    policy = MixedPrecisionPolicy(BF16, F32, output)
    torch.manual_seed(3)
    untied = Language()
    model = copy.deepcopy(untied)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    for name in unit_names(model):
        own = policy if not name else FP32_REDUCE
        fully_shard(model.get_submodule(name), mesh=rank.mesh, mp_policy=own)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        ids = tokens(number, 0, 4, 5)
        logits = module(ids)
        assert logits.dtype is (output or BF16)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    loss_of(model, rank.rank).backward()
    reference_gradients(untied, policy, unit_names(model), rank.world_size, loss_of)
    untied.embedding.weight.grad += untied.head.weight.grad
    untied.head.weight = untied.embedding.weight
    assert_models_equal(model, untied, grads=True, rtol=1e-6, atol=1e-7)


# -------------------------------------------------------------------- compiled


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("order", ["shard-then-compile", "compile-then-shard", "whole-model"])
def test_compiled(rank: Rank, order: str) -> None:
    """Units compiled with aot_eager, before or after sharding, compute and reduce in the dtypes chosen."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    master = Mlp(6, 8, 6)
    model = copy.deepcopy(master)
    for layer in model.layers:
        if order == "compile-then-shard":
            layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=rank.mesh, mp_policy=FP32_REDUCE)
        if order == "shard-then-compile":
            layer.compile(backend="aot_eager")
    fully_shard(model, mesh=rank.mesh, mp_policy=FP32_REDUCE)
    if order == "whole-model":
        model.compile(backend="aot_eager")
    units = ["layers.0", "layers.1", ""]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, master)]
    for step in range(3):
        with record() as seen:
            loss_at(step)(model, rank.rank).backward()
        assert (wire(seen, "all_gather"), wire(seen, "reduce_scatter")) == ({BF16}, {F32})
        reference_gradients(master, FP32_REDUCE, units, rank.world_size, loss_at(step))
        assert_models_equal(model, master, grads=True, rtol=1e-2, atol=1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch._dynamo.reset()
