"""Replicas that no longer hold the same bits, and steps that do not compute the same bits twice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from front_ends import FrontEnd, each_front_end
from fullshard import FullyShardedDataParallel, ShardingStrategy, fully_shard, replicate
from fullshard.debug import check_replicas, replay, replica_checks
from fullshard.debug.digests import digest
from fullshard.errors import ReplicaError
from ranks import Rank, on_ranks

WIDTH = 8


class Net(nn.Module):
    """Two layers, an odd parameter, a buffer that is everywhere the same, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.second = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(5))
        self.noise = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x)))) + self.noise
        return self.second(x) * self.scale[0]


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the first element of what this rank holds."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local.detach().view(-1).view(torch.int32)[0] ^= 1


def make(rank: Rank, kind: str) -> Any:
    """A model with replicas on four ranks."""
    net = Net().to(rank.device)
    if kind == "replicate":
        return replicate(net, mesh=rank.mesh)
    mesh = rank.make_mesh(2, 2)
    if kind == "hsdp":
        fully_shard(net.first, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    hybrid = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(net, device_mesh=mesh, sharding_strategy=hybrid, use_orig_params=kind == "original")


KINDS = ("replicate", "hsdp", "original", "flat")


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit(rank: Rank, kind: str) -> None:
    """It is found at the next check, with its FQN and rank, in parameters, state of the optimizer and buffers."""
    model = make(rank, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with replica_checks(model, optimizer, every=2):
        for number in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number + 10 * rank.rank)).to(rank.device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    check_replicas(model, optimizer)
    target = next(parameter for parameter in model.parameters() if parameter.numel())
    state = optimizer.state[target]["exp_avg"]
    buffer = dict(model.named_buffers())[next(name for name, _ in model.named_buffers() if name.endswith("scale"))]
    for tensor, name in ((target, "first.weight"), (state, "first.weight (exp_avg)"), (buffer, "scale")):
        if rank.rank == 3:
            flip(tensor)
        with pytest.raises(ReplicaError) as caught:
            check_replicas(model, optimizer)
        message = str(caught.value)
        if kind != "flat" or name == "scale":
            assert re.search(rf"{re.escape(name)} on (rank 3|ranks \d, 3|rank \d) \(not as on", message), message
        assert caught.value.names or rank.rank in (0, 2)
        assert "3" in message
        if rank.rank == 3:
            flip(tensor)
        check_replicas(model, optimizer)


@on_ranks(4)
def test_what_may_differ(rank: Rank) -> None:
    """Running means of a batch norm, shards of one replica, and what is named."""
    model = make(rank, "hsdp")
    model.scale.fill_(rank.rank)
    model.norm.running_mean.fill_(rank.rank)
    with pytest.raises(ReplicaError, match="scale") as caught:
        check_replicas(model)
    assert caught.value.names == ("scale",)
    check_replicas(model, ignore=["sc*"])
    with pytest.raises(ValueError, match="every: expected at least 1 step, found 0"):
        replica_checks(model, torch.optim.SGD(model.parameters(), lr=0.1), every=0).__enter__()


def test_digests() -> None:
    """Any one bit changes it, in words and in what is left over; so do shape and dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool):
        for numel in (1, 7, 64, 1001):
            tensor = torch.randint(0, 2, (numel + 1,)).to(dtype)[1:]  # not aligned
            before = digest(tensor)
            assert digest(tensor.clone()) == before
            for element in (0, numel // 2, numel - 1):
                changed = tensor.clone()
                changed.view(torch.uint8)[element * tensor.itemsize] ^= 1
                assert digest(changed) != before
    assert digest(torch.zeros(4)) != digest(torch.zeros(2, 2)) and digest(torch.zeros(0)) != digest(torch.zeros(0, 1))
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32))
    assert digest(torch.arange(6.0).view(2, 3).t()) == digest(torch.arange(6.0).view(2, 3).t().contiguous())


@on_ranks(2)
@each_front_end
def test_replay(rank: Rank, front_end: FrontEnd) -> None:
    """A step with dropout is the same twice, and the model has made one step after it; noise is named."""
    results = []
    for replayed in (False, True):
        net = Net().to(rank.device)
        model = front_end.wrap(net, rank, ["first", "second"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)

        def step(model: Any = model, optimizer: Any = optimizer, x: torch.Tensor = x) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        torch.manual_seed(5)
        if replayed:
            found = replay(step, model, optimizer)
            assert found.equal and re.fullmatch(r"bitwise equal \(\d+ values compared on this rank\)", str(found))
        else:
            step()
        results.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
        assert torch.equal(one, other)

    def noisy() -> None:
        net.noise += 0.25 * rank.rank
        step()

    found = replay(noisy, model, optimizer)
    assert not found.equal
    assert found.first == "forward: an input of 'second' on rank 1" and "not equal: forward: an input" in str(found)
    net.noise = 0.0
    assert replay(step, model, optimizer).equal
