"""Tiny units are all-gathered with the next unit: in whose launch, and with how much memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_equal
from front_ends import assert_at_rest, gathered
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import Collective, GlooTransport, record
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.prefetch import MAX_TINY_UNITS_TOGETHER
from models import LossOf, batch, tiny_units
from ranks import Rank, on_ranks

WIDTH, LIMIT = 64, 1024  # a norm has 512 bytes, a linear layer 16,640


class Chain(nn.Module):
    """Linear layers ("L", large) and norms ("n", tiny) one after another; runs the parts numbered in ``run``."""

    def __init__(self, pattern: str, *, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) if part == "L" else nn.LayerNorm(WIDTH) for part in pattern)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None  # the root's own
        self.run = list(range(len(pattern)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.run:
            x = torch.tanh(self.parts[index](x))
        return x if self.scale is None else x * self.scale


def sharded(rank: Rank, model: Chain, *, limit: int = LIMIT, **options: Any) -> Any:
    options.setdefault("mesh", rank.mesh)
    with tiny_units(up_to=limit):
        for part in model.parts:
            fully_shard(part, **options)
        return fully_shard(model, **options)


def loss_of(step: int) -> LossOf:
    """The loss on the batch of ``step``, whose input requires a gradient, so that every unit's backward has an end."""
    return lambda model, rank: model(batch(rank, step, 4, WIDTH).requires_grad_()).square().mean()


def launches(collectives: list[Collective], kind: str) -> str:
    """The numbers of the parts whose messages were launched together; "root" for the root."""
    grouped: dict[int, dict[str, None]] = {}
    for collective in collectives:
        if collective.kind == kind:
            grouped.setdefault(collective.launch, {})[collective.unit.removeprefix("parts.") or "root"] = None
    return ", ".join(" ".join(names) for names in grouped.values())


def run_step(model: nn.Module, rank: Rank, step: int = 0) -> tuple[list[Collective], list[Collective]]:
    with record() as forward:
        loss = loss_of(step)(model, rank.rank)
    with record() as backward:
        loss.backward()
    return forward, backward


# pattern -> launches of all-gathers in forward and in backward
PATTERNS: dict[str, tuple[str, str]] = {
    "LL": ("0, 1", "1, 0"),
    "nL": ("0 1", "1, 0"),
    "nLn": ("0 1, 2", "2 1, 0"),
    "LnLnnLn": ("0, 1 2, 3 4 5, 6", "6 5, 4 3 2, 1 0"),
    "nnLLnnn": ("0 1 2, 3, 4 5 6", "6 5 4 3, 2, 1 0"),
    "nnn": ("0 1 2", "2 1 0"),
}


@on_ranks(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_launches(rank: Rank, pattern: str) -> None:
    """Tiny units before a large one are all-gathered in its launch, and reduced in their own."""
    model, alone = (sharded(rank, Chain(pattern), limit=n, reshard_after_forward=True) for n in (LIMIT, 0))
    for step in range(3):
        forward, backward = run_step(model, rank, step)
        assert (launches(forward, "all_gather"), launches(backward, "all_gather")) == PATTERNS[pattern]
        assert launches(backward, "reduce_scatter") == ", ".join(map(str, reversed(range(len(pattern)))))
        others = [brief(each) for seen in run_step(alone, rank, step) for each in seen]
        assert sorted(brief(each) for each in (*forward, *backward)) == sorted(others)
        assert_at_rest(model)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert_equal(ours.grad.to_local(), theirs.grad.to_local(), "gradients with and without tiny units")


def brief(collective: Collective) -> tuple[str, str, str, int, int]:
    return collective.kind, collective.unit, str(collective.dtype), collective.numel, collective.nbytes


@on_ranks(2)
def test_long_rows_are_cut(rank: Rank) -> None:
    """A model of nothing but tiny units is not unsharded all at once."""
    most = MAX_TINY_UNITS_TOGETHER
    model = sharded(rank, Chain("n" * (2 * most + 3)), reshard_after_forward=True)
    for step in range(2):
        forward, backward = run_step(model, rank, step)
        for seen in (forward, backward):
            together = [text.split() for text in launches(seen, "all_gather").split(", ")]
            assert max(map(len, together)) <= most and len(together) <= 4
            order = [int(name) for names in together for name in names]
            assert order == sorted(order, reverse=seen is backward)
        assert_at_rest(model)


@on_ranks(1, 2)
def test_size_at_the_limit(rank: Rank) -> None:
    """A unit is tiny if its all-gather makes at most as many bytes as the transport says."""
    for limit, precision, expected in ((512, None, True), (511, None, False), (256, torch.bfloat16, True)):
        with tiny_units(up_to=limit):
            one = fully_shard(nn.LayerNorm(WIDTH), mesh=rank.mesh, mp_policy=MixedPrecisionPolicy(precision))
        assert unit_of(one).tiny is (expected and rank.world_size > 1), (limit, precision)
    usual = fully_shard(nn.LayerNorm(WIDTH), mesh=rank.mesh)
    assert GlooTransport.tiny_bytes == 64 * 1024 and unit_of(usual).tiny == (rank.world_size > 1)


@on_ranks(2)
def test_large_units_are_still_unsharded_two_at_a_time(rank: Rank) -> None:
    """Beside one large unit that computes and a prefetched one only the tiny ones between them hold memory."""
    model = sharded(rank, Chain("LnLnnLnLL"), reshard_after_forward=True)
    large = {f"parts.{i}" for i, part in enumerate(model.parts) if isinstance(part, nn.Linear)}
    seen: list[set[str]] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def look(*_: Any) -> None:
        seen.append(set(gathered(model)))

    def remember(parameter: nn.Parameter) -> None:
        nonlocal most
        alive.append(weakref.ref(parameter.grad))
        most = max(most, sum(gradient() is not None for gradient in alive))

    for part in model.parts:
        part.register_forward_hook(look)
        part.register_full_backward_hook(look)
        part.weight.register_hook(look)
    for step in range(2):
        seen.clear()
        run_step(model, rank, step)
        assert max(len(names & large) for names in seen) == 2
        assert max(len(names - large) for names in seen) == 2
        assert_at_rest(model)
    for parameter in (parameter for unit in nested_units(model) for parameter in unit.parameters):
        parameter.unsharded.register_post_accumulate_grad_hook(remember)
    run_step(model, rank)
    assert len(alive) == 2 * len(model.parts) and not any(gradient() is not None for gradient in alive)
    assert most <= 2 * 2  # of two units
    model.run = [0, 5, 7, 8]  # 2 is prefetched in vain
    seen.clear()
    run_step(model, rank)
    assert max(len(names & large) for names in seen) == 2
    assert_at_rest(model)
