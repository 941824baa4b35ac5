"""``ignored_params``: what ``fully_shard`` leaves to its owner, in models that train."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from compare import assert_equal, assert_models_equal
from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import nested_units, unit_of
from models import Language, Stack, batch, reference_backward, square_loss, tokens
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 2e-5, "atol": 1e-6}


def build() -> Stack:
    torch.manual_seed(9)
    return Stack()


def shard(model: Stack, rank: Rank, ignored: Iterable[nn.Parameter], **options: Any) -> Stack:
    """Units of blocks and root, all of which are told the same."""
    ignored = set(ignored)
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh, ignored_params=ignored, **options)
    return fully_shard(model, mesh=rank.mesh, ignored_params=ignored, **options)


def biases(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 1]


def a_block(model: Stack) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


def of_the_root(model: Stack) -> list[nn.Parameter]:
    return [*model.first.parameters(), model.last.bias]


def everything(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


CHOICES = [biases, a_block, of_the_root, everything]


def average(parameters: Iterable[nn.Parameter], rank: Rank) -> None:
    """What the owner of ignored parameters has to do."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("choose", CHOICES, ids=lambda choose: choose.__name__)
@pytest.mark.parametrize("reshard", [True, False])
def test_trains_like_the_plain_module(rank: Rank, choose: Any, reshard: bool) -> None:
    """With ignored gradients averaged by hand, the whole model trains like the unsharded one."""
    reference = build()
    model = copy.deepcopy(reference)
    ignored = choose(model)
    shard(model, rank, ignored, reshard_after_forward=reshard)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, foreach=False) for m in (model, reference)]
    for step in range(3):
        square_loss(step)(model, rank.rank).backward()
        average(ignored, rank)
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(type(p) is nn.Parameter for p in ignored)
    managed = {id(p) for p in model.parameters()} - {id(p) for p in ignored}
    assert all(isinstance(p, DTensor) == (id(p) in managed) for p in model.parameters())
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
def test_inside_of_ddp(rank: Rank) -> None:
    """DistributedDataParallel around it averages what was ignored, and is told to leave the shards alone."""
    reference = build()
    model = copy.deepcopy(reference)
    ignored = [*a_block(model), *model.last.parameters()]
    shard(model, rank, ignored)
    sharded = [fqn for fqn, p in model.named_parameters() if isinstance(p, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    ddp = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (model, reference)]
    for step in range(3):
        square_loss(step)(ddp, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
def test_accumulation(rank: Rank) -> None:
    """Microbatches without sync: ignored gradients add up in ``.grad`` as autograd leaves them."""
    reference = build()
    model = copy.deepcopy(reference)
    ignored = biases(model)
    shard(model, rank, ignored)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        square_loss(step)(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, square_loss(step))
    average(ignored, rank)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(1, 2)
def test_unit_without_parameters(rank: Rank) -> None:
    """Where all parameters are ignored nothing travels, and every method still works."""
    reference = build()
    model = shard(copy.deepcopy(reference), rank, ())
    bare = copy.deepcopy(reference)
    shard(bare, rank, bare.parameters())
    assert isinstance(bare, FSDPModule) and not any(unit.parameters for unit in nested_units(bare))
    with record() as seen:
        bare.unshard()
        bare.reshard()
        bare.unshard(async_op=True).wait()
        square_loss()(bare, rank.rank).backward()
        bare.set_requires_gradient_sync(False)
        bare.synchronize_gradients()
        assert bare.get_pending_gradients() == {}
    assert seen == []
    square_loss()(reference, rank.rank).backward()
    assert_models_equal(bare, reference, grads=True, **CLOSE)
    assert_models_equal(model, reference, **CLOSE)


@on_ranks(2)
def test_dtype_and_trainability_are_kept(rank: Rank) -> None:
    """A precision policy does not cast ignored parameters; frozen, integer and float64 ones are as good as others."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4, bias=False)
            self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
            self.table = nn.Parameter(torch.arange(4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kinds.append((self.weight.dtype, self.scale.dtype, self.table.dtype))
            return super().forward(x).double() * self.scale * self.table

    kinds: list[tuple[torch.dtype, ...]] = []
    model = Scaled()
    before = model.scale, model.table
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=rank.mesh, mp_policy=policy, ignored_params={model.scale, model.table})
    model(batch(rank.rank, 0, 2, 4)).sum().backward()
    assert kinds == [(torch.bfloat16, torch.float64, torch.int64)]
    assert (model.scale, model.table) == before or (model.scale is before[0] and model.table is before[1])
    assert model.scale.grad.dtype is torch.float64 and model.table.grad is None
    assert model.weight.grad.dtype is torch.float32


@on_ranks(2)
def test_tied_parameter(rank: Rank) -> None:
    """Ignoring a tied parameter ignores it under all its names."""
    torch.manual_seed(3)
    reference = Language()
    model = copy.deepcopy(reference)
    tied = model.head.weight
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh, ignored_params=[tied])
    fully_shard(model.head, mesh=rank.mesh, ignored_params=[tied])
    fully_shard(model, mesh=rank.mesh, ignored_params=[tied])
    assert model.head.weight is tied and model.embedding.weight is tied

    def loss_of(module: nn.Module, number: int) -> torch.Tensor:
        return module(tokens(number, 0, 3, 5)).square().mean()

    loss_of(model, rank.rank).backward()
    average([tied], rank)
    reference_backward(reference, 2, loss_of)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_parameter_without_a_shape_yet(rank: Rank) -> None:
    """A lazy parameter may be ignored, and gets its shape in the first forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    fully_shard(model, mesh=rank.mesh, ignored_params=model[1].parameters())
    assert model(torch.ones(2, 4)).shape == (2, 3)
    assert model[1].weight.shape == (3, 4) and not isinstance(model[1].weight, DTensor)


@on_ranks(2)
def test_replaced_and_edited_between_steps(rank: Rank) -> None:
    """Ignored parameters may be written to, replaced and unfrozen by their owner at any time."""
    reference = build()
    model = copy.deepcopy(reference)
    shard(model, rank, a_block(model))
    square_loss()(model, rank.rank).backward()
    for one in (model, reference):
        one.blocks[1].up.weight = nn.Parameter(torch.full_like(one.blocks[1].up.weight, 0.1))
        one.blocks[1].down.requires_grad_(False)
        one.zero_grad()
    square_loss(1)(model, rank.rank).backward()
    average(model.blocks[1].up.parameters(), rank)
    reference_backward(reference, 2, square_loss(1))
    assert model.blocks[1].down.weight.grad is None
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_state_dict_and_copy(rank: Rank) -> None:
    """A state dict holds ignored parameters as they are, under the usual names; it loads, and copies are whole."""
    model = build()
    ignored = a_block(model)
    shard(model, rank, ignored)
    square_loss()(model, rank.rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    state = model.state_dict()
    assert list(state) == list(build().state_dict())
    assert state["blocks.1.up.weight"].data_ptr() == model.blocks[1].up.weight.data_ptr()
    for assign in (False, True):
        other = build()
        shard(other, rank, a_block(other))
        other.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign)
        copied = copy.deepcopy(other)
        for one in (other, copied):
            assert type(one.blocks[1].up.weight) is nn.Parameter
            assert_equal(square_loss(2)(one, 0).detach(), square_loss(2)(model, 0).detach(), f"assign={assign}")
    assert unit_of(copied) is not unit_of(other)
