"""Llama as torchtitan trained it in 2024, and MPT as llm-foundry did, on the meta device: what their kernels keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """Size of a Llama, and which of its operations are one kernel."""

    width: int
    blocks: int
    heads: int  # of queries
    key_heads: int  # of keys and values
    hidden: int  # width of the MLP
    vocabulary: int
    fused_norm: bool = False  # a norm keeps its input and a number per token; else it is written out in fp32
    fused: bool = False  # so are chains of elementwise operations, as a compiler makes them, which keep their inputs


LLAMAS = {
    "Llama 2 7B": LlamaShape(4096, 32, 32, 32, 11008, 32000),
    "Llama 2 13B": LlamaShape(5120, 40, 40, 40, 13824, 32000),
    "Llama 2 34B": LlamaShape(8192, 48, 64, 8, 22016, 32000),
    "Llama 2 70B": LlamaShape(8192, 80, 64, 8, 28672, 32000),
    "Llama 3 8B": LlamaShape(4096, 32, 32, 8, 14336, 128256),
    "Llama 3 70B": LlamaShape(8192, 80, 64, 8, 28672, 128256),
}


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel each way: it keeps its input, its weight, and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight  # reads and writes the same bytes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return gradients[0] * x, torch.empty_like(weight)


class _FusedRotary(torch.autograd.Function):
    """Rotation as one kernel each way, of which nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 1.0, None


class _FusedGate(torch.autograd.Function):
    """``silu(gate) * up`` as one kernel each way, which keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.addcmul(gate, gradients[0], up), torch.empty_like(up)


class RMSNorm(nn.Module):
    """In fp32 whatever the dtype of its input."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.weight, self.fused = nn.Parameter(torch.ones(width)), fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return _FusedNorm.apply(x, self.weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def _rotated(x: Tensor, angles: Tensor, fused: bool) -> Tensor:
    if fused:
        return _FusedRotary.apply(x, angles)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Attention(nn.Module):
    """Causal self-attention. Keys and values are repeated for the queries that share them."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.wv = nn.Linear(shape.width, shape.key_heads * self.head, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        query, key, value = (layer(x).view(batch, sequence, -1, self.head) for layer in (self.wq, self.wk, self.wv))
        query, key = (_rotated(each, angles, self.shape.fused) for each in (query, key))
        key, value = (self._repeated(each) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(attended.transpose(1, 2).contiguous().view(batch, sequence, -1))

    def _repeated(self, x: Tensor) -> Tensor:
        times = self.shape.heads // self.shape.key_heads
        if times == 1:
            return x
        batch, sequence, heads, width = x.shape
        return x.unsqueeze(3).expand(batch, sequence, heads, times, width).reshape(batch, sequence, -1, width)


class FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.fused = shape.fused

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        product = _FusedGate.apply(gate, up) if self.fused else F.silu(gate) * up
        return self.w2(product)


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        fused = shape.fused or shape.fused_norm
        self.attention_norm, self.ffn_norm = RMSNorm(shape.width, fused), RMSNorm(shape.width, fused)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape, sequence: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        angles = torch.empty(1, sequence, 1, shape.width // shape.heads // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles, persistent=False)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.blocks))
        self.norm = RMSNorm(shape.width, shape.fused_norm)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x)).float()


# ------------------------------------------------------------------ MPT

MPT_VOCABULARY = 50368


@dataclass(frozen=True)
class MPTShape:
    width: int
    blocks: int
    heads: int


MPTS = {
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
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self, shape: MPTShape, sequence: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(MPT_VOCABULARY, shape.width), nn.Embedding(sequence, shape.width)
        self.blocks = nn.ModuleList(MPTBlock(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm_f = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)
