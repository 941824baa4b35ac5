"""Plain parameters that are put below a sharded root after it was sharded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as composable_ddp
from torch.nn.parallel import DistributedDataParallel

from front_ends import FrontEnd, build, each_front_end, unwrapped
from fullshard import fully_shard
from models import Mlp, batch
from ranks import Rank, on_ranks


class Adapter(nn.Module):
    """A layer with a low-rank addition."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def warnings_of(model: nn.Module, rank: Rank) -> list[str]:
    """Those about parameters, of two steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model(batch(rank.rank, step, 4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "were put into a sharded model" in str(each.message)]


@on_ranks(1, 2)
@each_front_end
@pytest.mark.parametrize("base", ["trained", "frozen"])
@pytest.mark.parametrize("steps", [0, 1])
def test_added_parameters_are_reported_once(rank: Rank, front_end: FrontEnd, base: str, steps: int) -> None:
    """A warning at the first step names those that the optimizer trains, by their FQNs in the user's model."""
    model = front_end.wrap(build(Mlp, 6, 7, 3), rank)
    if steps:
        assert not warnings_of(model, rank)
    if base == "frozen":
        model.requires_grad_(False)
    layers = unwrapped(model).layers
    layers[0] = Adapter(layers[0])
    found = warnings_of(model, rank)
    if rank.world_size == 1:
        assert not found
        return
    assert len(found) == 1
    assert "layers.0.down.weight, layers.0.up.weight;" in found[0]


def all_reduce(parameter: Any) -> None:
    dist.all_reduce(parameter.grad)


AVERAGED: dict[str, Callable[[nn.Module], Any]] = {
    "frozen": lambda m: m.requires_grad_(False),
    "DistributedDataParallel": DistributedDataParallel,
    "composable DistributedDataParallel": composable_ddp,
    "sharded": fully_shard,
    "hooks": lambda m: m.weight.register_post_accumulate_grad_hook(all_reduce),
}


@on_ranks(2)
@each_front_end
@pytest.mark.parametrize("how", AVERAGED)
def test_those_that_are_averaged_otherwise_are_not_reported(rank: Rank, front_end: FrontEnd, how: str) -> None:
    """No warning where gradients are averaged by other means, or where there are none."""
    model = front_end.wrap(build(Mlp, 6, 7, 3), rank)
    layers = unwrapped(model).layers
    layers[0] = adapter = Adapter(layers[0])
    for name in ("down", "up"):
        made = AVERAGED[how](getattr(adapter, name))
        if isinstance(made, nn.Module):
            setattr(adapter, name, made)
    assert not warnings_of(model, rank)


@on_ranks(2)
@each_front_end
def test_ignored_parameters_are_not_reported(rank: Rank, front_end: FrontEnd) -> None:
    """Parameters that sharding was told to ignore are left to their owner without a word, in copies too."""
    plain = build(Mlp, 6, 7, 3)
    model = front_end.wrap(plain, rank, [], **front_end.ignoring(plain.layers[1].parameters()))
    for each in (copy.deepcopy(model), model):
        assert not warnings_of(each, rank)
