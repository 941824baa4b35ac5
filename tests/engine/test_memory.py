"""Memory in units of full buffers: how many are alive at each moment of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from compare import assert_close
from fullshard import fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.memory import Buffer, alias
from models import tiny_units
from ranks import Rank, on_ranks

BLOCKS, WIDTH = 6, 32
BLOCK_NUMEL = WIDTH * WIDTH + WIDTH


def full_bytes(module: nn.Module) -> int:
    """Bytes in full buffers (and messages in flight) of the unit of this module alone."""
    return sum(bucket.allocated_bytes for bucket in unit_of(module).buckets)


def all_full_bytes(model: nn.Module) -> int:
    return sum(bucket.allocated_bytes for unit in nested_units(model) for bucket in unit.buckets)


def build(rank: Rank, **options: bool) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    with tiny_units(up_to=0):
        model = nn.Sequential(*(fully_shard(block, mesh=rank.mesh, **options) for block in blocks))
        return fully_shard(model, mesh=rank.mesh, **options)


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def backward(output: torch.Tensor) -> None:
    output.square().mean().backward()


@on_ranks(4)
def test_nothing_is_gathered_at_rest(rank: Rank) -> None:
    """No unsharded buffer has memory before the first forward, after a step, or after a no-grad forward.

    A rank holds its share of the parameters, plus at most the alignment of each; an unsharded unit its parameters,
    their alignment, and no message once the all-gather is done.
    """
    model = build(rank)
    assert all_full_bytes(model) == 0
    held = sum(bucket.shard_buffer.nbytes for unit in nested_units(model) for bucket in unit.buckets)
    share = 4 * BLOCKS * BLOCK_NUMEL // rank.world_size
    assert share <= held <= share + BLOCKS * 2 * 64
    for _ in range(2):
        backward(model(inputs()))
        assert all_full_bytes(model) == 0
    with torch.no_grad():
        model(inputs())
    assert all_full_bytes(model) == 0
    model[0].unshard()
    assert 4 * BLOCK_NUMEL <= full_bytes(model[0]) <= 4 * BLOCK_NUMEL + 2 * 64 * rank.world_size
    assert all(full_bytes(block) == 0 for block in model[1:])
    model[0].reshard()
    assert full_bytes(model[0]) == 0


@on_ranks(2)
def test_an_optimizer_holds_no_deleted_model(rank: Rank) -> None:
    """It has the sharded parameters, and what has watched its steps nothing else of the model."""
    model = build(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model(inputs()))
    optimizer.step()
    alive = [weakref.ref(parameter) for unit in nested_units(model) for parameter in unit.parameters]
    del model
    assert not any(ref() is not None for ref in alive)
    optimizer.step()


@on_ranks(2)
def test_steps_are_seen_by_units_that_parameters_move_to(rank: Rank) -> None:
    """An optimizer that has stepped before marks the unit out of date that has its parameters now."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    model[0](x).sum().backward()
    optimizer.step()
    fully_shard(model, reshard_after_forward=False)  # takes the tied weight
    model(x)  # and stays unsharded
    optimizer.step()
    with torch.no_grad():
        weight = model[0].weight.full_tensor()
        assert_close(model(x), x @ weight.t() @ weight.t(), "output", rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_full_gradients_are_freed_as_backward_goes(rank: Rank) -> None:
    """At any moment of backward the full gradients of at most two units are alive, and none after it."""
    model = build(rank)
    backward(model(inputs()))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def remember(parameter: nn.Parameter) -> None:
        nonlocal most
        alive.append(weakref.ref(parameter.grad))
        most = max(most, sum(gradient() is not None for gradient in alive))

    for unit in nested_units(model):
        for parameter in unit.parameters:
            parameter.unsharded.register_post_accumulate_grad_hook(remember)
    backward(model(inputs()))
    assert len(alive) == 2 * BLOCKS
    assert most <= 2 * 2
    assert all(gradient() is None for gradient in alive)
    assert all(parameter.unsharded.grad is None for unit in nested_units(model) for parameter in unit.parameters)


@on_ranks(2)
def test_sharded_gradients_are_freed_with_zero_grad(rank: Rank) -> None:
    """zero_grad drops the memory of the reduced gradients: nothing else refers to it."""
    model = build(rank)
    backward(model(inputs()))
    locals_ = [weakref.ref(p.grad._local_tensor) for p in model.parameters()]
    model.zero_grad()
    assert all(local() is None for local in locals_)


# ---------------------------------------------------------------- buffers, without ranks


def test_buffer_is_freed_and_refilled_in_place() -> None:
    """A tensor made on a buffer is the same memory again after free and allocate."""
    buffer = Buffer(8, torch.float32, torch.device("cpu"))
    tensor = buffer.tensor(2, (2, 3), (3, 1))
    assert buffer.allocated_bytes == 32
    buffer.free()
    buffer.free()
    assert buffer.allocated_bytes == 0 and tensor.untyped_storage().size() == 0
    buffer.allocate()
    buffer.allocate()
    buffer.tensor(0, (8,), (1,)).copy_(torch.arange(8.0))
    assert tensor.tolist() == [[2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize("make", [lambda t: t[1:], lambda t: t.view(6)], ids=["rows", "flat"])
def test_alias_shares_memory_but_not_the_version(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Writing through an alias changes the tensor without bumping its version counter."""
    base = torch.zeros(2, 3)
    tensor = make(base)
    same = alias(tensor, 1, (2,), (1,))
    version = base._version
    same.fill_(7.0)
    assert base._version == version
    assert tensor.flatten()[1:3].tolist() == [7.0, 7.0]
    assert same.data_ptr() == tensor.data_ptr() + 4
