"""The model of `fullshard train`: a small byte-level GPT whose input knows the last few bytes, not just one.

That input is in `input_embedding.py`. Blocks are pre-norm: causal attention with rotary positions, then an MLP with
squared ReLU; no biases, norms without gains, an untied output head. Nothing depends on how the model is sharded: it
is a plain `nn.Module`.

Letters in shapes: B batch, T sequence, C width, H heads, D = C / H head size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.train.config import VOCABULARY, GPTConfig
from fullshard.train.input_embedding import InputEmbedding

METADATA_KEY = "fullshard.train.model"
TEMPERATURE = 0.8  # of generated text: below 1, likely bytes are drawn more often than the model says


class Attention(nn.Module):
    """Causal multi-head self-attention, `(B, T, C) -> (B, T, C)`."""

    heads: int

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Mix every position with the ones before it. `angles`: cosines and sines of shape `(T, D / 2)`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Normed queries and keys bound the logits, which lets a short run use a high learning rate.
        q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
        q, k = _rotate(q, angles), _rotate(_shift_half(k), angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """`out(relu(up(x)) ** 2)`, `(B, T, C) -> (B, T, C)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position separately."""
        out: Tensor = self.out(F.relu(self.up(x)).square())
        return out


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each on the normed residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Transform `(B, T, C) -> (B, T, C)`; `angles` as in `Attention.forward`."""
        x = x + self.attention(_norm(x), angles)
        mixed: Tensor = self.mlp(_norm(x))
        return x + mixed


class GPT(nn.Module):
    """A byte-level language model.

    Attributes:
        config: the size.
        blocks: the `Block`s in order; shard each of them, then the model.
    """

    config: GPTConfig
    blocks: nn.ModuleList
    cos: Tensor  # (sequence, D / 2), as is `sin`; not saved
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = InputEmbedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        cos, sin = _rotary_angles(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte at every position.

        Args:
            tokens: bytes as int64, shape `(B, T)` with `T <= config.sequence`.

        Returns:
            Logits, shape `(B, T, 256)`.
        """
        length = tokens.shape[1]
        if length > self.config.sequence:
            raise ValueError(f"expected at most {self.config.sequence} tokens, found {length}")
        angles = (self.cos[:length], self.sin[:length])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(_norm(x))
        return logits


def initialize(model: GPT, seed: int) -> None:
    """Initialize the full (unsharded) `model` in place: a pure function of size and `seed`.

    Matrices are normal with standard deviation `1 / sqrt(fan-in)`; those that write into the residual stream
    are zero, so that every block starts as the identity, and so are n-grams and matches, so that what was never seen
    adds nothing; the head starts small. Draws come from a CPU generator of their own, so that every rank, whatever its
    device, starts with equal weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".out.weight", ".ngrams.weight", ".matches.weight")):
                parameter.zero_()
            else:
                scale = {"embedding.bytes.weight": 1.0, "head.weight": 0.02}.get(name, parameter.shape[1] ** -0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def load(path: str | Path) -> GPT:
    """Load a model that `fullshard train` saved.

    Args:
        path: a `model.safetensors` file.

    Returns:
        The model in evaluation mode on the CPU, in the saved dtype.

    Raises:
        ValueError: the file was not written by `fullshard train`, or by another version of it.
    """
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if METADATA_KEY not in metadata:
            raise ValueError(f"{path} is not a model of fullshard train: its metadata has no {METADATA_KEY!r}")
        size = json.loads(metadata[METADATA_KEY])
        if set(size) != {field.name for field in dataclasses.fields(GPTConfig)}:
            raise ValueError(f"{path} was written by another version of fullshard: its model config is {size}")
        model = GPT(GPTConfig(**size))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return model.eval()


def generate(
    model: nn.Module,
    prompt: bytes,
    count: int,
    sequence: int,
    generator: torch.Generator,
    temperature: float = TEMPERATURE,
) -> Iterator[int]:
    """Continue `prompt` byte by byte, sampling from the model's distribution.

    A forward of a sharded model is a collective, so every rank must call this with equal arguments and
    exhaust it. Logits are equal on every rank (each holds the same gathered weights), and so are equally
    seeded generators' draws.

    Args:
        model: maps tokens `(1, T)` to logits `(1, T, 256)`.
        prompt: at least one byte; only the last `sequence` bytes are seen.
        count: number of bytes to generate.
        sequence: longest context of `model`.
        generator: CPU generator; draws one number per byte.
        temperature: below 1, likely bytes are drawn more often than the model says.

    Yields:
        The generated bytes as ints.
    """
    device = next(model.parameters()).device
    context = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([context[-sequence:]], dtype=torch.int64, device=device)
        with torch.no_grad():
            logits = model(tokens)[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        context.append(token)
        yield token


def _norm(x: Tensor) -> Tensor:
    """Scale every vector to a root mean square of 1."""
    return F.rms_norm(x, x.shape[-1:])


def _shift_half(keys: Tensor) -> Tensor:
    """Take the second half of every head's key, `(B, H, T, D)`, from the position before.

    So one layer, not two, can find where the last bytes occurred before and copy what came next there.
    """
    own, other = keys.chunk(2, dim=-1)
    return torch.cat((own, F.pad(other, (0, 0, 1, -1))), dim=-1)


def _rotary_angles(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position's rotation, each of shape `(sequence, D / 2)`."""
    half = config.width // config.heads // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.sequence, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of every head by its position's angles."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
