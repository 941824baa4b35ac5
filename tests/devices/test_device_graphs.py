"""Training steps captured as CUDA graphs, with NCCL's collectives in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu.graphs import CASES, Run, warmed_up
from on_device import on_device

from ranks import Rank


@on_device(1, 2)
@pytest.mark.parametrize("reshard", CASES.values(), ids=CASES)
def test_replays_train_as_steps_do(rank: Rank, reshard: bool) -> None:
    """Losses and weights of a step that is replayed on other inputs are those of the steps themselves, bit by bit."""
    if rank.device.type != "cuda":
        pytest.skip("captures are checked on the emulated device, and only CUDA replays them")
    eager, captured = (warmed_up(Run(64, rank.device, rank.world_size, reshard, seed=rank.rank)) for _ in range(2))
    expected = eager.losses(eager.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    assert captured.losses(graph.replay) == expected and len(set(expected)) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(shards(eager.model), shards(captured.model), strict=True))


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local() for parameter in model.parameters()]
