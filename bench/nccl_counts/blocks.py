"""Llama blocks in their true shapes, whose products are memory that nobody has written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Configuration:
    """A model on a mesh."""

    width: int
    key_width: int  # of all keys, or values, of a token
    hidden: int  # width of the feed-forward layer
    ranks: int
    shards: int  # ranks of the shard axis; the other axis replicates

    @property
    def parameters(self) -> int:
        """Of a block."""
        return self.width * (2 * self.width + 2 * self.key_width + 3 * self.hidden + 2)


CONFIGURATIONS = {
    "8B on 8": Configuration(4096, 1024, 14336, 8, 8),
    "8B on 128": Configuration(4096, 1024, 14336, 128, 128),
    "70B on 256": Configuration(8192, 1024, 28672, 256, 256),
    "70B on 256, 8 shards": Configuration(8192, 1024, 28672, 256, 8),
    "1B on 8": Configuration(2048, 512, 8192, 8, 8),
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return x.new_empty(x.shape), weight.new_empty(weight.shape)


class Product(nn.Module):
    """A matrix, or the vector of a norm, and an output and gradients of the right shapes."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)


class LlamaBlock(nn.Module):
    """Nine parameters: two norms, four matrices of attention, three of the feed-forward layer."""

    def __init__(self, shape: Configuration) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Product(shape.width), Product(shape.width)
        self.wq, self.wk = Product(shape.width, shape.width), Product(shape.key_width, shape.width)
        self.wv, self.wo = Product(shape.key_width, shape.width), Product(shape.width, shape.width)
        self.w1, self.w2 = Product(shape.hidden, shape.width), Product(shape.width, shape.hidden)
        self.w3 = Product(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.wo(self.wq(y) + self.wk(y).sum() + self.wv(y).sum())
        y = self.ffn_norm(x)
        return x + self.w2(self.w1(y) * self.w3(y))
