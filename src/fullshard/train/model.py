"""The model of `fullshard train`: a small byte-level GPT whose input knows the last few bytes, not just one.

Each position also gets vectors of the last 2, 3, ... bytes (n-grams), from a table that their hash points into, and of
the bytes to expect if the text repeats itself (matches): those that came after the last 3, 5 and 8 bytes when they
occurred before in the window. Both depend on earlier bytes only, and looking up a vector costs no product: the blocks
can be few and small, and see more text in the same time. Blocks are pre-norm: causal attention with rotary positions,
then an MLP with squared ReLU; no biases, norms without gains, an untied output head.

Letters in shapes: B batch, T sequence, C width, H heads, D = C / H head size, N length of the longest n-grams.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from fullshard.train.config import MATCH_LENGTHS, VOCABULARY, GPTConfig

METADATA_KEY = "fullshard.train.model"


def ngram_codes(tokens: Tensor, longest: int) -> list[Tensor]:
    """Return N = `longest` numbers `(B, T)`, for the last 1, 2, ... N bytes up to each position of `(B, T)` bytes.

    Up to 7 bytes, different ones have different numbers; of more, almost always. Places before the first position count
    as a value that is no byte.
    """
    codes = [tokens + 1]
    for length in range(2, longest + 1):
        earlier = F.pad(tokens + 1, (length - 1, 0))[:, : tokens.shape[1]]
        codes.append(codes[-1] * 257 + earlier)  # of more than 7 bytes, modulo 2^64
    return codes


def ngram_rows(tokens: Tensor, longest: int, rows: int) -> Tensor:
    """Return the table row of each n-gram of 2, 3, ... N bytes that ends at each position, `(B, T) -> (B, T, N - 1)`.

    Those of length n are between `(n - 2) * rows` and `(n - 1) * rows`; different n-grams may share a row.
    """
    found = []
    for number, code in enumerate(ngram_codes(tokens, longest)[1:]):
        mixed = (code % 0x7FFFFFFF) * 0x2C1B3C6D % 2**31  # the upper bits depend on all bytes, the lower ones do not
        found.append(mixed * rows // 2**31 + number * rows)
    return torch.stack(found, dim=-1)


def match_rows(tokens: Tensor) -> Tensor:
    """Return the byte to expect if the text repeats itself, for each of `MATCH_LENGTHS`, `(B, T) -> (B, T, 3)`.

    That is the byte after the last earlier occurrence of the last n bytes, or 256 if these n bytes are new in the
    window, plus 257 for each length before.
    """
    found = []
    codes = ngram_codes(tokens, max(MATCH_LENGTHS))
    for number, length in enumerate(MATCH_LENGTHS):
        # Equal ones lie side by side then, in the order of their positions.
        ordered, positions = codes[length - 1].sort(dim=1, stable=True)
        after = torch.where(ordered[:, 1:] == ordered[:, :-1], positions[:, :-1] + 1, 0)
        following = torch.zeros_like(tokens).scatter(1, positions[:, 1:], after)  # position of the byte; 0: none
        expected = tokens.gather(1, following).masked_fill(following == 0, VOCABULARY)
        found.append(expected + number * (VOCABULARY + 1))
    return torch.stack(found, dim=-1)


class InputEmbedding(nn.Module):
    """Vectors of the byte, the n-grams and the matches at each position, added up and normed, `(B, T) -> (B, T, C)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.ngrams = nn.Embedding((config.ngrams - 1) * config.ngram_rows, config.width)
        self.matches = nn.Embedding(len(MATCH_LENGTHS) * (VOCABULARY + 1), config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up bytes as int64."""
        ngrams = self.ngrams(ngram_rows(tokens, self.config.ngrams, self.config.ngram_rows))
        matches = self.matches(match_rows(tokens))
        return _norm(self.bytes(tokens) + ngrams.sum(dim=-2) + matches.sum(dim=-2))


class Attention(nn.Module):
    """Causal multi-head self-attention, `(B, T, C) -> (B, T, C)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Mix every position with the ones before it. `angles`: cosines and sines of shape `(T, D / 2)`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Normed queries and keys bound the logits, which lets a short run use a high learning rate.
        q, k = _rotate(_norm(q), angles), _rotate(_shift_half(_norm(k)), angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """`out(relu(up(x)) ** 2)`, `(B, T, C) -> (B, T, C)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = nn.Linear(4 * config.width, config.width, bias=False)

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
    """A byte-level language model."""

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
        """Return the logits of the next byte at every position, `(B, T) -> (B, T, 256)` with `T <= config.sequence`."""
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
    """Initialize the unsharded `model` in place: a pure function of size and `seed`, the same on all devices.

    Matrices are normal with standard deviation `1 / sqrt(fan-in)`. Those that write into the residual stream are zero,
    so that every block starts as the identity; so are n-grams and matches, so that new ones add nothing.
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
    """Load a `model.safetensors` of `fullshard train`, in evaluation mode on the CPU, in the saved dtype.

    Raises:
        ValueError: the file was not written by `fullshard train`.
    """
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if METADATA_KEY not in metadata:
            raise ValueError(f"{path} is not a model of fullshard train: its metadata has no {METADATA_KEY!r}")
        model = GPT(GPTConfig(**json.loads(metadata[METADATA_KEY])))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return model.eval()


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
