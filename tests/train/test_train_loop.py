"""The training step: what its options change and must not, and what it says of numbers that are not finite."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.train import loop
from fullshard.train.config import GPTConfig, TrainConfig
from fullshard.train.corpus import read
from fullshard.train.group import Group
from fullshard.train.loop import DivergedError, check_loss, check_weights, not_finite
from fullshard.train.model import GPT
from fullshard.train.optimizer import build_optimizer
from ranks import Rank, on_ranks

SIZE = {"layers": 2, "width": 16, "heads": 2, "sequence": 16, "ngrams": 3, "ngram_rows": 64}
CONFIG = TrainConfig(**SIZE, steps=8, warmup=0, batch=4, optimizer="adamw", lr=0.02)


class _Records(list[dict[str, Any]]):
    record = list.append


def steps(rank: Rank, count: int = 3, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, and the weights after them."""
    config = dataclasses.replace(CONFIG, **options, ranks=rank.world_size)
    group = Group(rank.rank, rank.world_size, torch.device(rank.device))
    model, log, nothing = loop.build_model(config, group), _Records(), SimpleNamespace(code=0)
    corpus, optimizer = read([__file__], seed=0, sequence=16), build_optimizer(model, config)
    once = loop.Run(config, corpus, group, nothing, model, optimizer, nothing, log, 0, 0, 0.0)  # type: ignore[arg-type]
    for step in range(1, count + 1):
        once._train_step(step)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return [record["loss"] for record in log], weights


@on_ranks(2)
def test_options_of_a_step(rank: Rank) -> None:
    """Accumulated microbatches train as one large batch within rounding, activation checkpointing changes no bit, bf16
    computes in bf16 and keeps fp32, and Muon steps other weights than AdamW.
    """
    losses, weights = steps(rank)
    parts, others = steps(rank, batch=1, accumulate=4)
    assert parts == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-3, atol=1e-4)
    assert steps(rank, batch=1)[0] != pytest.approx(losses, rel=1e-4)

    same, others = steps(rank, activation_checkpointing=True)
    assert same == losses and list(others) == list(weights)
    assert all(torch.equal(others[name], weights[name]) for name in weights)

    rounded, others = steps(rank, dtype="bf16")
    assert rounded == pytest.approx(losses, rel=0.02) and rounded != losses
    assert {value.dtype for value in others.values()} == {torch.float32}

    muon, _ = steps(rank, optimizer="muon")
    assert muon[0] == losses[0] and muon[1:] != losses[1:]


def test_error_names_ranks_and_the_origin() -> None:
    """The origin is the first parameter or output of a module that is not finite."""
    model = GPT(GPTConfig(layers=2, width=16, heads=2, sequence=8))
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[3, 3] = math.nan
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    expected = r"step 4: the loss is nan on rank 1, inf on rank 2; forward: .*'blocks.1.attention.qkv.weight' has 1 NaN"
    with pytest.raises(DivergedError, match=expected):
        check_loss(model, [tokens], [2.5, math.nan, math.inf], 4)
    check_loss(model, [tokens], [2.0, 7.0], 4)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_gradients_and_weights_are_named(value: float) -> None:
    """One element is enough, also if the loss was finite."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    check_weights(model, 1)
    norm = float(fullshard.get_total_norm(p.grad for p in model.parameters()))
    assert math.isfinite(norm)
    assert model[1].weight.grad is not None
    model[1].weight.grad[0, 2] = value
    with pytest.raises(DivergedError, match=r"step 5: gradients: .* non-finite: \w"), not_finite(5, "gradients: "):
        fullshard.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    with torch.no_grad():
        model[0].bias[1] = value
    with pytest.raises(DivergedError, match=r"step 5: weights: .* non-finite: \w"):
        check_weights(model, 5)
