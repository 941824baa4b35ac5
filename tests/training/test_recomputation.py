"""Activation checkpointing and offloading inside of units, outside of them and on both sides, in each front end."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from front_ends import (
    COMPOSABLE,
    FRONT_ENDS,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    sgd,
    sharded_with_reference,
    step_and_clear,
    token_loss,
)
from fullshard.activation_checkpoint import (
    ActivationWrapper,
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.wrap import ModuleWrapPolicy
from models import Block, Language, LossOf, Stack, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks


class CopiedInBackward(ActivationWrapper):
    """Backward reads fresh contiguous copies of what autograd saved; between forward and backward there are none.

    ``save_on_cpu(pin_memory=True)``, and with it ``offload_wrapper``, saves any tensor contiguously. A linear layer
    saves its weight transposed, so that the copy has other strides than the view into the unsharded buffer, and the
    matrix product of backward runs another kernel of the BLAS, which may add in another order: without any sharding the
    gradients of a linear layer then differ in their last bits, on some processors. This is the reference that shows
    the kernels the same strides and alignment, which leaves no room for rounding.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(torch.Tensor.detach, contiguous_copy):
            return self._checkpoint_wrapped_module(*args, **kwargs)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in row-major order at the start of an allocation, as ``save_on_cpu(pin_memory=True)`` makes it."""
    return torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def as_it_is(module: nn.Module) -> nn.Module:
    """The module, in no wrapper."""
    return module


def keep_products(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    keep = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, Callable[..., nn.Module]] = {
    "no_reentrant": checkpoint_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": functools.partial(
        checkpoint_wrapper, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products)
    ),
    "offload": offload_wrapper,
}
# What the bits of a kind are compared with: recomputation makes tensors with the same strides as without it.
REFERENCES: dict[str, Callable[..., nn.Module]] = {"offload": CopiedInBackward}
KINDS_AND_PLACES = [
    ("no_reentrant", "inside layers"),
    ("no_reentrant", "both"),
    ("reentrant", "inside"),
    ("reentrant", "outside"),  # PyTorch's reentrant checkpoints do not nest
    ("selective", "inside"),
    ("selective", "outside"),
    ("offload", "inside layers"),
    ("offload", "both"),
]
PRECISIONS = ["fp32", "bf16", "fp64", "autocast"]
SEEN: list[tuple[torch.dtype, ...]] = []


class Watched(Stack):
    """Notes the dtypes that the layers of its blocks see, also when they are recomputed; has dropout in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_hook(note)
            block.down.register_forward_pre_hook(lambda _, args: (torch.dropout(args[0], 0.5, train=True),))


def note(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
    SEEN.append((args[0].dtype, layer.weight.dtype, output.dtype, torch.is_autocast_enabled("cpu")))


def precision_of(front_end: FrontEnd, precision: str) -> dict[str, Any]:
    chosen = {"bf16": (torch.bfloat16, torch.float32), "fp64": (torch.float64, None)}.get(precision)
    return front_end.precision(*chosen) if chosen else {}


def nest(model: nn.Module, rank: Rank, front_end: FrontEnd, place: str, kind: Any, **options: Any) -> nn.Module:
    """A copy of a stack in which each block is a unit, and checkpointed at ``place``."""
    model = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        if place == "inside layers":
            block.up, block.down = kind(block.up), kind(block.down)
        inner = kind(block) if place in ("inside", "both") else block
        unit = front_end.wrap(inner, rank, [], **options)
        model.blocks[index] = kind(unit) if place in ("outside", "both") else unit
    return front_end.wrap(model, rank, [], **options)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS, kind_and_place=KINDS_AND_PLACES, precision=PRECISIONS, strategy=[*STRATEGIES, "FULL_SHARD"]
)
def test_same_bits_as_without(
    rank: Rank, front_end: FrontEnd, kind_and_place: tuple[str, str], precision: str, strategy: str
) -> None:
    """However activations are recomputed or offloaded: weights, random numbers and dtypes are exactly as without.

    Also with microbatches without synchronization. Strides count among what has to be as without: see
    ``CopiedInBackward``.
    """
    kind, place = kind_and_place
    plain = build(Watched)
    options = {"strategy": strategy, **precision_of(front_end, precision)}
    found, models = [], []
    for make in (KINDS[kind], REFERENCES.get(kind, as_it_is)):
        SEEN.clear()
        model = nest(plain, rank, front_end, place, make, **options)
        optimizer = sgd(model, 2.0**-4)
        torch.manual_seed(11)
        for step in range(3):
            context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
            with front_end.no_sync(model) if step == 0 else contextlib.nullcontext():
                with context:
                    loss = square_loss(step)(model, rank.rank)
                loss.backward()
            if step:
                step_and_clear(optimizer)
        assert_at_rest(model)
        found.append(list(SEEN))
        models.append(model)
    assert set(found[0]) == set(found[1]) and len(set(found[0])) == 1
    twice = kind != "offload" and place != "inside layers"  # whose recomputation stops before the hook
    assert len(found[0]) >= len(found[1]) * (2 if twice else 1)
    assert_same_values(*models)


# Ways to checkpoint without wrappers: by ``checkpointed`` of a stack (around its blocks) and of its blocks (inside).
WAYS: dict[str, dict[str, bool]] = {
    "function inside": {"inside": False},
    "reentrant function inside": {"inside": True},
    "function around": {"around": False},
    "reentrant function around": {"around": True},
    "functions inside and around": {"inside": False, "around": False},
    "composable before": {},
    "composable after": {},
}


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, way=WAYS)
def test_ways_to_checkpoint(rank: Rank, front_end: FrontEnd, way: str) -> None:
    """Every way of checkpointing, in and around units, gives the gradients of the plain model."""
    plain = build(Stack)
    reference = copy.deepcopy(plain)
    plain.checkpointed = WAYS[way].get("around")
    for block in plain.blocks:
        block.checkpointed = WAYS[way].get("inside")
        if way == "composable before":
            composable_checkpoint(block)
    model = front_end.wrap(plain, rank)
    for block in model.blocks if way == "composable after" else ():
        composable_checkpoint(block)
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, kind=KINDS, when=["before", "after"])
def test_apply_before_and_after_sharding(rank: Rank, front_end: FrontEnd, kind: str, when: str) -> None:
    """``apply_activation_checkpointing`` before or after sharding trains alike, and names stay clean."""
    model, reference = build(Language), build(Language)
    checkpointed = functools.partial(
        apply_activation_checkpointing, checkpoint_wrapper_fn=KINDS[kind], auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    if when == "before":
        checkpointed(model)
    model = front_end.wrap(model, rank)
    if when == "after":
        checkpointed(model)
    assert_trains_alike(model, reference, rank, token_loss)
    assert list(model.state_dict()) == list(reference.state_dict())


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, kind=["no_reentrant", "reentrant", "offload"])
def test_root_in_a_checkpoint(rank: Rank, kind: str, front_end: FrontEnd) -> None:
    """The whole sharded model in one checkpoint."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack))

    def loss_at(step: int) -> LossOf:
        return lambda module, number: module(batch(number, step, 4, 6).requires_grad_()).square().mean()

    assert_trains_alike(KINDS[kind](model), reference, rank, loss_at)


class Offset(nn.Module):
    """Adds a parameter, and computes something that has a graph, for which it is recomputed, but no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = x + self.value
        return shifted, shifted.square().mean()


class Shifted(nn.Sequential):
    """A layer, and an offset that is added last: the backward of that needs no recomputation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)[0]


@on_ranks(2)
def test_units_that_are_recomputed_after_their_own_backward(rank: Rank) -> None:
    """Also where they stay unsharded, modules hold the sharded parameters afterwards, which have the gradients."""
    plain = build(lambda: Shifted(nn.Linear(6, 6), nn.Tanh(), Offset()))
    model, reference = sharded_with_reference(COMPOSABLE, rank, plain, ["2"])
    model.set_reshard_after_backward(False)
    for step in range(3):
        model(batch(rank.rank, step, 4, 6)).square().mean().backward()
        reference_backward(reference, rank.world_size, lambda m, r, s=step: m(batch(r, s, 4, 6)).square().mean())
        assert isinstance(model[2].value, DTensor)
        assert_same_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
