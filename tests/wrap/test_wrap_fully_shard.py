"""Plans applied with ``fully_shard``: who holds what is as planned, and training as without sharding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from compare import assert_models_equal
from fullshard import fully_shard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.wrap import ModuleWrapPolicy, plan_for
from pairwise import pairwise
from ranks import Rank, on_ranks


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Blocks between a layer and a head; ``ties`` chooses what is shared."""

    def __init__(self, ties: str) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 6, bias=False)
        if ties == "head":
            self.head.weight = self.first.weight
        if ties == "blocks":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight
        if ties == "module":
            self.blocks[2].linear = self.blocks[0].linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


BLOCKS, LAYERS, BOTH = (Block,), (nn.Linear, nn.LayerNorm), (Block, nn.Linear)


@on_ranks(2)
@pairwise(ties=["", "head", "blocks", "module"], classes=[BLOCKS, LAYERS, BOTH])
def test_trains_as_planned(rank: Rank, ties: str, classes: Any) -> None:
    """Every unit holds the parameters that the plan lists, and training equals the unsharded model's.

    A module in two units that is not one itself belongs to the root's.
    """
    model = Model(ties)
    reference = copy.deepcopy(model)
    plan = plan_for(ModuleWrapPolicy(classes), model, root_kwargs={"mesh": rank.mesh})
    plan.apply(lambda module, kwargs, owned_by_ancestor: fully_shard(module, **kwargs))
    fully_shard(model, mesh=rank.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (model, reference)]
    for step in range(3):
        loss_of(model, rank.rank, step).backward()
        for other in range(rank.world_size):
            (loss_of(reference, other, step) / rank.world_size).backward()
        assert_models_equal(model, reference, grads=True, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(unit_of(module) is not None for module in plan.modules)
    held = {unit.name: sorted(sorted(p.fqns) for p in unit.parameters) for unit in nested_units(model)}
    assert held == {name: sorted(sorted(names) for names in parameters) for name, parameters in plan.owners().items()}
