"""The model by itself, unsharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fullshard.train.config import MATCH_LENGTHS, GPTConfig
from fullshard.train.model import (
    GPT,
    initialize,
    load,
    match_rows,
    ngram_rows,
)

CONFIG = GPTConfig(layers=2, width=16, heads=2, sequence=12, ngrams=4, ngram_rows=64)


def disturbed(config: GPTConfig) -> GPT:
    """A model in which no weight is zero, so that every position can influence every later one."""
    made = GPT(config)
    initialize(made, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


@pytest.fixture
def model() -> GPT:
    """A small disturbed model."""
    return disturbed(CONFIG)


@pytest.mark.parametrize("letters", [2, 256])
def test_model_is_causal(letters: int) -> None:
    """Changing a byte changes no earlier logits, and does change those at it, whether the text repeats itself or not.

    Repeats are sorted to be found, so that every position is tried: in texts of two letters each is in many of them.
    """
    config = GPTConfig(layers=1, width=16, heads=2, sequence=40, ngrams=4, ngram_rows=64)
    model = disturbed(config)
    tokens = torch.randint(0, letters, (3, 40), generator=torch.Generator().manual_seed(0))
    before = model(tokens)
    for at in range(40):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % letters
        after = model(changed)
        assert torch.equal(before[:, :at], after[:, :at])
        assert all(one.ne(other).any() for one, other in zip(before[:, at], after[:, at], strict=True))


def test_ngrams_end_at_their_position() -> None:
    """A byte has a part in the n-grams that end at it or up to n - 1 bytes later, and in no others."""
    tokens = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    differ = (ngram_rows(tokens, 4, 2**20) != ngram_rows(changed, 4, 2**20))[0]
    assert [differ[:, n - 2].nonzero().flatten().tolist() for n in (2, 3, 4)] == [[7, 8], [7, 8, 9], [7, 8, 9, 10]]


def test_equal_ngrams_have_equal_rows_anywhere() -> None:
    """Rows depend on the n bytes alone, each length has rows of its own, and the start of a window is no byte."""
    rows = ngram_rows(torch.tensor([[1, 2, 3, 4, 5, 9, 2, 3, 4, 5]]), 4, 1000)[0]
    assert torch.equal(rows[4], rows[9])
    assert rows[5, 0] != rows[6, 0]
    assert [(row // 1000).unique().tolist() for row in rows.T] == [[0], [1], [2]]
    assert ngram_rows(torch.tensor([[7]]), 2, 2**20) != ngram_rows(torch.tensor([[0, 7]]), 2, 2**20)[0, 1]


def test_matches_against_a_search() -> None:
    """The byte after the last earlier occurrence, found by comparing strings; texts of few letters repeat often."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randint(0, letters, (2, 60), generator=generator) for letters in (2, 5)])
    found = match_rows(tokens)
    for text, rows in zip(tokens.tolist(), found.tolist(), strict=True):
        for number, length in enumerate(MATCH_LENGTHS):
            for end in range(1, 61):
                last = text[end - length : end] if end >= length else None
                starts = [at for at in range(end - length) if text[at : at + length] == last]
                expected = text[starts[-1] + length] if starts else 256
                assert rows[end - 1][number] == expected + 257 * number
    assert len(found.unique()) > 10


def test_parameter_count_matches(model: GPT) -> None:
    """The config's count is that of the module."""
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.parameter_count


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    """A file without a model's size is an error that names it."""
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"other\.safetensors is not a model of fullshard train: its metadata has no"):
        load(path)
