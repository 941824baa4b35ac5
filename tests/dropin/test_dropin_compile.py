"""torch.compile of models that stand in for torch's: dynamo finds the marks that torch's FSDP leaves on modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compare import assert_close
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import dropin, fully_shard
from ranks import Rank, on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def train(model: nn.Module, data: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("form", "what"), [("composed", "model"), ("original", "blocks")])
@on_ranks(2)
def test_compiled_models_train(rank: Rank, form: str, what: str):
    """Blocks compiled before sharding, or the sharded model compiled: losses of the plain model."""
    torch.compiler.reset()
    data = torch.linspace(-1, 1, 32).view(4, 8)
    expected = train(blocks(), data)
    with dropin.install(quiet=True):
        model = blocks()
        if what == "blocks":
            for block in model:
                block.compile(backend="aot_eager")
        if form == "composed":
            for block in model:
                fully_shard(block)
            fully_shard(model)
        else:
            for index in range(2):
                model[index] = FSDP(model[index], use_orig_params=form == "original")
            model = FSDP(model, use_orig_params=form == "original")
        run = torch.compile(model, backend="aot_eager") if what == "model" else model
        assert_close(torch.tensor(train(run, data)), torch.tensor(expected), "losses", rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
