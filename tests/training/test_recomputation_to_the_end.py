"""Recomputation that does not stop at the last saved tensor."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fullshard import fully_shard
from fullshard.engine.ownership import unit_of
from ranks import Rank, on_ranks


class Offset(nn.Module):
    """Adds a parameter; its backward needs nothing that was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


class Shifted(nn.Module):
    """A layer, and an offset that is added last: its backward comes before it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.offset = nn.Linear(6, 6), Offset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.offset(torch.tanh(self.layer(x))), x, use_reentrant=False)


@on_ranks(2)
def test_units_that_are_recomputed_after_their_own_backward_are_resharded(rank: Rank) -> None:
    """No backward comes that would free them."""
    model = Shifted()
    for module in (model.offset, model):
        fully_shard(module, mesh=rank.mesh)
    with set_checkpoint_early_stop(False):
        for _ in range(2):
            model(torch.ones(2, 6)).mean().backward()
            assert not unit_of(model.offset).is_unsharded
