"""The model by itself, unsharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.train.config import GPTConfig
from fullshard.train.model import GPT, generate, initialize, load
from fullshard.train.weights import save_full

CONFIG = GPTConfig(layers=2, width=16, heads=2, sequence=12)


@pytest.fixture
def model() -> GPT:
    """A small model in which no matrix is zero, so that every position can influence every later one."""
    made = GPT(CONFIG)
    initialize(made, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def test_model_is_causal(model: GPT) -> None:
    """Changing a token changes no earlier logits, and does change those at and after it."""
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all((before[:, at] != after[:, at]).any() for at in range(7, 12))


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
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


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


def test_generation_repeats(model: GPT) -> None:
    """Equally seeded generators give equal bytes, beyond the model's context too."""
    made = [bytes(generate(model, b"ab", 20, CONFIG.sequence, torch.Generator().manual_seed(5))) for _ in range(2)]
    assert made[0] == made[1]
    assert len(made[0]) == 20
