"""A model whose parameters are hard to cut."""

from __future__ import annotations

import torch
from torch import nn


class Uneven(nn.Module):
    """Rows that no mesh divides, fewer rows than ranks, a scalar, a transposed parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 1), nn.Linear(1, 5)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x @ self.transposed + self.empty.sum()
