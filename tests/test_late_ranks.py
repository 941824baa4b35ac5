"""A trace names the rank that is late, in which unit and phase: on all ranks alike."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.debug.tracing.exposed import late_ranks
from models import Block
from ranks import Rank, on_ranks


@on_ranks(2)
def test_a_late_rank_is_named(rank: Rank, tmp_path: Path) -> None:
    """Rank 1 sleeps in the backward of one unit; no other rank, unit or phase is named as late by so much."""
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh)
    delay = 0.2 if rank.rank == 1 else 0.0
    model[2].register_full_backward_pre_hook(lambda *_: time.sleep(delay))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with fullshard.trace(tmp_path / "trace") as trace:
        for _ in range(4):
            step()
    named = [tuple(each[1:]) for each in late_ranks(trace.segments) if each[0] > 0.1]
    assert named == [(1, "backward", "2")], list(late_ranks(trace.segments))
