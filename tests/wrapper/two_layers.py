"""A model of two layers, its wrapper, and the state of its optimizer, for tests of optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.optimizers import joined
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.checkpoint.state.optimizer.state import optimizer_state
from ranks import Rank

State = dict[str, Any]
BOTH = pytest.mark.parametrize("kind", ["flat", "original"])


class Small(nn.Module):
    """Two layers, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, *, first: bool = True) -> torch.Tensor:
        return self.one(x) + self.two(x) if first else self.two(x)


def small(rank: Rank, kind: str = "original", **options: Any) -> FSDP:
    """Each layer a unit."""
    model = Small()
    if kind != "fully":
        for name in ("one", "two"):
            setattr(model, name, FSDP(getattr(model, name), use_orig_params=kind == "original", device_mesh=rank.mesh))
    return FSDP(model, use_orig_params=kind == "original", device_mesh=rank.mesh, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1, **options: Any) -> None:
    for index in range(times):
        model(torch.full((2, 3), 1.0 + index), **options).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(times: int = 2, **options: Any) -> tuple[Small, torch.optim.Optimizer]:
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, times, **options)
    return model, optimizer


def own(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return joined(optimizer_state(model, optimizer)["state"])


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> State:
    """What the optimizer holds after loading."""
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    return own(model, optimizer)
