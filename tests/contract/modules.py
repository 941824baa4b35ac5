"""Models that others of the tests are not: own parameters, heads read outside, flags changed inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import Block

DIM, CLASSES = 6, 5


class Transformer(nn.Module):
    """Blocks with parameters of the root between them, a norm, a head, and ways of using them from outside.

    Args:
        depth: blocks.
        group: blocks per outer block; 0: no outer ones.
        tied: whether the head has the weight of the embedding.
        repeat: how often each block runs.
    """

    def __init__(self, depth: int = 2, group: int = 0, tied: bool = False, repeat: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        blocks = [Block(DIM) for _ in range(depth)]
        if group:
            blocks = [Outer(blocks[i : i + group]) for i in range(0, depth, group)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, DIM if tied else CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.repeat = repeat
        self.checkpointed: bool | None = None
        self.inside: Callable[[], None] | None = None  # called in forward, after the first block
        self.frozen_inside: list[str] = []  # modules whose parameters forward freezes while the blocks run
        self.backward_inside = False

    def forward(self, x: torch.Tensor, hidden: bool = False) -> torch.Tensor:
        for name in self.frozen_inside:
            self.get_submodule(name).requires_grad_(False)
        x = self.embedding(x)
        for number, block in enumerate(self.blocks):
            for _ in range(self.repeat):
                x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
            x = x * self.scale
            if number == 0 and self.inside is not None:
                self.inside()
        x = self.norm(x)
        if self.backward_inside:
            loss = self.head(x).square().mean()
            loss.backward()
            return loss.detach()
        for name in self.frozen_inside:
            self.get_submodule(name).requires_grad_(True)
        return x if hidden else self.head(x)

    def loss_by_weight(self, hidden: torch.Tensor) -> torch.Tensor:
        """A loss computed from outside with the weight of the head."""
        return F.linear(hidden, self.head.weight).square().mean()


class Outer(nn.Module):
    """Blocks in a block, with an own parameter."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(blocks)
        self.shift = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x + self.shift


class Branches(nn.Module):
    """Two encoders that either both run or one of them, with a head that sees what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = Block(DIM), Block(DIM), nn.Linear(DIM, CLASSES)
        self.use = "both"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = 0
        if self.use != "right":
            out = out + self.left(x)
        if self.use != "left":
            out = out + self.right(x)
        return self.head(out)


class Conv(nn.Module):
    """Parameters of more than two dims, batch norm with buffers, uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3 * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x[:, None]))).flatten(1))
