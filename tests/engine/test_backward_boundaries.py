"""Where a unit's backward begins and ends, whatever its inputs and outputs are and however often it is called."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils._pytree import register_pytree_node

from compare import assert_close, assert_models_equal
from fullshard import fully_shard
from fullshard.comm import record
from models import (
    Block,
    LossOf,
    Stack,
    assert_at_rest,
    batch,
    reference_backward,
    shard_blocks,
    square_loss,
    with_reference,
)
from ranks import Rank, on_ranks
from ranks.device import EMULATED

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


def compare_steps(model: nn.Module, reference: nn.Module, rank: Rank, loss_at: Callable[[int], LossOf]) -> None:
    """Three SGD steps on both, with gradients and rest compared after every backward."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        loss_of = loss_at(step)
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def shard_children(model: nn.Module, rank: Rank, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Every child its own unit, then the root; and an unsharded copy."""
    reference = copy.deepcopy(model)
    for child in model.children():
        fully_shard(child, mesh=rank.mesh, **settings)
    return fully_shard(model, mesh=rank.mesh, **settings), reference


# ---------------------------------------------------------------- several calls


class Calls(nn.Module):
    """Calls its blocks 0 and 1 in the ``order`` given."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for letter in self.order:
            x = self.blocks[int(letter)](x)
        return x


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("order", ["010", "0001", "01101", "100"])
def test_module_called_several_times(rank: Rank, order: str, setting: bool) -> None:
    """A unit that is called several times in one forward, in a row or not, reduces the sum of its gradients once."""
    model, reference = with_reference(Calls(order), rank, reshard_after_forward=setting)
    compare_steps(model, reference, rank, square_loss)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert sorted(c.unit for c in seen if c.kind == "reduce_scatter") == ["", "blocks.0", "blocks.1"]


class Shared(nn.Module):
    """Two branches through one block, joined at the end; the second call's output may be left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(6), nn.Linear(6, 6)
        self.joined = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.block(x), self.block(torch.tanh(x + 1))
        return self.last(left + right if self.joined else left)


@on_ranks(2)
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("grad_inputs", [True, False])
def test_parallel_calls(rank: Rank, joined: bool, grad_inputs: bool) -> None:
    """Two independent calls of one unit work, with and without inputs that require gradients or a used output."""
    model, reference = shard_children(Shared(), rank)
    model.joined = reference.joined = joined

    def loss_at(step: int) -> LossOf:
        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            return module(batch(number, step, 4, 6).requires_grad_(grad_inputs)).square().mean()

        return loss_of

    compare_steps(model, reference, rank, loss_at)


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, None, False])
@pytest.mark.parametrize("order", ["FFbB", "FFBb", "FFs"])
def test_two_forwards(rank: Rank, order: str, setting: Any) -> None:
    """Two forwards with their backwards in either order, or with one backward of the sum, give equal gradients."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    for _ in range(2):
        losses = [square_loss(step)(model, rank.rank) for step in range(2)]
        if order.endswith("s"):
            (losses[0] + losses[1]).backward()
        else:
            for loss in losses if order == "FFBb" else losses[::-1]:
                loss.backward()
        for step in range(2):
            reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
def test_block_alone_after_a_step_of_the_root(rank: Rank) -> None:
    """A nested unit can be run forward and backward by itself, before and after steps of the whole model."""
    model, reference = with_reference(Stack(), rank)

    def block_loss(module: nn.Module, number: int) -> torch.Tensor:
        return module.blocks[1](batch(number, 7, 4, 6)).square().mean()

    for loss_of in (block_loss, square_loss(0), block_loss, block_loss, square_loss(1)):
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, None, False])
def test_partial_forwards_twice(rank: Rank, setting: Any) -> None:
    """Forwards of the root that run a part of the units, then another, then all of them, neither hang nor err."""
    model, reference = with_reference(Stack(), rank, reshard_after_forward=setting)
    parts: list[Any] = [[0], [0, 1], [2], None, [1, 0], [], None]
    for step, run in enumerate(parts):

        def loss_of(module: nn.Module, number: int, step: int = step, run: Any = run) -> torch.Tensor:
            chosen, rejected = (module(batch(number, step + k, 4, 6), run=run) for k in (0, 100))
            return (chosen - rejected).square().mean()

        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert_models_equal(model, reference, grads=True, **CLOSE)
        assert_at_rest(model)


@on_ranks(2)
def test_gather_by_hand_between_forwards(rank: Rank) -> None:
    """Forward, ``unshard`` and ``reshard`` by hand, another forward, then one backward give the right gradients."""
    model, reference = with_reference(Stack(), rank)
    first = square_loss(0)(model, rank.rank)
    for block in model.blocks:
        block.unshard()
        block.reshard()
    second = square_loss(1)(model, rank.rank)
    (first + second).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)


# ---------------------------------------------------------------- outputs and inputs

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Bundle:
    left: torch.Tensor
    right: Any = None
    label: str = "bundle"


@dataclass(frozen=True)
class FrozenBundle:
    left: torch.Tensor
    right: Any = None
    computed: list[int] = field(default_factory=list, init=False)


class Registered:
    """A class that torch's pytree knows, and nobody else."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.items = [left, right]


register_pytree_node(Registered, lambda r: (r.items, None), lambda items, _: Registered(*items))


class Plain:
    """A class that nobody knows."""

    __slots__ = ("__dict__", "left")

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right, self.itself = left, Bundle(right), self


PACKINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, None, b, 3),
    "namedtuple": lambda a, b: Pair(a, b),
    "dict": lambda a, b: {"a": a, "b": b, "text": "text"},
    "ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "dataclass": lambda a, b: Bundle(a, b),
    "frozen dataclass": lambda a, b: FrozenBundle(a, b),
    "nested": lambda a, b: {"deep": [(Bundle(a, {"b": FrozenBundle(b)}),)]},
    "deque": lambda a, b: deque([a, b]),
    "registered": lambda a, b: Registered(a, b),
    "plain": lambda a, b: Plain(a, b),
}


def unpack(value: Any) -> list[torch.Tensor]:
    """The tensors in any of the packings, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Bundle | FrozenBundle | Plain):
        return unpack([value.left, value.right])
    if isinstance(value, Registered):
        return unpack(value.items)
    if isinstance(value, dict):
        return unpack(list(value.values()))
    if isinstance(value, list | tuple | deque):
        return [tensor for item in value for tensor in unpack(item)]
    return []


class Packing(nn.Module):
    """Takes and returns two tensors in the containers of one packing."""

    def __init__(self, packing: str) -> None:
        super().__init__()
        self.left, self.right, self.packing = nn.Linear(6, 6), nn.Linear(6, 6), packing

    def forward(self, packed: Any, *, scale: Any = None) -> Any:
        left, right = unpack(packed)
        if scale is not None:
            right = right * unpack(scale)[0]
        return PACKINGS[self.packing](torch.tanh(self.left(left)), torch.tanh(self.right(right)))


class Packed(nn.Module):
    """A chain of modules that hand each other containers, positionally or by keyword."""

    def __init__(self, packing: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle, self.final = Packing(packing), Packing(packing)
        self.packing = packing

    def forward(self, x: torch.Tensor, by_keyword: bool = False) -> Any:
        x = self.first(x)
        packed = PACKINGS[self.packing](x, x + 1)
        packed = self.middle(packed=packed, scale=[{"x": x}]) if by_keyword else self.middle(packed)
        assert type(packed) is type(PACKINGS[self.packing](x, x))
        return self.final(packed)


@on_ranks(2)
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_containers(rank: Rank, packing: str, by_keyword: bool) -> None:
    """Inputs and outputs may sit in any container, at any depth, positional or keyword."""
    model, reference = shard_children(Packed(packing), rank)

    def loss_at(step: int) -> LossOf:
        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            left, right = unpack(module(batch(number, step, 4, 6), by_keyword))
            return (left * right).square().mean()

        return loss_of

    compare_steps(model, reference, rank, loss_at)
    with record() as seen:
        loss_at(0)(model, rank.rank).backward()
    reduced = [c.unit for c in seen if c.kind == "reduce_scatter"]
    if packing == "plain":  # inputs of such classes cannot be watched: the end of the backward pass ends the unit's
        assert sorted(reduced) == ["final", "first", "middle"]
    else:
        assert reduced == ["final", "middle", "first"]


@on_ranks(2)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("setting", [True, False])
def test_outputs_of_the_root(rank: Rank, packing: str, setting: bool) -> None:
    """The root is one unit, whose own outputs have to be found: its parameters are unsharded for their backward."""
    model = Packing(packing)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh, reshard_after_forward=setting)

    def loss_at(step: int) -> LossOf:
        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            x = batch(number, step, 4, 6)
            left, right = unpack(module([x, x]))
            return (left * right).square().mean()

        return loss_of

    compare_steps(model, reference, rank, loss_at)


class Identity(nn.Module):
    """Notes whether its query is its key, and the label of its bundle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.same: list[bool] = []

    def forward(self, query: torch.Tensor, key: torch.Tensor, bundle: Bundle) -> torch.Tensor:
        self.same.append(query is key and bundle.left is query)
        assert bundle.label == "label"
        return self.linear(query) + key


@on_ranks(2)
def test_same_tensor_stays_the_same(rank: Rank) -> None:
    """A tensor that is passed twice is one object inside the unit too, as attention modules rely on."""
    model = fully_shard(Identity(), mesh=rank.mesh)
    x = batch(rank.rank, 0, 4, 6).requires_grad_()
    bundle = Bundle(x, label="label")
    model(x, key=x, bundle=bundle).sum().backward()
    model(x, x.clone(), bundle)
    assert model.same == [True, False]
    assert bundle.left is x  # the caller's own is not changed
    assert x.grad is not None


class InputTracking(nn.Module):
    """Hands its caller the gradient flags of what it received and an output that requires none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        assert not mask.requires_grad
        return {"x": self.linear(x) * mask, "mask": mask, "argmax": x.argmax(-1), "detached": x.detach()}


@on_ranks(2)
def test_outputs_that_require_no_gradient(rank: Rank) -> None:
    """Integer, detached and passed-through outputs beside differentiable ones come through unchanged."""
    model = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), second=InputTracking()))
    reference = copy.deepcopy(model)
    for child in model:
        fully_shard(child, mesh=rank.mesh)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        mask = torch.ones(6)
        output = module[1](module[0](batch(number, 0, 4, 6)), mask)
        assert output["mask"] is mask
        assert not output["argmax"].requires_grad and not output["detached"].requires_grad
        return output["x"].square().mean()

    loss_of(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, loss_of)
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_gradient_of_the_models_input(rank: Rank) -> None:
    """An input of the model that requires a gradient gets that of this rank's own loss, not an average."""
    model, reference = with_reference(Stack(), rank)
    x, y = (batch(rank.rank, 0, 4, 6).requires_grad_() for _ in range(2))
    model(x).square().mean().backward()
    reference(y).square().mean().backward()
    assert_close(x.grad, y.grad, "input gradient", rtol=1e-5, atol=1e-7)
    (by_grad,) = torch.autograd.grad(reference(y).sum(), y)
    assert_close(torch.autograd.grad(model(x).sum(), x)[0], by_grad, "autograd.grad", rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- views and operations in place


class View(nn.Module):
    """Returns a view of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x)).view(-1, 2, 3)


class ViewChanged(nn.Module):
    """Changes in place the view that a unit returned, or a view of that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = View(), View(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second):
            x = part(x)
            if self.how == "whole":
                x.mul_(2)
            elif self.how == "part":
                x[:, 0].add_(1)
            else:
                x.flatten(1).unbind(0)  # views that nobody changes
            x = x.flatten(1)
        return x


@on_ranks(2)
@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("how", ["whole", "part", "not"])
def test_view_of_an_output_changed_in_place(rank: Rank, how: str, setting: bool) -> None:
    """An operation in place on a view that a unit returned leaves the unit's backward hooks working."""
    model, reference = shard_children(ViewChanged(how), rank, reshard_after_forward=setting)
    compare_steps(model, reference, rank, square_loss)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert [c.unit for c in seen if c.kind == "reduce_scatter"] == ["second", "first"]


class InPlace(nn.Module):
    """Changes its first input in place: by itself, or by adding a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = x.relu_() if y is None else x.add_(y)
        return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize("inputs", [1, 2])
def test_input_changed_in_place(rank: Rank, inputs: int) -> None:
    """A unit that changes a differentiable input in place is refused by autograd, never wrong, and recovers."""
    model = fully_shard(InPlace(), mesh=rank.mesh)
    x = batch(rank.rank, 0, 4, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(*[x * 1 for _ in range(inputs)])
    assert_at_rest(model)
    reference = nn.Linear(6, 6)
    with torch.no_grad():
        for ours, theirs in zip(model.linear.parameters(), reference.parameters(), strict=True):
            theirs.copy_(ours.full_tensor())
    # An input that requires no gradient is the caller's own tensor, as in an unsharded module.
    constant = batch(rank.rank, 0, 4, 6)
    assert_close(model(constant), reference(batch(rank.rank, 0, 4, 6).relu()), "output", rtol=1e-5, atol=1e-6)
    assert constant.min() == 0


# ---------------------------------------------------------------- activation checkpointing


def checkpointed(form: str, rank: Rank) -> tuple[nn.Module, nn.Module]:
    """A sharded model with one form of checkpointing, and a plain unsharded copy."""
    model = Stack()
    reference = copy.deepcopy(model)
    where, _, kind = form.partition(" ")
    for index, block in enumerate(model.blocks):
        if where == "composable":
            composable_checkpoint(block)
        elif where == "inside":
            block.checkpointed = kind == "reentrant"
        elif where == "wrapped":
            block = model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl[kind.upper()])
        fully_shard(block, mesh=rank.mesh, reshard_after_forward=True)
    if where == "outside":
        model.checkpointed = kind == "reentrant"
    fully_shard(model, mesh=rank.mesh)
    if where == "applied":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model, reference


FORMS = [
    "inside reentrant",
    "inside non-reentrant",
    "outside reentrant",
    "outside non-reentrant",
    "wrapped no_reentrant",
    "wrapped reentrant",
    "applied after",
    "composable before",
]


@on_ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_activation_checkpointing(rank: Rank, form: str) -> None:
    """Every form of activation checkpointing, in and around units, gives the gradients of the plain model."""
    model, reference = checkpointed(form, rank)
    compare_steps(model, reference, rank, square_loss)


@on_ranks(4)
@pytest.mark.parametrize("form", ["inside non-reentrant", "outside reentrant"])
def test_activation_checkpointing_over_ten_steps(rank: Rank, form: str) -> None:
    """Ten Adam steps with checkpointing equal ten unsharded ones without."""
    model, reference = checkpointed(form, rank)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        for optimizer in optimizers:
            optimizer.step()
    assert_models_equal(model, reference, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- torch.compile


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("how", ["before", "after", "wrapped"])
def test_compiled_blocks(rank: Rank, how: str) -> None:
    """Blocks compiled in place before or after sharding, or wrapped by ``torch.compile``, train as eager ones."""
    compare_compiled(rank, how, "aot_eager")


@on_ranks(2, timeout=180)
def test_compiled_by_inductor(rank: Rank) -> None:
    """Blocks compiled with generated kernels train as eager ones."""
    if rank.device.type == EMULATED:
        pytest.skip("inductor generates no kernels for the emulated device")
    compare_compiled(rank, "after", "inductor", depth=1)


def compare_compiled(rank: Rank, how: str, backend: str, depth: int = 2) -> None:
    torch._dynamo.reset()
    model = Stack(depth=depth)
    reference = copy.deepcopy(model)
    for block in model.blocks:
        if how == "before":
            block.compile(backend=backend)
        fully_shard(block, mesh=rank.mesh, reshard_after_forward=True)
        if how == "after":
            block.compile(backend=backend)
    fully_shard(model, mesh=rank.mesh)
    if how == "wrapped":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    compare_steps(model, reference, rank, square_loss)
    torch._dynamo.reset()


@on_ranks(2)
def test_second_layer_without_gradient(rank: Rank) -> None:
    """A layer whose output is detached from the loss keeps no gradient while the others get theirs."""
    model = shard_blocks(Stack(), rank)
    hidden = model.blocks[0](batch(rank.rank, 0, 4, 6))
    with torch.no_grad():
        model.blocks[1](hidden)
    hidden.sum().backward()
    assert model.blocks[0].up.weight.grad is not None
    assert model.blocks[1].up.weight.grad is None
    assert_at_rest(model)


class Cache:
    """Keys of all blocks that have run."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Attention(nn.Module):
    """Adds its keys to the cache, attends to all that are there, and returns the cache as well."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        cache.keys.append(self.key(x))
        return x + torch.tanh(self.value(x)) * torch.stack(cache.keys).mean(0), cache


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, cache = self.first(x), Cache()
        for layer in self.layers:
            x, cache = layer(x, cache)
        return x


@on_ranks(2)
def test_cache_of_earlier_units(rank: Rank) -> None:
    """What an object holds of earlier units changes nothing: each unit's backward ends before the one before begins."""
    model = Caching()
    reference = copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    compare_steps(model, reference, rank, square_loss_of)
    loss = square_loss_of(0)(model, rank.rank)
    with record() as seen:
        loss.backward()
    names = [f"layers.{index}" for index in (3, 2, 1, 0)]
    assert [c.unit for c in seen if c.kind == "reduce_scatter"] == [*names, ""]
    unsharded = [c.unit for c in seen if c.kind == "all_gather"]
    assert len(unsharded) == len(set(unsharded))


def square_loss_of(step: int) -> LossOf:
    return lambda module, number: module(batch(number, step, 4, 6)).square().mean()
