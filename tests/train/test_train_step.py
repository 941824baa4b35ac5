"""The training step: the results that its options change, and those that they must not change."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard.optim import orthogonalize
from fullshard.train import loop
from fullshard.train.config import GPTConfig, TrainConfig
from fullshard.train.corpus import read
from fullshard.train.group import Group
from fullshard.train.model import GPT, initialize
from fullshard.train.optimizer import build_optimizer, set_learning_rates
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


# -------------------------------------------------------------------- the optimizer, unsharded


@pytest.fixture
def model() -> GPT:
    made = GPT(GPTConfig(**SIZE))
    initialize(made, seed=0)
    return made


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
    before, optimizer = copy.deepcopy(model), build_optimizer(model, config)
    tokens = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(1))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    set_learning_rates(optimizer, 1, config)
    optimizer.step()
    matrix, old = model.blocks[1].mlp.out.weight, before.blocks[1].mlp.out.weight
    update = orthogonalize(matrix.grad, dtype=torch.float32)
    assert update.dtype == torch.float32
    torch.testing.assert_close(matrix, old - 0.25 * update, rtol=0, atol=0.01)  # the gradient is sent in bf16
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
