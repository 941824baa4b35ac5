"""Cross entropies that are fused with the head: they read ``lm_head.weight`` and never call the head.

Liger's kernels, cut cross entropy and trl do so, inside of the model's forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_runs import Run, assert_runs_alike, built, front_ends
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from ranks import Rank, on_ranks

WORDS, WIDTH, LENGTH, BATCH, CHUNK = 23, 6, 5, 3, 4
IGNORED = -100


class InForward(torch.autograd.Function):
    """As Liger has it: gradients are taken chunk by chunk in forward, and backward scales them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        by_x, by_weight, total = torch.zeros_like(x), torch.zeros_like(weight), x.new_zeros(())
        count = (labels != IGNORED).sum()
        for begin in range(0, len(x), CHUNK):
            part = slice(begin, begin + CHUNK)
            with torch.enable_grad():
                rows, values = x[part].detach().requires_grad_(), weight.detach().requires_grad_()
                loss = summed(rows, values, labels[part])
                grads = torch.autograd.grad(loss, (rows, values))
            by_x[part] = grads[0] / count
            by_weight += grads[1] / count
            total += loss.detach()
        ctx.save_for_backward(by_x, by_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by_x, by_weight = ctx.saved_tensors
        return by_x * gradient, by_weight * gradient, None


class InBackward(torch.autograd.Function):
    """As trl has it: the weight is kept for backward, which computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, labels)
        parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
        return torch.stack([summed(rows, weight, wanted) for rows, wanted in parts]).sum() / (labels != IGNORED).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, labels = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
            loss = torch.stack([summed(rows, weight, wanted) for rows, wanted in parts]).sum()
            by_x, by_weight = torch.autograd.grad(loss / (labels != IGNORED).sum(), (x, weight))
        return by_x * gradient, by_weight * gradient, None


def summed(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the cross entropies of rows."""
    return nn.functional.cross_entropy(x @ weight.T, labels, ignore_index=IGNORED, reduction="sum")


def recomputed(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Chunks under activation checkpointing, each of which reads the weight by itself."""
    parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
    losses = [checkpoint(summed, rows, weight, wanted, use_reentrant=False) for rows, wanted in parts]
    return torch.stack(losses).sum() / (labels != IGNORED).sum()


FUSED: dict[str, Callable[..., torch.Tensor]] = {
    "gradient in forward": InForward.apply,
    "weight kept": InBackward.apply,
    "recomputed": recomputed,
}


class Block(nn.Module):
    """A residual pair of linear layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Token ids to their loss, where labels are given; to logits without."""

    def __init__(self, fused: str, tied: bool) -> None:
        super().__init__()
        self.fused = fused
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.blocks(self.embed(ids)))
        if labels is None:
            return self.lm_head(x)
        weight = self.lm_head.weight
        if isinstance(weight, DTensor):  # trl: "FSDP2 exposes sharded parameters as DTensors"
            weight = weight.full_tensor()
        return FUSED[self.fused](x[:, :-1].flatten(0, 1), weight, labels[:, 1:].flatten())


def trained(run: Run, fused: str, tied: bool = False, tail: bool = False) -> dict[str, nn.Module]:
    """Three steps of two microbatches, and logits by the head itself, before and after them.

    Args:
        run: What to run.
        fused: A key of FUSED.
        tied: Whether the head's weight is that of the embedding.
        tail: Whether norm and head are a unit that is not resharded after forward, as accelerate has it.
    """
    model = built(Language, fused, tied)
    if tail and run.front_end == "fully_shard":
        for block in model.blocks:
            fully_shard(block, mesh=run.rank.mesh)
        fully_shard([model.norm, model.lm_head], mesh=run.rank.mesh, reshard_after_forward=False)
        fully_shard(model, mesh=run.rank.mesh)
    else:
        model = run.shard(model, Block)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ids = torch.randint(WORDS, (6, BATCH, LENGTH), generator=run.generator(0))
    with torch.no_grad():
        run.note("logits", model(ids[0]))
    for index, batch in enumerate(ids):
        labels = batch.masked_fill(batch % 7 == run.rank.rank, IGNORED)
        with run.no_sync(model) if index % 2 == 0 else contextlib.nullcontext():
            loss = model(batch, labels)
            (loss / 2).backward()
        run.note("loss", loss)
        if index % 2:
            run.step(model, sgd, max_norm=1.0)
    with torch.no_grad():
        run.note("logits", model(ids[0]))
    return {"model": model}


@pytest.mark.parametrize("fused", FUSED)
@front_ends
@on_ranks(2)
def test_of_a_head_in_the_root(rank: Rank, fused: str, front_end: str) -> None:
    """The root's own weight, read in its forward."""
    assert_runs_alike(rank, front_end, functools.partial(trained, fused=fused))


@front_ends
@on_ranks(2)
def test_of_a_head_that_is_the_embedding(rank: Rank, front_end: str) -> None:
    """One parameter, which has a gradient by either use."""
    assert_runs_alike(rank, front_end, functools.partial(trained, fused="weight kept", tied=True))


@pytest.mark.parametrize("fused", FUSED)
@on_ranks(2)
def test_of_a_head_that_shares_a_unit_with_the_norm(rank: Rank, fused: str) -> None:
    """The norm unshards their unit, whose forward is not over: the weight that the model then reads is unsharded."""
    assert_runs_alike(rank, "fully_shard", functools.partial(trained, fused=fused, tail=True))
