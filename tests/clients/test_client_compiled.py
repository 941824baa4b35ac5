"""Whole models under ``torch.compile``: before they are sharded, and after."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn

from ranks import Rank, on_ranks

WORDS, WIDTH, LENGTH, BATCH = 23, 8, 5, 3


class Block(nn.Module):
    """Causal attention and a pair of linear layers, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, WIDTH // 2)).movedim(2, 0).transpose(2, 3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Token ids to logits."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def trained(run: Run, order: str, backend: str, depth: int) -> dict[str, nn.Module]:
    """Three steps, and an evaluation amid them. The unsharded run is not compiled."""
    model = built(GPT, depth)
    compiling = run.front_end != "unsharded"
    if compiling and order == "in place, then sharded":
        model.compile(backend=backend)
    model = run.shard(model, Block)
    called: Any = model
    if compiling and order == "sharded, then compiled":
        called = torch.compile(model, backend=backend)
    if compiling and order == "sharded, then in place":
        model.compile(backend=backend)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(3):
        ids = torch.randint(WORDS, (BATCH, LENGTH), generator=run.generator(step))
        loss = nn.functional.cross_entropy(called(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        run.note("loss", loss)
        run.step(model, sgd, max_norm=1.0)
        if step == 1:
            with torch.no_grad():
                run.note("evaluation", called(ids[:, :-1]))
    return {"model": model}


def compare(rank: Rank, front_end: str, order: str, backend: str, depth: int = 2) -> None:
    """Run it compiled and sharded, and neither compiled nor sharded."""
    from torch._dynamo.utils import counters  # slow to import

    torch._dynamo.reset()
    counters.clear()
    assert_runs_alike(rank, front_end, functools.partial(trained, order=order, backend=backend, depth=depth))
    assert counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("order", ["in place, then sharded", "sharded, then compiled", "sharded, then in place"])
@front_ends
@on_ranks(2, timeout=180)
def test_compiled(rank: Rank, order: str, front_end: str) -> None:
    """Graphs are captured, and losses, norms and weights are those of the eager unsharded run."""
    compare(rank, front_end, order, "aot_eager")


@on_ranks(2, timeout=180)
def test_generated_kernels(rank: Rank) -> None:
    """The same with the kernels of inductor."""
    compare(rank, "fully_shard", "sharded, then compiled", "inductor", depth=1)
