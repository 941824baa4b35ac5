"""A language model whose modules may be one unit, and how it is trained beside an unsharded copy."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from compare import assert_models_equal
from fullshard import fully_shard
from fullshard.comm import record
from fullshard.engine.ownership import unit_of
from models import Block, LossOf, assert_at_rest, reference_backward, tiny_units, tokens
from ranks import Rank

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


DIM, VOCABULARY = 6, 13


class Language(nn.Module):
    """Token ids to logits. ``mode`` says how the head is run: once, in chunks, or not at all."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.spare = nn.Linear(DIM, DIM)  # never runs
        if tied:
            self.head.weight = self.embedding.weight
        self.mode = "once"
        self.checkpointed = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.call(block, x)
        x = self.call(self.norm, x)
        if self.mode == "no head":
            return x
        if self.mode == "chunks":
            return torch.cat([self.call(self.head, chunk) for chunk in x.chunk(3)])
        return self.call(self.head, x)

    def call(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=False) if self.checkpointed else module(x)


def score(logits: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return cross_entropy(logits, tokens(rank, step + 100, len(logits)))


def loss_at(step: int) -> LossOf:
    """Of the logits."""
    return lambda model, rank: score(model(tokens(rank, step, 9)), rank, step)


def loss_of_chunks(step: int) -> LossOf:
    """The head is called on its own, chunk by chunk, after the model; one backward for all."""

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        hidden = model(tokens(rank, step, 9))
        return sum(score(model.head(chunk), rank, step) for chunk in hidden.chunk(3))

    return loss_of


# name -> the modules that become one unit
GROUPS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "norm and head": lambda m: [m.norm, m.head],
    "head and norm": lambda m: [m.head, m.norm],
    "embedding and block": lambda m: [m.embedding, m.blocks[0]],
    "embedding and last block": lambda m: [m.embedding, m.blocks[2]],
    "first and last block": lambda m: [m.blocks[0], m.blocks[2]],
    "embedding, norm, head": lambda m: [m.embedding, m.norm, m.head],
    "with an unused one": lambda m: [m.blocks[1], m.spare],
    "inside modules": lambda m: [m.blocks[0].up, m.blocks[1].down],
    "everything": lambda m: [m.embedding, *m.blocks, m.norm, m.head, m.spare],
    "alone": lambda m: [m.blocks[1]],
}


def grouped(rank: Rank, model: Any, group: str = "norm and head", *, tiny: int = 0, **options: Any) -> Any:
    """``model`` with that group, a unit for each block that is not in it, and the root."""
    with tiny_units(up_to=tiny):
        members = GROUPS[group](model)
        fully_shard(members, mesh=rank.mesh, **options)
        for block in model.blocks:
            if unit_of(block) is None:
                fully_shard(block, mesh=rank.mesh, **options)
        return fully_shard(model, mesh=rank.mesh, **options)


def grouped_with_reference(rank: Rank, group: str = "norm and head", *, tied: bool = False, **options: Any) -> Any:
    """A grouped model, and an unsharded copy of it."""
    model = Language(tied=tied)
    reference = copy.deepcopy(model)
    return grouped(rank, model, group, **options), reference


def train(
    rank: Rank,
    model: Any,
    reference: Any,
    losses: Callable[[int], LossOf] = loss_at,
    *,
    steps: int = 3,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Train both for some steps, and compare the weights before the last one and its gradients."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(steps):
        model.zero_grad()
        reference.zero_grad()
        losses(step)(model, rank.rank).backward()
        assert_at_rest(model)
        reference_backward(reference, rank.world_size, losses(step))
        if step == steps - 1:
            assert_models_equal(model, reference, grads=True, rtol=rtol, atol=atol)
        for optimizer in optimizers:
            optimizer.step()
    model.zero_grad()
    reference.zero_grad()


def count(model: Any, run: Callable[[], Any]) -> tuple[Counter[str], Any]:
    """Count each unit's collectives, as "all_gather NAME" and "reduce_scatter NAME"; return what ``run`` returned."""
    with record() as seen:
        result = run()
    return Counter(f"{c.kind} {c.unit}" for c in seen), result
