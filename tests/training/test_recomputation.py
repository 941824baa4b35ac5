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

from compare import assert_equal, fqn_of
from front_ends import (
    FLAT,
    FRONT_ENDS,
    ORIGINAL,
    STRATEGIES,
    FrontEnd,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    full_values,
    sgd,
    sharded_with_reference,
    token_loss,
    train,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
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


FORMS: dict[str, Callable[..., nn.Module]] = {
    "no_reentrant": checkpoint_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": functools.partial(
        checkpoint_wrapper, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products)
    ),
    "offload": offload_wrapper,
}
# What the bits of a form are compared with: recomputation makes tensors with the same strides as without it.
REFERENCES: dict[str, Callable[..., nn.Module]] = {"offload": CopiedInBackward}
PLACES = ["inside", "inside layers", "outside", "both"]  # PyTorch's reentrant checkpoints do not nest
FORMS_AND_PLACES = [(f, p) for f in FORMS for p in PLACES if (f, p) != ("reentrant", "both")]
PRECISIONS = ["fp32", "bf16", "fp64", "autocast"]
SEEN: list[tuple[torch.dtype, ...]] = []


class Watched(Stack):
    """Notes the dtypes that the layers of its blocks see, also when they are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_hook(note)


def note(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
    SEEN.append((args[0].dtype, layer.weight.dtype, output.dtype, torch.is_autocast_enabled("cpu")))


def precision_of(front_end: FrontEnd, precision: str) -> dict[str, Any]:
    chosen = {"bf16": (torch.bfloat16, torch.float32), "fp64": (torch.float64, None)}.get(precision)
    return front_end.precision(*chosen) if chosen else {}


def nest(model: nn.Module, rank: Rank, front_end: FrontEnd, place: str, form: Any, **options: Any) -> nn.Module:
    """A copy of a stack in which each block is a unit, and checkpointed at ``place``."""
    model = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        if place == "inside layers":
            block.up, block.down = form(block.up), form(block.down)
        inner = form(block) if place in ("inside", "both") else block
        unit = front_end.wrap(inner, rank, [], **options)
        model.blocks[index] = form(unit) if place in ("outside", "both") else unit
    return front_end.wrap(model, rank, [], **options)


@on_ranks(2)
@each_value(
    front_end=FRONT_ENDS, form_and_place=FORMS_AND_PLACES, precision=PRECISIONS, strategy=[*STRATEGIES, "FULL_SHARD"]
)
def test_same_bits_as_without(
    rank: Rank, front_end: FrontEnd, form_and_place: tuple[str, str], precision: str, strategy: str
) -> None:
    """However activations are recomputed or offloaded: weights and the dtypes that layers see are exactly as without.

    Also with microbatches without synchronization. Strides count among what has to be as without: see
    ``CopiedInBackward``.
    """
    form, place = form_and_place
    plain = build(Watched)
    options = {"strategy": strategy, **precision_of(front_end, precision)}
    found, models = [], []
    for make in (FORMS[form], REFERENCES.get(form, as_it_is)):
        SEEN.clear()
        model = nest(plain, rank, front_end, place, make, **options)
        optimizer = sgd(model, 2.0**-4)
        for step in range(6):
            context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
            with front_end.no_sync(model) if step % 3 == 0 else contextlib.nullcontext():
                with context:
                    loss = square_loss(step)(model, rank.rank)
                loss.backward()
            if step % 3:
                optimizer.step()
                optimizer.zero_grad()
        assert_at_rest(model)
        found.append(list(SEEN))
        models.append(model)
    assert set(found[0]) == set(found[1]) and len(set(found[0])) == 1
    twice = form != "offload" and place != "inside layers"  # whose recomputation stops before the hook
    assert len(found[0]) >= len(found[1]) * (2 if twice else 1)
    assert_same_values(*models)


def change_body(model: Any, reentrant: bool, around: bool) -> None:
    for block in model.blocks:
        block.checkpointed = reentrant
    if around:
        model.checkpointed = reentrant


def checkpoint_composably(model: Any) -> None:
    for block in model.blocks:
        composable_checkpoint(block)


# Ways to checkpoint that are no wrappers around units, or come before or after sharding.
WAYS: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "function inside": (lambda m: change_body(m, False, False), as_it_is),
    "reentrant function inside": (lambda m: change_body(m, True, False), as_it_is),
    "function around": (lambda m: setattr(m, "checkpointed", False), as_it_is),
    "reentrant function around": (lambda m: setattr(m, "checkpointed", True), as_it_is),
    "functions inside and around": (lambda m: change_body(m, False, True), as_it_is),
    "composable before": (checkpoint_composably, as_it_is),
    "composable after": (as_it_is, checkpoint_composably),
}


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, way=WAYS)
def test_ways_to_checkpoint(rank: Rank, front_end: FrontEnd, way: str) -> None:
    """Every way of checkpointing, in and around units, gives the gradients of the plain model."""
    before, after = WAYS[way]
    plain = build(Stack)
    reference = copy.deepcopy(plain)
    before(plain)
    model = front_end.wrap(plain, rank)
    after(model)
    assert_trains_alike(model, reference, rank, steps=4)


@on_ranks(2)
@each_value(1, front_end=FRONT_ENDS, form=FORMS, when=["before", "after"])
def test_apply_before_and_after_sharding(rank: Rank, front_end: FrontEnd, form: str, when: str) -> None:
    """``apply_activation_checkpointing`` before or after sharding trains alike, and names stay clean."""
    model, reference = build(Language), build(Language)
    checkpointed = functools.partial(
        apply_activation_checkpointing, checkpoint_wrapper_fn=FORMS[form], auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    if when == "before":
        checkpointed(model)
    model = front_end.wrap(model, rank)
    if when == "after":
        checkpointed(model)
    assert_trains_alike(model, reference, rank, token_loss)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, form=["no_reentrant", "reentrant", "offload"])
def test_root_in_a_checkpoint(rank: Rank, form: str, front_end: FrontEnd) -> None:
    """The whole sharded model in one checkpoint."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack))

    def loss_at(step: int) -> LossOf:
        return lambda module, number: module(batch(number, step, 4, 6).requires_grad_()).square().mean()

    assert_trains_alike(FORMS[form](model), reference, rank, loss_at)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, place=["inside", "outside"], form=["no_reentrant", "reentrant", "reentrant"])
def test_random_numbers_are_drawn_again(rank: Rank, front_end: FrontEnd, place: str, form: str) -> None:
    """Recomputed dropout equals that of forward."""

    class Draws(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.dropout(x, 0.5, train=True))

    plain = build(Stack)
    plain.blocks = nn.ModuleList(Draws(6) for _ in range(2))
    models = [nest(plain, rank, front_end, each, FORMS[form]) for each in (place, "none")]
    losses = []
    for model in models:
        torch.manual_seed(11)
        losses.append(train(model, rank, square_loss, 3))
    assert_equal(losses[0], losses[1], "losses")
    assert_same_values(*models)


@on_ranks(2)
@each_value(front_end=[ORIGINAL, FLAT], form=["no_reentrant", "offload"])
def test_module_of_the_wrapper_is_what_was_wrapped(rank: Rank, form: str, front_end: FrontEnd) -> None:
    """``.module`` looks through a checkpoint, attributes are forwarded through both wrappers, names are as before."""
    model = nest(build(Stack), rank, front_end, "inside", FORMS[form])
    block = model.blocks[0]
    assert type(block.module) is Block
    with FSDP.summon_full_params(model):
        assert block.up.weight is block.module.up.weight
        names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in build(Stack).named_parameters()]
    assert front_end == FLAT or {fqn_of(name) for name, _ in model.named_parameters()} == set(names)
    assert set(full_values(model)) == set(names)


class Offset(nn.Module):
    """Adds a parameter, and computes something that has a graph, for which it is recomputed, but no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = x + self.value
        return shifted, shifted.square().mean()


class Shifted(nn.Module):
    """A layer, and an offset that is added last: the backward of that needs no recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.offset = nn.Linear(6, 6), Offset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.offset(torch.tanh(self.layer(x)))[0], x, use_reentrant=False)


@on_ranks(2)
def test_units_that_are_recomputed_after_their_own_backward(rank: Rank) -> None:
    """Also where they stay unsharded, modules hold the sharded parameters afterwards, which have the gradients."""
    reference = build(Shifted)
    model = copy.deepcopy(reference)
    fully_shard(model.offset, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh).set_reshard_after_backward(False)
    for step in range(3):
        model(batch(rank.rank, step, 4, 6)).square().mean().backward()
        reference_backward(reference, rank.world_size, lambda m, r, s=step: m(batch(r, s, 4, 6)).square().mean())
        assert isinstance(model.offset.value, DTensor)
        assert_same_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
