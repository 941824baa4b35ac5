"""The training step: the results that its options change, and those that they must not change."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fullshard.train import loop
from fullshard.train.config import TrainConfig
from fullshard.train.corpus import read
from fullshard.train.group import Group
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
    corpus, optimizer = read([__file__], seed=0, sequence=16), build_optimizer(cast(GPT, model), config)
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
