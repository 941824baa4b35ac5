"""Graphs of every form through wrapped modules: what goes in and out, several backwards, parts of them, recursion."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from earlier_front_ends import (
    CLOSE,
    EXACT_RATE,
    Block,
    LossOf,
    Stack,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    batch,
    build,
    full_values,
    gathered,
    reference_backward,
    square_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from compare import assert_close, assert_equal
from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.activation_checkpoint import apply_activation_checkpointing, checkpoint_wrapper
from fullshard.comm import record
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
each_strategy = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def make(rank: Rank, reference: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FullyShardedDataParallel:
    return wrapped(reference, rank, sharding_strategy=ShardingStrategy[strategy], **options)


# -------------------------------------------------------------------- inputs and outputs

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    """An output of named parts."""

    left: torch.Tensor
    right: torch.Tensor
    label: str = "both"


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], list[torch.Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), list),
    "list": (lambda a, b: [a, None, b], lambda o: [o[0], o[2]]),
    "dict": (lambda a, b: {"a": a, "b": {"c": b, "n": 3}}, lambda o: [o["a"], o["b"]["c"]]),
    "ordered": (lambda a, b: OrderedDict(a=a, b=b), lambda o: [o["a"], o["b"]]),
    "namedtuple": (Pair, lambda o: [o.left, o.right]),
    "dataclass": (Record, lambda o: [o.left, o.right]),
    "nested": (lambda a, b: Pair([a], {"x": Record(b, b)}), lambda o: [o.left[0], o.right["x"].left]),
}


class Parts(Block):
    """A block that takes and returns a container of two tensors."""

    def __init__(self, container: str) -> None:
        super().__init__(6)
        self.container = container

    def forward(self, *, both: Any) -> Any:  # type: ignore[override]
        pack, unpack = CONTAINERS[self.container]
        left, right = unpack(both)
        return pack(super().forward(left), torch.tanh(self.up(right))[:, :6])


class Contained(nn.Module):
    """Blocks that hand containers to each other."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Parts(container) for _ in range(2))
        self.container = container

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        both = CONTAINERS[self.container][0](x, x + 1)
        for block in self.blocks:
            both = block(both=both)
        return both


@on_ranks(2)
@both_modes
@pytest.mark.parametrize("precision", [None, torch.float64], ids=str)
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(rank: Rank, container: str, precision: torch.dtype | None, use_orig_params: bool) -> None:
    """Tensors in containers of all kinds, as keyword arguments and outputs, are found, cast and watched."""
    reference = build(Contained, container)
    mixed = None if precision is None else MixedPrecision(precision, cast_forward_inputs=True)
    model = make(rank, reference, use_orig_params=use_orig_params, mixed_precision=mixed)
    unpack = CONTAINERS[container][1]
    seen = unpack(model(batch(rank.rank, 0, 4, 6)))
    assert {tensor.dtype for tensor in seen} == {precision or torch.float32}

    def loss_at(step: int) -> LossOf:
        def loss_of(module: nn.Module, number: int) -> torch.Tensor:
            left, right = unpack(module(batch(number, step, 4, 6)))
            return (left.square().mean() + right.abs().mean()).float()

        return loss_of

    with record() as collectives:
        loss_at(0)(model, rank.rank).backward()
    assert len({c.unit for c in collectives if c.kind == "reduce_scatter"}) == 3
    model.zero_grad()
    assert_at_rest(model)
    losses = train(model, rank, loss_at, 3)
    assert_close(losses, train_reference(reference, rank, loss_at, 3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


class Strange(nn.Module):
    """Units that return their input, take no tensor, have no parameters, or return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Same(), Constant(), nn.Tanh(), Silent(), nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same, constant, without, silent, last = self.layers
        x = same(self.first(x)) + constant(6)
        silent(x)
        return last(without(x))


class Same(nn.Linear):
    """Has parameters, and returns its input."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Constant(nn.Module):
    """Takes a number; its output depends on parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9))

    def forward(self, size: int) -> torch.Tensor:
        return torch.sin(self.table[:size])


class Silent(nn.Linear):
    """Returns nothing, and remembers the mean of what it saw."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.mean = super().forward(x).mean().detach()


@on_ranks(2)
@both_modes
@each_strategy
def test_strange_units(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Units that autograd hardly sees are freed, reduced if they have gradients, and train right."""
    reference = build(Strange)
    model = copy.deepcopy(reference)
    options: dict[str, Any] = {
        "device_mesh": rank.mesh,
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    model = FullyShardedDataParallel(model, **options)
    losses = train(model, rank, square_loss, 3)
    assert_at_rest(model)
    assert_close(losses, train_reference(reference, rank, square_loss, 3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    with torch.no_grad():
        model(batch(0, 0, 4, 6))
    assert gathered(model) == []


# -------------------------------------------------------------------- several backwards, and parts


@on_ranks(2)
@both_modes
@each_strategy
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_two_graphs_one_after_the_other(
    rank: Rank, order: tuple[int, int], strategy: str, use_orig_params: bool
) -> None:
    """Two forwards, then the backward of each, in either order: gradients add up."""
    reference = build(Stack)
    model = make(rank, reference, strategy, use_orig_params=use_orig_params)
    for _ in range(2):
        losses = [square_loss(step)(model, rank.rank) for step in range(2)]
        for index in order:
            losses[index].backward()
    for step in (0, 1, 0, 1):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)
    assert_at_rest(model)


@on_ranks(2)
@both_modes
@each_strategy
def test_gradients_of_inputs_only(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """``torch.autograd.grad`` of the inputs equals the reference's and leaves no gradient and nothing gathered."""
    reference = build(Stack)
    model = make(rank, reference, strategy, use_orig_params=use_orig_params)
    for step in range(2):
        inputs = [batch(rank.rank, step, 4, 6).requires_grad_() for _ in range(2)]
        ours, theirs = (
            torch.autograd.grad(module(x).square().mean(), x)[0]
            for module, x in zip((model, reference), inputs, strict=True)
        )
        assert_close(ours, theirs, "gradient of the input", **CLOSE)
        assert all(p.grad is None for p in model.parameters())
        assert gathered(model) == []
    losses = train(model, rank, square_loss, 2)
    assert_close(losses, train_reference(reference, rank, square_loss, 2), "losses", **CLOSE)


@on_ranks(2)
@both_modes
@each_strategy
def test_backward_through_a_part(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """A loss on what a block in the middle returned: units after it have no gradients, and are freed."""
    reference = build(Stack)
    model = make(rank, reference, strategy, use_orig_params=use_orig_params)

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = module.blocks[1].register_forward_hook(lambda _, inputs, output: kept.append(output))
        module(batch(number, 0, 4, 6))
        handle.remove()
        return kept[0].square().mean()

    for _ in range(2):
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
        assert gathered(model) == []
    assert_same_gradients(model, reference)
    losses = train(model, rank, square_loss, 2)
    assert_close(losses, train_reference(reference, rank, square_loss, 2), "losses", **CLOSE)


@on_ranks(2)
@both_modes
@each_strategy
def test_gradient_penalty(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Gradients of gradients are those of the reference, or a clear error, and training goes on after it."""
    reference = build(Stack)
    model = make(rank, reference, strategy, use_orig_params=use_orig_params)

    def penalty_of(module: nn.Module, number: int) -> torch.Tensor:
        x = batch(number, 0, 4, 6).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    try:
        penalty_of(model, rank.rank).backward()
    except RuntimeError:
        model.zero_grad()
    else:
        reference_backward(reference, rank.world_size, penalty_of)
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
    losses = train(model, rank, square_loss, 2)
    assert_close(losses, train_reference(reference, rank, square_loss, 2), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


class Recursive(Block):
    """Calls its unit again, twice."""

    def __init__(self) -> None:
        super().__init__(6)
        self.__dict__["again"] = self

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return x if depth == 0 else self.__dict__["again"](x, depth - 1)


@on_ranks(2)
@both_modes
@each_strategy
def test_recursion(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """A unit that runs inside its own forward trains right."""
    reference = build(Stack)
    reference.blocks = nn.ModuleList(build(Recursive) for _ in range(2))
    model = make(rank, reference, strategy, use_orig_params=use_orig_params)
    for unit in model.blocks:
        unit.module.__dict__["again"] = unit
    losses = train(model, rank, square_loss, 3)
    assert_close(losses, train_reference(reference, rank, square_loss, 3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@both_modes
@each_strategy
def test_full_parameters_after_a_forward_with_a_graph(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Forward, summon, forward, backward: the first graph is dropped, the second one trains right."""
    reference = build(Stack)
    model = make(rank, reference, strategy, use_orig_params=use_orig_params)
    for step in range(2):
        dropped = model(batch(rank.rank, step, 4, 6))
        for name, value in full_values(model).items():
            assert_equal(value, dict(reference.named_parameters())[name].detach(), name)
        del dropped
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_same_gradients(model, reference)


# -------------------------------------------------------------------- combinations


@on_ranks(2)
@both_modes
def test_selective_recomputation(rank: Rank, use_orig_params: bool) -> None:
    """Checkpoints that keep the results of matrix products give the same bits."""

    def policy(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    reference = build(Stack)
    models = [make(rank, reference, use_orig_params=use_orig_params) for _ in range(2)]
    selective = functools.partial(
        checkpoint_wrapper, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )
    apply_activation_checkpointing(models[0], selective, check_fn=lambda m: isinstance(m, Block))
    losses = [train(model, rank, square_loss, 3) for model in models]
    assert_equal(losses[0], losses[1], "losses")
    assert_same_values(*models)


@on_ranks(2)
@both_modes
@each_strategy
def test_offload_with_no_sync(rank: Rank, strategy: str, use_orig_params: bool) -> None:
    """Offloaded parameters and microbatches without communication, in any order, have the reference's gradients."""
    reference = build(Stack)
    model = make(
        rank, reference, strategy, use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload_params=True)
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=EXACT_RATE) for m in (model, reference)]
    for step in range(2):
        for micro, sync in enumerate((True, False, False, True)):
            loss_of = square_loss(10 * step + micro)
            if sync:
                loss_of(model, rank.rank).backward()
            else:
                with model.no_sync():
                    loss_of(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, loss_of)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)
