"""Activation checkpointing and offloading, inside of wrappers, outside of them and on both sides."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from earlier_front_ends import (
    CLOSE,
    EXACT_RATE,
    Block,
    Language,
    Stack,
    assert_at_rest,
    assert_same_values,
    build,
    full_values,
    square_loss,
    token_loss,
    train,
    train_reference,
    wrapped,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from compare import assert_close, assert_equal, fqn_of
from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.activation_checkpoint import (
    ActivationWrapper,
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy
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


FORMS: dict[str, Callable[..., nn.Module]] = {
    "no_reentrant": checkpoint_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "offload": offload_wrapper,
}
PLACES = ["inside", "inside layers", "outside", "both"]
# What the bits of a form are compared with: recomputation makes tensors with the same strides as without it.
REFERENCES: dict[str, Callable[..., nn.Module]] = {
    "no_reentrant": as_it_is,
    "reentrant": as_it_is,
    "offload": CopiedInBackward,
}
PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(torch.bfloat16, torch.float32),
    "fp64": MixedPrecision(torch.float64, cast_forward_inputs=True),
}


def loss_at(step: int) -> Any:
    """Reentrant checkpointing, sharded or not, needs an input that requires gradients: the first layer's output."""
    return square_loss(step)


def nest(model: nn.Module, rank: Rank, place: str, form: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """A copy of a stack in which each block is in a wrapper, and checkpointed at ``place``."""
    model = copy.deepcopy(model)
    options["device_mesh"] = rank.mesh
    for index, block in enumerate(model.blocks):
        if place == "inside layers":
            block.up, block.down = form(block.up), form(block.down)
        inner = form(block) if place in ("inside", "both") else block
        unit = FullyShardedDataParallel(inner, **options)
        model.blocks[index] = form(unit) if place in ("outside", "both") else unit
    return FullyShardedDataParallel(model, **options)


def blocks_of(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


@pytest.mark.parametrize("layer", [nn.Linear(6, 13), nn.Linear(6, 13, bias=False)])
def test_reference_of_offloading_has_its_strides(layer: nn.Module) -> None:
    """Backward of a plain linear layer reads the weight with the same strides as offloaded, which are not its own."""
    strides, bits = {}, {}
    for name, make in {"as it is": as_it_is, "offloaded": offload_wrapper, "reference": CopiedInBackward}.items():
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = make(copy.deepcopy(layer))(x)
        strides[name] = y.grad_fn._saved_mat2.stride()
        y.square().sum().backward()
        bits[name] = x.grad
    assert strides == {"as it is": (1, 6), "offloaded": (13, 1), "reference": (13, 1)}
    assert_equal(bits["reference"], bits["offloaded"], "gradient")


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits_as_without(rank: Rank, form: str, place: str, precision: str, use_orig_params: bool) -> None:
    """However activations are recomputed or offloaded: losses, weights and dtypes seen are exactly as without.

    Strides count among what has to be as without: see ``CopiedInBackward``.
    """
    if (form, place) in (("reentrant", "both"),):
        pytest.skip("PyTorch's reentrant checkpoints do not nest")
    model = build(Stack)
    options = {"mixed_precision": PRECISIONS[precision], "use_orig_params": use_orig_params}
    ours, plain = (nest(model, rank, place, make[form], **options) for make in (FORMS, REFERENCES))
    assert_equal(train(ours, rank, loss_at, 4), train(plain, rank, loss_at, 4), "losses")
    actual, expected = full_values(ours), full_values(plain)
    assert set(actual) == set(expected) == {name for name, _ in model.named_parameters()}
    for name, value in expected.items():
        assert_equal(actual[name], value, name)
    if precision == "fp32":
        train_reference(model, rank, loss_at, 4)
        assert_same_values(ours, model, **CLOSE)
    for block, other in zip(blocks_of(ours), blocks_of(plain), strict=True):
        assert set(block.dtypes) == set(other.dtypes) and len(set(block.dtypes)) == 1
        assert len(block.dtypes) >= len(other.dtypes)
        if form != "offload" and place != "inside layers":
            assert len(block.dtypes) >= 2 * len(other.dtypes)
    assert_at_rest(ours)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits_with_other_strategies(rank: Rank, form: str, place: str, strategy: str) -> None:
    """Strategies that keep full parameters until backward recompute to the same bits, with accumulation as well."""
    if (form, place) in (("reentrant", "both"),):
        pytest.skip("PyTorch's reentrant checkpoints do not nest")
    model = build(Stack)
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    ours, plain = (nest(model, rank, place, make[form], **options) for make in (FORMS, REFERENCES))
    for one in (ours, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=EXACT_RATE)
        for step in range(3):
            with one.no_sync():
                square_loss(10 + step)(one, rank.rank).backward()
            square_loss(step)(one, rank.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(ours, plain)
    assert_at_rest(ours)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["check_fn", "policy", "custom"])
@pytest.mark.parametrize("form", FORMS)
def test_apply_before_and_after_wrapping(rank: Rank, form: str, how: str, when: str, use_orig_params: bool) -> None:
    """``apply_activation_checkpointing`` on a model before or after wrapping trains alike, and names stay clean."""
    arguments: dict[str, Any] = {
        "check_fn": {"check_fn": lambda m: isinstance(m, Block)},
        "policy": {"auto_wrap_policy": ModuleWrapPolicy({Block})},
        "custom": {"auto_wrap_policy": CustomPolicy(lambda m: isinstance(m, (Block, nn.LayerNorm)))},
    }[how]
    if form == "reentrant" and how == "custom":
        pytest.skip("PyTorch's reentrant checkpoints do not nest")
    reference = build(Language)
    checkpointed = functools.partial(apply_activation_checkpointing, checkpoint_wrapper_fn=FORMS[form], **arguments)
    if when == "before":
        model = copy.deepcopy(reference)
        checkpointed(model)
        model = wrapped(model, rank, use_orig_params=use_orig_params)
    else:
        model = wrapped(reference, rank, use_orig_params=use_orig_params)
        checkpointed(model)
    losses = train(model, rank, token_loss, 4)
    assert_close(losses, train_reference(reference, rank, token_loss, 4), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_close(state[name], value, name, **CLOSE)
    again = wrapped(build(Language), rank, use_orig_params=use_orig_params)
    again.load_state_dict(state)
    assert_same_values(again, model)


@on_ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_root_in_a_checkpoint(rank: Rank, form: str) -> None:
    """The whole wrapped model in one checkpoint."""
    reference = build(Stack)
    model = FORMS[form](wrapped(reference, rank))

    def loss_of(step: int) -> Any:
        def loss(module: nn.Module, number: int) -> torch.Tensor:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + number)).requires_grad_()
            return module(x).square().mean()

        return loss

    losses = train(model, rank, loss_of, 3)
    assert_close(losses, train_reference(reference, rank, loss_of, 3), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_module_is_what_was_wrapped(rank: Rank, form: str) -> None:
    """``.module`` looks through a checkpoint, attributes are forwarded through both wrappers, names are as before."""
    model = nest(build(Stack), rank, "inside", FORMS[form], use_orig_params=True)
    block = model.blocks[0]
    assert type(block.module) is Block
    assert block.up.weight is block.module.up.weight
    with FullyShardedDataParallel.summon_full_params(model):
        names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in build(Stack).named_parameters()]
    assert {fqn_of(name) for name, _ in model.named_parameters()} == set(names)


@on_ranks(2)
def test_checkpoints_with_offloaded_parameters(rank: Rank) -> None:
    """Parameters in CPU memory, recomputed activations, mixed precision, accumulation outside no_sync."""
    model = build(Stack)
    options: dict[str, Any] = {"mixed_precision": PRECISIONS["bf16"], "use_orig_params": True}
    ours = nest(model, rank, "inside", checkpoint_wrapper, cpu_offload=CPUOffload(offload_params=True), **options)
    plain = nest(model, rank, "none", nn.Identity, **options)
    for one in (ours, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=EXACT_RATE)
        for step in range(4):
            square_loss(step)(one, rank.rank).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_values(ours, plain)


class Draws(Block):
    """Dropout: recomputation has to draw the same numbers again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.dropout(x, 0.5, train=True))


@on_ranks(2)
@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("form", ["no_reentrant", "reentrant"])
def test_random_numbers_are_drawn_again(rank: Rank, form: str, place: str) -> None:
    """Recomputed dropout equals that of forward."""
    model = build(Stack)
    model.blocks = nn.ModuleList(Draws(6) for _ in range(2))
    ours = nest(model, rank, place, FORMS[form])
    plain = nest(model, rank, "none", nn.Identity)
    losses = []
    for one in (ours, plain):
        torch.manual_seed(11)
        losses.append(train(one, rank, square_loss, 3))
    assert_equal(losses[0], losses[1], "losses")
    assert_same_values(ours, plain)
