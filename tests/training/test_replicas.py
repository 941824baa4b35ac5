"""Replicas that no longer hold the same bits, and steps that do not compute the same bits twice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from front_ends import FrontEnd, each_front_end
from fullshard import FullyShardedDataParallel, ShardingStrategy, fully_shard, replicate
from fullshard.debug import check_replicas, replay
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
        odd = r"(rank 3 \(not as on|rank \d or on rank 3: which of two is wrong)"
        if kind != "flat" or name == "scale":
            assert re.search(rf"{re.escape(name)} on {odd}", message), message
        assert "found after step 4" in message, message
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


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.flip(0),
        lambda t: t.flip(1),
        lambda t: t * torch.tensor([1.0, -1.0]).repeat(t.shape[1] // 2),
        lambda t: torch.cat([t[:1].neg(), t[1:2].neg(), t[2:]]),
        lambda t: t.view(-1)[torch.randperm(t.numel())].view_as(t),
        lambda t: torch.cat([t[4096:], t[:4096]]),
        lambda t: torch.nextafter(t, t + 1),
    ],
)
def test_digests_depend_on_places(change: Any) -> None:
    """Rows or columns in another order, pairs of flipped signs, and slices that change places are other bits."""
    torch.manual_seed(0)
    for shape in ((8192, 4), (64, 64), (300, 8)):
        tensor = torch.randn(shape)
        assert digest(tensor) == digest(tensor.clone())
        changed = change(tensor)
        assert changed.shape == tensor.shape
        assert torch.equal(changed, tensor) == (digest(changed) == digest(tensor))


def test_digests_of_any_tensor() -> None:
    """Conjugated views, sparse tensors, formats of one byte, and sizes that are no whole words."""
    value = torch.randn(3, dtype=torch.complex64)
    assert digest(value.conj()) != digest(value) and digest(value.conj()) == digest(value.conj().resolve_conj())
    assert digest(torch.eye(4).to_sparse()) != digest((2 * torch.eye(4)).to_sparse())
    assert digest(torch.eye(4).to_sparse_csr()) == digest(torch.eye(4).to_sparse_csr())
    assert digest(torch.ones(7, dtype=torch.bool)) != digest(torch.zeros(7, dtype=torch.bool))
    assert digest(torch.ones(5).to(torch.float8_e4m3fn)) == digest(torch.ones(5).to(torch.float8_e4m3fn))


class Counts(nn.Module):
    """Assigns a new tensor to its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.linear(x) * self.seen


def test_replay_of_buffers_that_are_replaced() -> None:
    """The second run begins with the buffers of the first, and the model has made one step afterwards."""
    model = Counts()
    found = replay(lambda: model(torch.ones(2, WIDTH)).sum().backward(), model)
    assert found.equal and float(model.seen) == 1


@on_ranks(4)
def test_buffers_of_a_part_of_the_ranks(rank: Rank) -> None:
    """Those of units on another mesh are compared over that; names that only some ranks have are named as such."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("pair", "shard"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts()).to(rank.device)
    model[1].seen += rank.rank // 2  # an expert of each pair of ranks
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=rank.mesh)
    with pytest.warns(UserWarning, match="no parameter of this model is replicated"):
        check_replicas(model)
    if rank.rank == 1:
        model[1].seen += 1
    with pytest.raises(ReplicaError, match=r"1.seen on rank 0 or on rank 1: which of two is wrong is not known"):
        check_replicas(model)
