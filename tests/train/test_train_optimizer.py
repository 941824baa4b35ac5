"""The optimizer of a run, unsharded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fullshard.optim import orthogonalize
from fullshard.train.config import GPTConfig, TrainConfig
from fullshard.train.model import GPT, initialize
from fullshard.train.optimizer import build_optimizer, set_learning_rates


@pytest.fixture
def model() -> GPT:
    made = GPT(GPTConfig(layers=2, width=16, heads=2, sequence=12, ngrams=3, ngram_rows=64))
    initialize(made, seed=0)
    return made


def train(model: GPT, optimizer: torch.optim.Optimizer, config: TrainConfig, steps: range) -> None:
    """Take some steps of a run, each on bytes of its own."""
    for step in steps:
        tokens = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(step))
        set_learning_rates(optimizer, step, config)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_every_parameter_is_in_one_group(model: GPT, name: str) -> None:
    """No parameter is forgotten or stepped twice, and only matrices of blocks decay."""
    groups = build_optimizer(model, TrainConfig(optimizer=name, weight_decay=0.5)).param_groups
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(parameter) for parameter in model.parameters())
    decaying = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decaying == {id(parameter) for parameter in model.blocks.parameters()}


def test_muon_steps_matrices_of_blocks_in_fp32(model: GPT) -> None:
    """A first step moves such a matrix by the rate times its orthogonalized gradient; all others move by AdamW."""
    config = TrainConfig(steps=10, warmup=0, weight_decay=0.0, lr=0.5, muon_lr=0.25)
    before = copy.deepcopy(model)
    tokens = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(1))
    F.cross_entropy(before(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    train(model, build_optimizer(model, config), config, range(1, 2))
    matrix, old = model.blocks[1].mlp.out.weight, before.blocks[1].mlp.out.weight
    update = orthogonalize(old.grad, dtype=torch.float32)
    assert update.dtype == torch.float32
    torch.testing.assert_close(matrix, old - 0.25 * update, rtol=0, atol=0.01)  # the gradient travels in bf16
    moved = (model.embedding.bytes.weight - before.embedding.bytes.weight)[tokens[0, 0]].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5), rtol=0, atol=0.01)


def test_learning_rate_warms_up_and_falls(model: GPT) -> None:
    """The rate rises in equal steps, stays at the peak, and falls in equal steps, the last one to zero."""
    config = TrainConfig(steps=100, warmup=3, lr=1.0, muon_lr=4.0)
    optimizer = build_optimizer(model, config)
    rates = []
    for step in (1, 2, 3, 4, 31, 66, 100, 101):
        set_learning_rates(optimizer, step, config)
        rates.append(optimizer.param_groups[-1]["lr"])
        assert optimizer.param_groups[0]["lr"] == 4 * rates[-1]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 1 / 70, 0.0])
