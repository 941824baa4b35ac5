"""The model by itself, unsharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.train.config import MATCH_LENGTHS, GPTConfig
from fullshard.train.input_embedding import match_rows, ngram_rows
from fullshard.train.model import GPT, METADATA_KEY, TEMPERATURE, generate, initialize, load
from fullshard.train.weights import save_full

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


def test_ngrams_are_spread_over_the_rows() -> None:
    """As many different n-grams as rows occupy about as many rows as random ones would, 63%."""
    text = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    rows = ngram_rows(torch.stack(text, dim=-1) + 32, 2, 4096)[:, 1, 0]
    assert 0.55 < len(rows.unique()) / 4096 < 0.75


def test_model_knows_positions(model: GPT) -> None:
    """Equal tokens after different distances to an earlier one get different logits."""
    one = model(torch.tensor([[65, 66, 66, 66]]))
    other = model(torch.tensor([[66, 65, 66, 66]]))
    assert not torch.allclose(one[0, -1], other[0, -1])


def test_parameter_count_matches(model: GPT) -> None:
    """The config's count is that of the module."""
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.parameter_count


def test_starting_weights_are_a_function_of_the_seed() -> None:
    """Two models from one seed are equal, whatever torch's global generator did; another seed differs."""
    models = []
    for seed in (1, 1, 2):
        torch.rand(seed)
        models.append(GPT(CONFIG))
        initialize(models[-1], seed)
    first, again, other = (dict(each.named_parameters()) for each in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.bytes.weight"], other["embedding.bytes.weight"])


def test_start_is_nearly_uniform() -> None:
    """An untrained model gives every byte about 8 bits."""
    model = GPT(CONFIG)
    initialize(model, seed=0)
    loss = torch.nn.functional.cross_entropy(model(torch.zeros(1, 8, dtype=torch.long))[0], torch.arange(8))
    assert float(loss.detach()) / 0.6931 == pytest.approx(8, abs=0.5)


def test_too_long_input_is_an_error(model: GPT) -> None:
    """More tokens than positions is an error with both numbers."""
    with pytest.raises(ValueError, match=r"at most 12 .* found 13"):
        model(torch.zeros(1, 13, dtype=torch.long))


def test_saved_model_loads_with_equal_logits(model: GPT, tmp_path: Path) -> None:
    """The file is read by safetensors itself and by `load`, and gives the same model."""
    path = tmp_path / "model.safetensors"
    save_full(path, model, leads=True)
    assert load_file(path).keys() == dict(model.named_parameters()).keys()
    tokens = torch.randint(0, 256, (1, 12))
    loaded = load(path)
    assert loaded.config == CONFIG
    assert torch.equal(loaded(tokens), model(tokens))


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    """A safetensors file without a model's size is an error that names it."""
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        load(path)


def test_model_of_another_version_is_refused(tmp_path: Path) -> None:
    """A size without the n-grams of today is an error that shows it, not a model of other weights."""
    path = tmp_path / "old.safetensors"
    save_file({"weight": torch.zeros(1)}, path, {METADATA_KEY: '{"layers": 4, "width": 128}'})
    with pytest.raises(ValueError, match=r"old\.safetensors holds a model of another version .*'width': 128"):
        load(path)


def test_generation_matches_forward() -> None:
    """Byte by byte, generation draws from what one forward over the whole text gives, n-grams and matches included."""
    model, prompt = disturbed(GPTConfig(layers=1, width=16, heads=2, sequence=40, ngram_rows=64)), b"abcdabcdabcda"
    made = list(generate(model, prompt, 20, 40, torch.Generator().manual_seed(5)))
    logits = model(torch.tensor([[*prompt, *made]]))[0, len(prompt) - 1 : -1].detach()
    generator = torch.Generator().manual_seed(5)
    drawn = [int(torch.multinomial(row, 1, generator=generator)) for row in (logits / TEMPERATURE).softmax(dim=-1)]
    assert drawn == made


def test_generation_repeats(model: GPT) -> None:
    """Equally seeded generators give equal bytes, beyond the model's context too."""
    made = [bytes(generate(model, b"ab", 20, CONFIG.sequence, torch.Generator().manual_seed(5))) for _ in range(2)]
    assert made[0] == made[1]
    assert len(made[0]) == 20
