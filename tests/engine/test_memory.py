"""Memory in units of full buffers: how many are alive at each moment of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compare import assert_close
from fullshard import fully_shard
from fullshard.memory import Buffer, alias
from ranks import Rank, on_ranks


@on_ranks(2)
def test_an_earlier_optimizer_steps_a_tied_weight(rank: Rank) -> None:
    """An optimizer that has stepped before marks the unit as out of date that owns its parameter since then."""
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    fully_shard(tied[0])
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    tied[0](x).sum().backward()
    optimizer.step()
    fully_shard(tied, reshard_after_forward=False)  # takes the tied weight
    tied(x)  # and stays unsharded
    optimizer.step()
    with torch.no_grad():
        weight = tied[0].weight.full_tensor()
        assert_close(tied(x), x @ weight.t() @ weight.t(), "output", rtol=1e-5, atol=1e-5)


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
def test_alias_shares_memory_but_not_the_version(make) -> None:
    """Writing through an alias changes the tensor without bumping its version counter."""
    base = torch.zeros(2, 3)
    tensor = make(base)
    same = alias(tensor, 1, (2,), (1,))
    version = base._version
    same.fill_(7.0)
    assert base._version == version
    assert tensor.flatten()[1:3].tolist() == [7.0, 7.0]
    assert same.data_ptr() == tensor.data_ptr() + 4
