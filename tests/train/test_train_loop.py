"""Options of the training step on ranks: what they change, and what they must not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.train import loop
from fullshard.train.checkpoints import Position
from fullshard.train.config import GPTConfig, TrainConfig, TrainingConfig
from fullshard.train.corpus import read
from fullshard.train.group import Group
from fullshard.train.optimizer import build_optimizer
from ranks import Rank, on_ranks

CONFIG = TrainConfig(
    model=GPTConfig(layers=2, width=16, heads=2, sequence=16, ngrams=3, ngram_rows=64),
    training=TrainingConfig(steps=8, warmup=0, batch=4, optimizer="adamw", lr=0.02),
)


class _Records(list[dict[str, Any]]):
    record = list.append


def steps(rank: Rank, count: int = 3, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, and the weights after them."""
    config = CONFIG.with_options({**options, "ranks": rank.world_size})
    group = Group(rank.rank, rank.world_size, torch.device(rank.device))
    model, log = loop.build_model(config, group), _Records()
    once = loop.Run(
        config=config,
        corpus=read([__file__], seed=0, sequence=16),
        group=group,
        stop=SimpleNamespace(code=0),  # type: ignore[arg-type]
        folder=Path(),
        model=model,
        optimizer=build_optimizer(model, config.training),
        checkpoints=SimpleNamespace(),  # type: ignore[arg-type]
        log=log,  # type: ignore[arg-type]
        position=Position(),
        best=None,
    )
    for step in range(1, count + 1):
        once._train_step(step, 0.0)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return [record["loss"] for record in log], weights


@on_ranks(2)
def test_accumulated_batches_train_as_one_large_batch(rank: Rank) -> None:
    """Losses and weights are within rounding those of a batch that is as large; another batch differs."""
    whole, weights = steps(rank)
    parts, others = steps(rank, batch=1, accumulate=4)
    assert parts == pytest.approx(whole, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-3, atol=1e-4)
    assert steps(rank, batch=1)[0] != pytest.approx(whole, rel=1e-4)


@on_ranks(2)
def test_activation_checkpointing_changes_no_bit(rank: Rank) -> None:
    """Recomputed activations are those of forward; names of weights are the same."""
    losses, weights = steps(rank)
    others, same = steps(rank, activation_checkpointing=True)
    assert others == losses
    assert list(same) == list(weights) and all(torch.equal(same[name], weights[name]) for name in weights)


@on_ranks(2)
def test_bf16_computes_in_bf16_and_keeps_fp32(rank: Rank) -> None:
    """Losses are near those of fp32 and not equal to them; weights stay in fp32."""
    losses, _ = steps(rank)
    rounded, weights = steps(rank, dtype="bf16")
    assert rounded == pytest.approx(losses, rel=0.02) and rounded != losses
    assert {value.dtype for value in weights.values()} == {torch.float32}


@on_ranks(2)
def test_muon_steps_the_matrices_of_blocks(rank: Rank) -> None:
    """All others are stepped by AdamW, with the same numbers; as one optimizer, both have the state of the whole."""
    config = CONFIG.with_options({"optimizer": "muon"})
    model = loop.build_model(config, Group(rank.rank, rank.world_size, torch.device(rank.device)))
    optimizer = build_optimizer(model, config.training)
    loss = model(torch.zeros(1, 8, dtype=torch.int64, device=rank.device)).square().sum()
    torch.autograd.backward(loss)
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon = {names[p] for p, state in optimizer.state.items() if "momentum_buffer" in state}
    by_adamw = {names[p] for p, state in optimizer.state.items() if "exp_avg" in state}
    assert by_muon == {name for name in names.values() if name.startswith("blocks.") and "norm" not in name}
    assert by_adamw == set(names.values()) - by_muon
    first, second = steps(rank)[0], steps(rank, optimizer="muon")[0]
    assert first[0] == second[0] and first[1:] != second[1:]
