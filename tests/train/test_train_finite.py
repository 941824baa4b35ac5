"""A run whose loss, gradients or weights are NaN or infinite stops at once and keeps what was saved before."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from train_processes import SIZE, last_step, run_on, write_text

import fullshard
from fullshard.train import checkpoint_folder
from fullshard.train.config import GPTConfig
from fullshard.train.finite import DivergedError, check_loss, check_weights, clip_gradients
from fullshard.train.model import GPT
from ranks import RankPool

RUN = [*SIZE, "--steps", 12, "--checkpoint-every", 3, "--eval-every", 5, "--eval-bytes", 2000]
RUN += ["--generate", 0]


def make_eighth_loss_infinite(rank: int) -> None:
    """Make the loss of step 8 infinite on rank 1."""
    usual, calls = functional.cross_entropy, []

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = usual(logits, targets, *args, **kwargs)
        calls.append(logits.requires_grad)
        return loss * math.inf if logits.requires_grad and sum(calls) == 8 else loss

    if rank == 1:
        functional.cross_entropy = cross_entropy


def test_infinite_loss_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path, ranks: RankPool) -> None:
    """Exit code 3, the step and the rank in one line; the run resumes from the checkpoint before."""
    (tmp_path / "text").mkdir()
    line = [write_text(tmp_path / "text"), *RUN, "--out", tmp_path, "--name", "run"]
    done = run_on(ranks, 2, *line, poison=make_eighth_loss_infinite)
    folder = tmp_path / "run"
    assert done.returncode == 3, done.stdout + done.stderr
    (message,) = done.stderr.strip().splitlines()
    assert message == (
        "fullshard train: step 8: the loss is inf on rank 1 (first in the loss, from finite outputs). "
        "The checkpoint after step 6 is kept: resume with a lower --lr"
    )
    assert last_step(folder / "metrics.jsonl") == 7
    assert not (folder / "model.safetensors").exists()
    complete = checkpoint_folder.complete(folder / "checkpoints")
    assert [path.name for path in complete] == ["step-00000003", "step-00000006"]
    again = run_on(ranks, 2, *line)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from step 6" in again.stdout
    assert all(bool(weight.isfinite().all()) for weight in load_file(folder / "model.safetensors").values())


class _Ranks:
    """Three ranks, of which this is the second; the others have the same loss or a finite one."""

    def __init__(self, *others: float) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        first, second = self.others
        return [(first, "the loss"), value, (second, "the loss")]


def test_error_names_ranks_and_the_first_module_that_is_not_finite() -> None:
    """Of nested modules the innermost, of several in a row the first."""
    model = GPT(GPTConfig(layers=2, width=16, heads=2, sequence=8))
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[3, 3] = math.nan
    tokens, group = torch.zeros(1, 8, dtype=torch.int64), _Ranks(2.5, math.inf)
    loss = model(tokens).sum().item()
    expected = r"step 4: the loss is nan on rank 1 \(first in blocks.1.attention.qkv\), inf on rank 2"
    with pytest.raises(DivergedError, match=expected):
        check_loss(model, [tokens], loss, math.nan, 4, group)  # type: ignore[arg-type]
    check_loss(model, [tokens], 2.0, 7.0, 4, SimpleNamespace())  # type: ignore[arg-type]  # no collective if all is well


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradients_and_weights_are_named(value: float) -> None:
    """One element is enough, also if the loss was finite."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    check_weights(model, 1)
    expected = min(1.0, float(fullshard.get_total_norm(p.grad for p in model.parameters())))
    assert clip_gradients(model, 1.0, 1) >= expected
    assert model[1].weight.grad is not None
    model[1].weight.grad[0, 2] = value
    with pytest.raises(DivergedError, match=r"step 5: gradients are not finite: \w"):
        clip_gradients(model, 1.0, 5)
    with torch.no_grad():
        model[0].bias[1] = value
    with pytest.raises(DivergedError, match=r"step 5: weights are not finite: \w"):
        check_weights(model, 5)
