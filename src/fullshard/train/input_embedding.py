"""The input of the model of `fullshard train`: for each position vectors of the byte, of n-grams and of matches.

With single bytes, a model learns spelling, and then copying, by matrix products. Here each position also gets

- vectors of the last 2, 3, ... bytes (n-grams), from a table that their hash points into;
- vectors of the bytes to expect if the text repeats itself (matches): what came after the last 3, 5 and 8 bytes when
  they occurred before in the window.

Both depend on earlier bytes only, and looking up a vector costs no product: the blocks can be few and small, and see
more text in the same time.

Letters in shapes: B batch, T sequence, C width, N length of the longest n-grams.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.train.config import MATCH_LENGTHS, VOCABULARY, GPTConfig


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

    config: GPTConfig

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
        x = self.bytes(tokens) + ngrams.sum(dim=-2) + matches.sum(dim=-2)
        return F.rms_norm(x, x.shape[-1:])
