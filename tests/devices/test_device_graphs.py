"""Training steps captured as CUDA graphs, with NCCL's collectives or those of a modelled network in them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from on_device import on_device
from test_device_delayed_streams import ranks_alike
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import fully_shard
from models import Block
from ranks import Rank

WIDTH, STEPS, WARM_UP = 64, 4, 3


class Run:
    """A model whose step reads its input from one tensor and leaves its loss in another."""

    def __init__(self, rank: Rank, mesh: DeviceMesh, reshard: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(rank.device)
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.x, self.loss = torch.zeros(32, WIDTH, device=rank.device), torch.zeros((), device=rank.device)
        generator = torch.Generator().manual_seed(rank.rank)
        self.inputs = [torch.randn(32, WIDTH, generator=generator, device="cpu") for _ in range(STEPS)]

    def step(self) -> None:
        """One step; gradients stay, so that a graph writes them where it found them."""
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def losses(self, step: Callable[[], object]) -> list[float]:
        """Of one step per input."""
        found = []
        for values in self.inputs:
            self.x.copy_(values)
            step()
            found.append(self.loss.item())
        return found

    def shards(self) -> list[torch.Tensor]:
        return [parameter.to_local().detach() for parameter in self.model.parameters()]

    def warm_up(self) -> Run:
        """Some steps on a stream of their own, as captures want it; then the weights of the beginning."""
        start, side = copy.deepcopy(self.shards()), torch.Stream(device=self.x.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            for _ in range(WARM_UP):
                self.step()
        torch.accelerator.current_stream().wait_stream(side)
        with torch.no_grad():
            for shard, value in zip(self.shards(), start, strict=True):
                shard.copy_(value)
        torch.accelerator.synchronize()
        return self


@on_device(1, 2)
@pytest.mark.parametrize("reshard", [False, True])
def test_replays_train_as_steps_do(rank: Rank, reshard: bool) -> None:
    """Losses and weights of a step that is replayed on other inputs are those of the steps themselves, bit by bit."""
    compare_replays(rank, rank.mesh, reshard)


@on_device(1, fresh=True)
@pytest.mark.parametrize("reshard", [False, True])
def test_replays_of_one_rank_of_eight(rank: Rank, reshard: bool) -> None:
    """The same with shapes, streams and memory of eight ranks that all hold the same."""
    with ranks_alike(rank):
        compare_replays(rank, init_device_mesh(rank.device.type, (8,)), reshard)


def compare_replays(rank: Rank, mesh: DeviceMesh, reshard: bool) -> None:
    if rank.device.type != "cuda":
        pytest.skip("captures are checked on the emulated device, and only CUDA replays them")
    eager, captured = (Run(rank, mesh, reshard).warm_up() for _ in range(2))
    expected = eager.losses(eager.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing runs yet: the weights are those of the beginning
        captured.step()
    assert captured.losses(graph.replay) == expected and len(set(expected)) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(eager.shards(), captured.shards(), strict=True))
