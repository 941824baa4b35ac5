"""MPT as llm-foundry trains it in its benchmarks, on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50368


@dataclass(frozen=True)
class MPTShape:
    """Size of an MPT: width, blocks and heads."""

    width: int
    blocks: int
    heads: int


SHAPES = {
    "MPT-125m": MPTShape(768, 12, 12),
    "MPT-350m": MPTShape(1024, 24, 16),
    "MPT-760m": MPTShape(1536, 24, 12),
    "MPT-1b": MPTShape(2048, 24, 16),
    "MPT-3b": MPTShape(2560, 32, 20),
    "MPT-7b": MPTShape(4096, 32, 32),
    "MPT-13b": MPTShape(5120, 40, 40),
    "MPT-30b": MPTShape(7168, 48, 56),
    "MPT-70b": MPTShape(8192, 80, 64),
}


class MPTBlock(nn.Module):
    """Pre-norm causal self-attention and a four times wider GELU MLP, with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        packed = self.wqkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = (packed[:, :, each].transpose(1, 2) for each in range(3))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out_proj(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))  # type: ignore[no-any-return]


class MPT(nn.Module):
    """Token and position embeddings, blocks, norm, and logits by the token embedding."""

    def __init__(self, shape: MPTShape, sequence: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(sequence, shape.width)
        self.blocks = nn.ModuleList(MPTBlock(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm_f = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)
