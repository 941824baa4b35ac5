"""The models and data of the benchmarks: a GPT, and a stack of tiny units that compute next to nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
HEAD_WIDTH = 64
LONGEST_SEQUENCE = 512


@dataclass(frozen=True)
class GPTShape:
    """Size of a GPT and of the batch each rank feeds it (``tokens`` per rank and step)."""

    width: int
    blocks: int
    tokens: int
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        if self.width % self.heads or self.blocks < 1:
            raise ValueError(f"a GPT needs a width that is a multiple of its heads and a block, got {self}")
        if self.tokens % self.sequence:
            raise ValueError(f"tokens per rank must be a multiple of the sequence {self.sequence}, got {self}")

    @property
    def heads(self) -> int:
        return max(1, self.width // HEAD_WIDTH)

    @property
    def sequence(self) -> int:
        return min(self.tokens, LONGEST_SEQUENCE)

    @property
    def parameters(self) -> int:
        rows = 12 * self.blocks * self.width + 13 * self.blocks + 2 * self.vocabulary + self.sequence + 2
        return rows * self.width


class Block(nn.Module):
    """Pre-norm causal self-attention and a four times wider GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        packed = self.query_key_value(self.attention_norm(x))
        packed = packed.view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = packed.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, final norm, untied output head. ``forward`` returns logits."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(shape: GPTShape, step: int, rank: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Input and target tokens, int64 ``(batch, sequence)``: equal for all contestants, new per rank and step.

    Arithmetic progressions modulo the vocabulary: learnable, so that losses move and a wrong gradient shows.
    """
    generator = torch.Generator().manual_seed(100_003 * step + rank)
    batch = shape.tokens // shape.sequence
    start = torch.randint(shape.vocabulary, (batch, 1), generator=generator)
    stride = torch.randint(1, 5, (batch, 1), generator=generator)
    tokens = (start + stride * torch.arange(shape.sequence + 1)) % shape.vocabulary
    tokens = tokens.to(device)
    return tokens[:, :-1], tokens[:, 1:]


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy, fp32 whatever the logits' dtype: a bf16 loss has three digits, too few to compare."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


class SmallUnit(nn.Module):
    """Two norms and four matrices of so few elements that stepping them is nothing but overhead."""

    width = 128

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(self.width) for _ in range(2))
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(32, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return x + torch.stack([matrix.sum() for matrix in self.matrices]).sum()


PARAMETERS_PER_UNIT = 8


class TinyUnit(nn.Module):
    """A linear layer and a norm so small that a step of many of them is nothing but host time."""

    width = 16

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(self.width, self.width), nn.LayerNorm(self.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))
