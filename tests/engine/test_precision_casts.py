"""Mixed precision at the boundary of a unit: what is cast in its inputs and outputs, also when it is recomputed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from compare import assert_equal, assert_models_equal
from fullshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from models import assert_at_rest, batch
from ranks import Rank, on_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)


class Pair(NamedTuple):
    """Two things."""

    left: Any
    right: Any


@dataclasses.dataclass
class Activations:
    """Whatever a model passes on, nested."""

    hidden: Any
    extra: Any = None
    ids: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be assigned to, with a field that its constructor does not take."""

    value: Any
    note: Any = dataclasses.field(default="note", init=False)


def floats() -> torch.Tensor:
    return torch.arange(6.0) / 7


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda t: t,
    "list": lambda t: [1, [t], None],
    "tuple": lambda t: (t, "text", (t,)),
    "named tuple": lambda t: Pair(Pair(t, 2), [t]),
    "dict": lambda t: {"a": t, "b": {"c": [t]}, 3: None},
    "dataclass": lambda t: Activations(t, Activations(t, {"deep": t}), 4),
    "frozen dataclass": lambda t: Frozen(Frozen([t])),
    "everything": lambda t: [{"p": Pair(Activations((t,), Frozen({"x": t})), t)}, None],
}


class Through(nn.Module):
    """Returns what it is given, with every float multiplied by a weight; remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 3.0))
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [args, kwargs]
        value = args[0] if args else kwargs["value"]
        return each(lambda t: t * self.weight.to(t.dtype) if t.is_floating_point() else t, value)


def each(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` of every tensor in it. Written for the containers above, apart from the engine's."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: each(function, item) for key, item in value.items()}
    if isinstance(value, Pair):
        return Pair(*(each(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(each(function, item) for item in value)
    if isinstance(value, Activations):
        return Activations(*(each(function, getattr(value, name)) for name in ("hidden", "extra", "ids")))
    return Frozen(each(function, value.value)) if isinstance(value, Frozen) else value


def tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    each(found.append, value)
    return found


def types(value: Any) -> list[type]:
    return (
        [type(value)] + [t for item in vars(value).values() for t in types(item)] if hasattr(value, "__dict__") else []
    )


# -------------------------------------------------------------------- containers


@on_ranks(2)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_casts_in_containers(rank: Rank, name: str, keyword: bool) -> None:
    """Floats in any container are cast on the way in and out, containers keep their types, gradients flow back."""
    model = Through()
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16, F32, F64))
    x = floats().requires_grad_()
    wrapped = CONTAINERS[name](x)
    count = len(tensors(wrapped))
    output = model(value=wrapped) if keyword else model(wrapped)
    inside = tensors(model.seen[1]["value"] if keyword else model.seen[0][0])
    assert {t.dtype for t in tensors(wrapped)} == {F32}  # the caller's container is untouched
    assert len(inside) == count and {t.dtype for t in inside} == {BF16}
    assert {t.dtype for t in tensors(output)} == {F64} and len(tensors(output)) == count
    assert types(output) == types(wrapped) and type(output) in (type(wrapped), torch.Tensor)
    for tensor in tensors(output):
        assert_equal(tensor.detach(), (floats().to(BF16) * 3).to(F64), "output")
    torch.stack(tensors(output)).sum().backward()
    assert_equal(x.grad, torch.full((6,), 3.0 * count), "gradient of the input")
    rounded = floats().to(BF16).float()
    assert_equal(model.weight.grad.full_tensor(), rounded * count, "gradient of the weight")
    assert_at_rest(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("name", CONTAINERS)
def test_nothing_to_cast(rank: Rank, name: str) -> None:
    """Integers, bools and complex numbers in any container are never cast; the very same container arrives."""
    model = Through()
    fully_shard(model, mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(BF16, F32, F32))
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.int32, BF16):
        given = CONTAINERS[name](torch.ones(6, dtype=dtype))
        output = model(given)
        assert model.seen[0][0] is given
        expected = F32 if dtype is BF16 else torch.complex64 if dtype is torch.complex64 else dtype
        assert {t.dtype for t in tensors(output)} == {expected}


@on_ranks(2)
def test_dataclass_of_activations_between_units(rank: Rank) -> None:
    """Units that pass dataclasses on gather and reduce in backward, as they do with plain tensors."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, given: Activations) -> Activations:
            assert given.hidden.dtype is BF16 and given.extra.value.dtype is BF16 and given.ids.dtype is torch.int64
            return Activations(torch.tanh(self.linear(given.hidden)) + given.extra.value, given.extra, given.ids)

    torch.manual_seed(0)
    model = nn.Sequential(Step(), Step(), Step())
    for step in model:
        fully_shard(step, mesh=rank.mesh, mp_policy=POLICY, reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh, mp_policy=replace_output(POLICY, F32))
    x = batch(0, 0, 4, 6)
    output = model(Activations(x, Frozen(x), torch.arange(4)))
    assert (output.hidden.dtype, output.extra.value.dtype, output.ids.dtype) == (F32, F32, torch.int64)
    output.hidden.square().mean().backward()
    assert all(p.grad is not None and p.grad.full_tensor().abs().sum() > 0 for p in model.parameters())
    assert_at_rest(model)


def replace_output(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    return dataclasses.replace(policy, output_dtype=dtype)


# -------------------------------------------------------------------- policies that differ


class Parent(nn.Module):
    """A child that gets what the parent got and something that the parent makes."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.own, self.child = nn.Parameter(torch.ones(6)), child
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        made_here = torch.ones(6)  # fp32, whatever the parent computes in
        return self.child([x, made_here])[0] * self.own


CHILDREN: dict[str, tuple[MixedPrecisionPolicy, list[torch.dtype]]] = {
    "nothing": (MixedPrecisionPolicy(), [BF16, F32]),
    "fp16": (MixedPrecisionPolicy(F16), [F16, F16]),
    "fp32": (MixedPrecisionPolicy(F32), [F32, F32]),
    "fp16, no input casts": (MixedPrecisionPolicy(F16, cast_forward_inputs=False), [BF16, F32]),
}


@on_ranks(2)
@pytest.mark.parametrize("child", CHILDREN)
def test_policies_of_child_and_parent(rank: Rank, child: str) -> None:
    """Each unit casts by its own policy, also what was made inside its parent, and only if it is to cast inputs."""
    policy, expected = CHILDREN[child]
    model = Parent(Through())
    fully_shard(model.child, mesh=rank.mesh, mp_policy=dataclasses.replace(policy, output_dtype=BF16))
    fully_shard(model, mesh=rank.mesh, mp_policy=replace_output(POLICY, F32))
    output = model(floats())
    assert model.seen is BF16
    assert [t.dtype for t in tensors(model.child.seen[0])] == expected
    output.sum().backward()
    assert model.child.weight.grad.dtype is F32
    assert_equal(model.own.grad.full_tensor(), (floats().to(BF16) * 3).float(), "gradient of the parent")


@on_ranks(2)
@pytest.mark.parametrize("whose", ["child", "parent", "nobody"])
def test_one_of_them_has_a_policy(rank: Rank, whose: str) -> None:
    """A policy of the child alone, or of the parent alone, concerns its own inputs only."""
    model = Parent(Through())
    casts = MixedPrecisionPolicy(F16)
    fully_shard(model.child, mesh=rank.mesh, mp_policy=casts if whose == "child" else MixedPrecisionPolicy())
    fully_shard(model, mesh=rank.mesh, mp_policy=casts if whose == "parent" else MixedPrecisionPolicy())
    model(floats())
    assert model.seen is (F16 if whose == "parent" else F32)
    found = [t.dtype for t in tensors(model.child.seen[0])]
    assert found == {"child": [F16, F16], "parent": [F16, F32], "nobody": [F32, F32]}[whose]


@on_ranks(2)
def test_inputs_left_alone(rank: Rank) -> None:
    """With ``cast_forward_inputs=False`` inputs arrive as they are, the same objects, beside cast weights."""
    model = Through()
    policy = MixedPrecisionPolicy(BF16, output_dtype=F16, cast_forward_inputs=False)
    fully_shard(model, mesh=rank.mesh, mp_policy=policy)
    x = floats()
    assert model(x).dtype is F16
    assert model.seen[0][0] is x


@on_ranks(2)
def test_registered_methods_cast_too(rank: Rank) -> None:
    """A method registered as a forward casts its inputs and outputs like ``forward`` itself."""

    class Encoder(Through):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is self.weight.dtype is BF16
            return x * self.weight

    model = Encoder()
    fully_shard(model, mesh=rank.mesh, mp_policy=replace_output(POLICY, F64))
    register_fsdp_forward_method(model, "encode")
    assert model.encode(floats()).dtype is F64


# -------------------------------------------------------------------- recomputation


class Recomputed(nn.Module):
    """A block that can recompute its body, and notes the dtypes that the body and its caller see."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.inside: bool | None = None  # recompute the body: None no, else use_reentrant
        self.log = log

    def forward(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        if self.inside is None:
            return self.body(x, side)
        return checkpoint(self.body, x, side, use_reentrant=self.inside)

    def body(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.log.append((x.dtype, side.dtype, self.up.weight.dtype, hidden.dtype, torch.is_autocast_enabled("cpu")))
        return self.down(torch.tanh(hidden)) + side


class Chain(nn.Module):
    """Blocks that can be recomputed as wholes; ``side`` is made in fp32 for each."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recomputed(log) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.around: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0 * self.head.bias.sum()  # so that the input of the first block requires a gradient
        for block in self.blocks:
            side = torch.ones(6)
            x = block(x, side) if self.around is None else checkpoint(block, x, side, use_reentrant=self.around)
        return self.head(x.to(self.head.weight.dtype))


WHERE: dict[str, Callable[[Chain, bool], None]] = {
    "inside": lambda model, reentrant: [setattr(block, "inside", reentrant) for block in model.blocks],
    "around": lambda model, reentrant: setattr(model, "around", reentrant),
    "both": lambda model, reentrant: [WHERE[where](model, reentrant) for where in ("inside", "around")],
}
PRECISIONS: dict[str, MixedPrecisionPolicy] = {
    "bf16": POLICY,
    "bf16-out-fp32": replace_output(POLICY, F32),
    "inputs-as-they-are": MixedPrecisionPolicy(cast_forward_inputs=False, output_dtype=F32),
    "none": MixedPrecisionPolicy(),
}


def run(
    rank: Rank,
    policy: MixedPrecisionPolicy,
    autocast: bool,
    change: Callable[[Chain], None] | None,
    after: bool = False,
) -> tuple[nn.Module, list[Any], list[torch.Tensor]]:
    """Three steps of a chain of units, with ``change`` made to the blocks before (or ``after``) sharding them."""
    torch.manual_seed(5)
    log: list[Any] = []
    model = Chain(log)
    if change is not None and not after:
        change(model)
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh, mp_policy=policy, reshard_after_forward=True)
    if change is not None and after:
        change(model)
    fully_shard(model, mesh=rank.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        context = torch.autocast("cpu", dtype=BF16) if autocast else contextlib.nullcontext()
        with context:
            loss = model(batch(rank.rank, step, 4, 6)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if step < 2:
            optimizer.step()
    assert_at_rest(model)
    return model, log, losses


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "autocast"),
    [("bf16", False), ("bf16-out-fp32", False), ("bf16-out-fp32", True), ("inputs-as-they-are", True), ("none", True)],
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("where", WHERE)
def test_recomputation(rank: Rank, where: str, reentrant: bool, precision: str, autocast: bool) -> None:
    """Recomputed inside or around the unit, layers see the dtypes of the forward, and all bits are the same."""
    policy = PRECISIONS[precision]
    model, log, losses = run(rank, policy, autocast, lambda m: WHERE[where](m, reentrant))
    expected, once, expected_losses = run(rank, policy, autocast, None)
    assert set(log) == set(once) and len(log) >= 2 * len(once)
    assert_equal(losses, expected_losses, "losses")
    assert_models_equal(model, full_copy(expected), grads=True)


def wrap_blocks(model: Chain, impl: CheckpointImpl) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)


FORMS: dict[str, tuple[Callable[[Chain], Any], bool]] = {
    "wrapper, then sharded": (lambda m: wrap_blocks(m, CheckpointImpl.NO_REENTRANT), False),
    "sharded, then wrapper": (lambda m: wrap_blocks(m, CheckpointImpl.NO_REENTRANT), True),
    "reentrant wrapper, then sharded": (lambda m: wrap_blocks(m, CheckpointImpl.REENTRANT), False),
    "sharded, then reentrant wrapper": (lambda m: wrap_blocks(m, CheckpointImpl.REENTRANT), True),
    "composable, then sharded": (lambda m: [composable_checkpoint(block) for block in m.blocks], False),
    "sharded, then composable": (lambda m: [composable_checkpoint(block) for block in m.blocks], True),
}


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "bf16-out-fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_checkpointing(rank: Rank, form: str, precision: str) -> None:
    """PyTorch's checkpoint wrapper and its composable form work on either side of the unit."""
    change, after = FORMS[form]
    model, log, losses = run(rank, PRECISIONS[precision], False, change, after)
    expected, once, expected_losses = run(rank, PRECISIONS[precision], False, None)
    assert set(log) == set(once) and len(log) >= 2 * len(once)
    assert_equal(losses, expected_losses, "losses")
    assert_models_equal(model, full_copy(expected), grads=True)


def full_copy(model: nn.Module) -> nn.Module:
    """An unsharded module with the full parameters and gradients of ``model``."""
    plain = Chain([])
    for parameter, ours in zip(plain.parameters(), model.parameters(), strict=True):
        parameter.data, parameter.grad = ours.detach().full_tensor(), ours.grad.full_tensor()
    return plain


@on_ranks(2)
@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
def test_autocast_around_units(rank: Rank, enabled: bool) -> None:
    """Without a policy autocast alone decides in which dtypes units compute, as it does for a plain model."""
    torch.manual_seed(6)
    log: list[Any] = []
    model = Chain(log)
    reference = copy.deepcopy(model)
    reference_log = reference.blocks[0].log = reference.blocks[1].log = reference.blocks[2].log = []
    for block in (*model.blocks, model):
        fully_shard(block, mesh=rank.mesh)
    x = batch(0, 0, 4, 6)
    for module in (model, reference):
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            output = module(x)
        output.float().sum().backward()
    assert log == reference_log
    assert_models_equal(model, reference, grads=True, rtol=1e-6, atol=1e-7)
