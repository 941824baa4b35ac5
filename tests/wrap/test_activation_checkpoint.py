"""Checkpointing and offloading of activations: what is wrapped, in which order, and what names show.

That models train alike with them is tested for all front ends in tests/training/test_recomputation.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from compare import assert_models_equal
from front_ends import COMPOSABLE, assert_trains_alike, build, sharded_with_reference
from fullshard.activation_checkpoint import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    offload_wrapper,
)
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from models import Block, Stack, square_loss
from ranks import Rank, on_ranks


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


@on_ranks(2)
def test_between_steps(rank: Rank) -> None:
    """A model that has run already may be given wrappers, nested ones, and be loaded with a plain model's keys."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack))
    square_loss()(model, rank.rank).backward()
    model.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    apply_activation_checkpointing(model, check_fn=is_block)
    apply_activation_checkpointing(model, offload_wrapper, lambda m: isinstance(m, CheckpointWrapper))
    assert all(isinstance(block, OffloadWrapper) for block in model.blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert_trains_alike(model, reference, rank)


def test_everything_but_the_root_and_containers() -> None:
    """By default every module below the root is wrapped, but lists stay lists; keys of state dicts have no prefix."""
    model, reference = build(Stack), build(Stack)
    apply_activation_checkpointing(model)
    assert type(model) is Stack and type(model.blocks) is nn.ModuleList
    wrapped = {name for name, m in model.named_modules() if type(m) is CheckpointWrapper}
    assert {name.replace("_checkpoint_wrapped_module.", "") for name in wrapped} == {
        name for name, m in reference.named_modules() if isinstance(m, (Block, nn.Linear))
    }
    assert list(model.state_dict()) == list(reference.state_dict())
    other = build(Stack, seed=5)
    model.load_state_dict(other.state_dict())
    reference.load_state_dict(model.state_dict())
    assert_models_equal(reference, other)
    for one in (model, reference):
        square_loss()(one, 0).backward()
    assert_models_equal(model, reference, grads=True)


def test_policies() -> None:
    """Any policy chooses what to wrap, with arguments, before check_fn; what is none is refused, and wraps nothing."""
    model = build(Stack)
    for wrong in (3, "blocks", ModuleWrapPolicy):
        with pytest.raises(ValueError, match="auto_wrap_policy: expected a Policy"):
            apply_activation_checkpointing(model, auto_wrap_policy=wrong)  # type: ignore[arg-type]
    assert not any(isinstance(m, ActivationWrapper) for m in model.modules())
    reentrant = {"checkpoint_impl": CheckpointImpl.REENTRANT}
    policy = CustomPolicy(lambda m: reentrant if m is model.blocks[1] else is_block(m))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear), auto_wrap_policy=policy)
    kinds = [block.checkpoint_impl for block in model.blocks]
    assert kinds == [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT]
    assert type(model.first) is nn.Linear
    model = build(Stack)
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=150)
    apply_activation_checkpointing(model, auto_wrap_policy=by_size)
    assert [type(block) for block in model.blocks] == [CheckpointWrapper] * 3
    assert [type(block.up) for block in model.blocks] == [nn.Linear] * 3
