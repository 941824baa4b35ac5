"""Checkpointing and offloading of activations, on plain and on sharded models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_models_equal
from fullshard import FSDPModule, fully_shard
from fullshard.activation_checkpoint import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from pairwise import pairwise
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "no_reentrant": checkpoint_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "offload": offload_wrapper,
}


class Block(nn.Module):
    """A residual pair of layers; counts its forwards."""

    runs: int

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.runs += 1
        return x + scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks between two layers; the head is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in range(len(self.blocks)):
            x = self.blocks[index](x, scale=0.5)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(4)
    return Model()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    x.requires_grad_()  # reentrant checkpointing of the first layer needs it, sharded or not
    return model(x).square().mean()


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def shard(model: Model, rank: Rank, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh, **options)
    return fully_shard(model, mesh=rank.mesh, **options)


def train_and_compare(model: nn.Module, rank: Rank) -> None:
    """Three steps with the losses, gradients and weights of an unsharded model, whose state dict keys it has."""
    reference = build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (model, reference)]
    for step in range(3):
        loss = loss_of(model, rank.rank, step)
        loss.backward()
        assert_close(loss, loss_of(reference, rank.rank, step), f"loss of step {step}", **CLOSE)
        for other in range(rank.world_size):
            (loss_of(reference, other, step) / rank.world_size).backward()
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **CLOSE)
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_close(state[name].full_tensor(), value, name, **CLOSE)


@on_ranks(2)
@pairwise(wrapper=list(WRAPPERS), check=[is_block, is_linear], reshard=[True, False])
def test_after_sharding(rank: Rank, wrapper: str, check: Callable[[nn.Module], bool], reshard: bool) -> None:
    """Wrappers around sharded blocks, and around layers inside of them, give the gradients of a plain model."""
    model = shard(build(), rank, reshard_after_forward=reshard)
    apply_activation_checkpointing(model, WRAPPERS[wrapper], check)
    found = [type(m) for m in model.modules() if isinstance(m, ActivationWrapper)]
    expected = OffloadWrapper if wrapper == "offload" else CheckpointWrapper
    assert found == [expected] * (3 if check is is_block else 8)
    train_and_compare(model, rank)
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    assert all(isinstance(block, FSDPModule) for block in blocks)
    assert [block.runs for block in blocks] == [6 if check is is_block and wrapper != "offload" else 3] * 3


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_before_sharding(rank: Rank, wrapper: str) -> None:
    """Units of checkpointed blocks: the wrapper is inside of the unit."""
    model = build()
    apply_activation_checkpointing(model, WRAPPERS[wrapper], auto_wrap_policy=ModuleWrapPolicy({Block}))
    shard(model, rank)
    assert all(isinstance(block, FSDPModule) and isinstance(block, ActivationWrapper) for block in model.blocks)
    train_and_compare(model, rank)


@on_ranks(2)
def test_between_steps(rank: Rank) -> None:
    """A model that has run already may be given wrappers, nested ones, and be loaded with a plain model's keys."""
    model = shard(build(), rank)
    loss_of(model, rank.rank, 0).backward()
    model.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    apply_activation_checkpointing(model, check_fn=is_block)
    apply_activation_checkpointing(model, offload_wrapper, lambda m: isinstance(m, CheckpointWrapper))
    assert all(isinstance(block, OffloadWrapper) for block in model.blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    train_and_compare(model, rank)


def test_everything_but_the_root_and_containers() -> None:
    """By default every module below the root is wrapped, but lists stay lists.

    Keys of state dicts carry no prefix, either way.
    """
    model, reference = build(), build()
    apply_activation_checkpointing(model)
    assert type(model) is Model and type(model.blocks) is nn.ModuleList
    wrapped = {name for name, m in model.named_modules() if type(m) is CheckpointWrapper}
    assert {name.replace("_checkpoint_wrapped_module.", "") for name in wrapped} == {
        name for name, m in reference.named_modules() if isinstance(m, (Block, nn.Linear))
    }
    assert list(model.state_dict()) == list(reference.state_dict())
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    model.load_state_dict(other.state_dict())
    reference.load_state_dict(model.state_dict())
    assert_models_equal(reference, other)
    for one in (model, reference):
        loss_of(one, 0, 0).backward()
    assert_models_equal(model, reference, grads=True)


def test_policies() -> None:
    """Any policy chooses what to wrap, with its own arguments; it takes precedence over check_fn."""
    model = build()
    reentrant = {"checkpoint_impl": CheckpointImpl.REENTRANT}
    policy = CustomPolicy(lambda m: reentrant if m is model.blocks[1] else is_block(m))
    apply_activation_checkpointing(model, check_fn=is_linear, auto_wrap_policy=policy)
    kinds = [block.checkpoint_impl for block in model.blocks]
    assert kinds == [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT]
    assert type(model.first) is nn.Linear
    model = build()
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=150)
    apply_activation_checkpointing(model, auto_wrap_policy=by_size)
    assert [type(block) for block in model.blocks] == [CheckpointWrapper] * 3
    assert [type(block.up) for block in model.blocks] == [nn.Linear] * 3


def test_failing_wrapper() -> None:
    """If a wrapper raises, or what should be a policy is none, the model is as it was."""
    model = build()
    blocks = list(model.blocks)

    def fail_late(module: nn.Module) -> nn.Module:
        if module is blocks[2]:
            raise KeyError
        return checkpoint_wrapper(module)

    with pytest.raises(KeyError):
        apply_activation_checkpointing(model, fail_late, is_block)
    for policy in (3, "blocks", ModuleWrapPolicy):
        with pytest.raises(ValueError, match="auto_wrap_policy: expected a Policy"):
            apply_activation_checkpointing(model, auto_wrap_policy=policy)  # type: ignore[arg-type]
    assert list(model.blocks) == blocks
    assert not any(isinstance(m, ActivationWrapper) for m in model.modules())
