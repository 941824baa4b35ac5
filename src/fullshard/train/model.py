"""The model of `fullshard train`: a small byte-level GPT whose input knows the last few bytes, not just one.

With single bytes, a model learns spelling, and then copying, by matrix products. Here each position also gets

- vectors of the last 2, 3, ... bytes (n-grams), from a table that their hash points into;
- vectors of the bytes to expect if the text repeats itself (matches): what came after the last 3, 5 and 8 bytes when
  they occurred before in the window.

Both depend on earlier bytes only, and looking up a vector costs no product: the blocks can be few and small, and see
more text in the same time.

Blocks are pre-norm: causal attention with rotary positions, then an MLP with squared ReLU; no biases, norms without
gains, an untied output head. Nothing depends on how the model is sharded: it is a plain `nn.Module`.

Letters in shapes: B batch, T sequence, C width, H heads, D = C / H head size, N length of the longest n-grams.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fullshard.train.config import MATCH_LENGTHS, VOCABULARY, ConfigError, GPTConfig
from fullshard.train.run_folder import MODEL
from fullshard.train.summary import as_text, escape

METADATA_KEY = "fullshard.train.model"
TEMPERATURE = 0.8  # of generated text: below 1, likely bytes are drawn more often than the model says


def ngram_codes(tokens: Tensor, longest: int) -> list[Tensor]:
    """Return a number for the last 1, 2, ... `longest` bytes up to each position.

    Up to 7 bytes, different ones have different numbers; of more, almost always. Where an n-gram begins before the
    first position, what is missing counts as a value that is no byte.

    Args:
        tokens: bytes as int64, shape `(B, T)`.
        longest: N.

    Returns:
        N tensors, int64 of shape `(B, T)`.
    """
    codes = [tokens + 1]
    for length in range(2, longest + 1):
        earlier = F.pad(tokens + 1, (length - 1, 0))[:, : tokens.shape[1]]
        codes.append(codes[-1] * 257 + earlier)  # of more than 7 bytes, modulo 2^64
    return codes


def ngram_rows(tokens: Tensor, longest: int, rows: int) -> Tensor:
    """Return the table row of each n-gram of 2, 3, ... `longest` bytes that ends at each position.

    Different n-grams may share a row.

    Args:
        tokens: bytes as int64, shape `(B, T)`.
        longest: N.
        rows: number of rows for the n-grams of each length.

    Returns:
        int64, shape `(B, T, N - 1)`; those of length n are between `(n - 2) * rows` and `(n - 1) * rows`.
    """
    found = []
    for number, code in enumerate(ngram_codes(tokens, longest)[1:]):
        mixed = (code % 0x7FFFFFFF) * 0x2C1B3C6D % 2**31  # the upper bits depend on all bytes, the lower ones do not
        found.append(mixed * rows // 2**31 + number * rows)
    return torch.stack(found, dim=-1)


def match_rows(tokens: Tensor) -> Tensor:
    """Return what to expect if the text repeats itself: the byte after the last earlier occurrence of the last n bytes.

    Args:
        tokens: bytes as int64, shape `(B, T)`.

    Returns:
        int64, shape `(B, T, len(MATCH_LENGTHS))`: for each n the byte, or 256 if these n bytes are new in the window,
        plus 257 for each length before.
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
) -> bytes:
    """Continue `prompt` byte by byte, sampling from the model's distribution.

    A forward of a sharded model is a collective, so every rank must call this with equal arguments. Logits are equal
    on every rank (each holds the same gathered weights), and so are equally seeded generators' draws.

    Args:
        model: maps tokens `(1, T)` to logits `(1, T, 256)`.
        prompt: at least one byte; only the last `sequence` bytes are seen.
        count: number of bytes to generate.
        sequence: longest context of `model`.
        generator: CPU generator; draws one number per byte.
        temperature: below 1, likely bytes are drawn more often than the model says.

    Returns:
        The generated bytes.
    """
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([text[-sequence:]], dtype=torch.int64, device=device)
        with torch.no_grad():
            logits = model(tokens)[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text[len(prompt) :])


def text_from(run: Path, prompt: str, count: int, temperature: float, seed: int) -> str:
    """Return the prompt and `count` generated bytes as text that is safe to print.

    Args:
        run: folder of a run, or a file of weights.
        prompt: at least one character.
        count: number of bytes.
        temperature: below 1, likely bytes are drawn more often than the model says.
        seed: decides what is drawn.

    Raises:
        ConfigError: the prompt or the temperature is out of range, or the file holds no model of `fullshard train`.
    """
    if not prompt:
        raise ConfigError("--prompt must have at least one character")
    if not 0 < temperature < math.inf:
        raise ConfigError(f"--temperature must be a number above 0, found {temperature}")
    path = run / MODEL if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"there is no {path}: pass the folder of a finished run of fullshard train")
    try:
        model = load(path)
    except (ValueError, OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    made = generate(model, prompt.encode("utf-8"), count, model.config.sequence, generator, temperature)
    return escape(prompt + as_text(made))


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
