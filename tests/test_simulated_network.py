"""The modelled network of plans: exact times, contents, groups, libraries on top of it, and steps on schedule."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.debug.tracing.recorder import Trace, own_groups, recorded
from fullshard.engine.ownership import nested_units
from fullshard.engine.settings import CommStreams
from fullshard.planning.simulation.clocks import HostDevice, SkippingClock
from fullshard.planning.simulation.group import Fabric
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks
from fullshard.planning.simulation.streams import SimulatedDevice, SimulatedLane, simulated_streams
from fullshard.wrap import ModuleWrapPolicy

SLOW = Network(bandwidth=1.0, latency=100.0)  # one byte takes a second, and a launch 100


def still() -> SkippingClock:
    """A clock for which the host's own work takes no time."""
    return SkippingClock(lambda: 0.0)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Rank 1 of 4."""
    with modelled_ranks(4, SLOW, rank=1, device=HostDevice(still())) as fabric:
        yield fabric


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def all_gather(nbytes: int, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Every rank has ``nbytes``."""
    group = group or dist.group.WORLD
    return group._allgather_base(zeros(nbytes * group.size()), zeros(nbytes))


def reduce_scatter(nbytes: int, group: dist.ProcessGroup | None = None) -> dist.Work:
    group = group or dist.group.WORLD
    return group._reduce_scatter_base(zeros(nbytes), zeros(nbytes * group.size()))


# ------------------------------------------------------------------ the link


def test_latency_grows_with_the_levels_of_a_tree() -> None:
    """By log2 N, rounded up; a bandwidth of 0 and negative latencies are refused."""
    network = Network(bandwidth=1.0, latency=1.0, hop_latency=1.0)
    assert (network.alpha(8), network.alpha(9), network.alpha(1)) == (4, 5, 0)
    assert network.seconds(10, 8) == 14 and network.seconds(10, 1) == 0
    for wrong in ({"bandwidth": 0}, {"bandwidth": 1, "latency": -1}):
        with pytest.raises(ValueError, match="expected numbers of at least 0, and a bandwidth"):
            Network(**wrong)
    with pytest.raises(ValueError, match="one of the 4 ranks"), modelled_ranks(4, SLOW, rank=4):
        pass


def test_a_collective_takes_latency_and_what_it_receives() -> None:
    """40 bytes over 4 ranks, of which 30 are others'."""
    seconds: dict[str, tuple[Callable[[], object], float]] = {
        "all-gather": (lambda: dist.all_gather([zeros(10) for _ in range(4)], zeros(10)), 100 + 30),
        "all-reduce": (lambda: dist.all_reduce(zeros(40)), 200 + 2 * 30),
        "broadcast": (lambda: dist.broadcast(zeros(40), src=0), 100 + 40),
        "all-to-all": (lambda: dist.all_to_all_single(zeros(40), zeros(40)), 100 + 30),
        "barrier": (dist.barrier, 200),
    }
    for name, (collective, expected) in seconds.items():
        with modelled_ranks(4, SLOW, rank=1, device=HostDevice(still())) as fabric:
            collective()
            assert fabric.device.clock.now() == expected, name


def test_one_link_takes_one_message_after_another(fabric: Fabric) -> None:
    """A message of another communicator starts when the one before it ends; waiting in any order."""
    first, second = all_gather(10), reduce_scatter(10, dist.new_group())
    assert not first.is_completed()
    second.wait()
    assert fabric.device.clock.now() == 260 and first.is_completed()
    first.wait()
    assert fabric.device.clock.now() == 260


@pytest.mark.parametrize(("like", "seconds"), [("nccl", 100 + 60), ("collective", 200 + 60)])
def test_a_group_call_is_one_launch_where_nccl_makes_it_one(like: Any, seconds: float) -> None:
    """Its collectives share the latency."""
    with modelled_ranks(4, Network(1.0, latency=100.0, like=like), device=HostDevice(still())) as fabric:
        group, device = dist.group.WORLD, torch.device("cpu")
        group._start_coalescing(device)
        works = [all_gather(10), all_gather(10)]
        last = group._end_coalescing(device)
        for work in [last] if last is not None else works:
            work.wait()
        assert fabric.device.clock.now() == seconds


def test_all_ranks_hold_what_this_rank_holds(fabric: Fabric) -> None:
    """All-gathers repeat, sums multiply, means and broadcasts keep, an all-to-all repeats the own part."""
    own = torch.tensor([1.0, 2.0])
    gathered = torch.empty(8)
    work = dist.all_gather_into_tensor(gathered, own, async_op=True)
    assert torch.equal(work.get_future().wait()[0], own.repeat(4))
    for op, expected in ((dist.ReduceOp.SUM, 4.0), (dist.ReduceOp.AVG, 1.0), (dist._make_nccl_premul_sum(0.5), 2.0)):
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(8.0), op=op)
        assert torch.equal(part, expected * torch.tensor([2.0, 3.0]))
    dist.all_reduce(own)
    assert torch.equal(own, torch.tensor([4.0, 8.0]))
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    dist.broadcast(own, src=0)
    assert torch.equal(own, torch.tensor([4.0, 8.0]))
    parts = torch.empty(4)
    dist.all_to_all_single(parts, torch.arange(4.0))
    assert torch.equal(parts, torch.ones(4))
    objects: list[object] = [None] * 4
    dist.all_gather_object(objects, {"rank": 1})
    assert objects == [{"rank": 1}] * 4


def test_the_link_goes_to_the_message_that_is_ready_first() -> None:
    """Also if the host has enqueued it later; but launches of one communicator are in order."""
    for same, starts in ((False, [50.0, 0.0]), (True, [50.0, 80.0])):
        device = SimulatedDevice(still())
        with modelled_ranks(4, Network(1.0), device=device) as fabric:
            other, early = None if same else dist.new_group(), device.stream()
            fabric.passages = []
            device.compute(50.0)
            all_gather(10)
            with device.on(early):
                reduce_scatter(10, other)
            device.synchronize()
            assert [passage.start for passage in fabric.passages] == starts


# ------------------------------------------------------------------ libraries


def wrapped(model: nn.Module, library: Any) -> nn.Module:
    policy, cpu = ModuleWrapPolicy({nn.Linear}), torch.device("cpu")
    return library(model, auto_wrap_policy=policy, device_id=cpu)


def sharded(model: nn.Module, shard: Any) -> nn.Module:
    for module in (*(each for each in model if isinstance(each, nn.Linear)), model):
        shard(module)
    return model


def losses_of(shard: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Of a model whose weights are alike in all rows, so that every sharding repeats to the same full weights."""
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * (index + 1))
    with modelled_ranks(4, Network(1e9)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shard(model)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = (model(torch.ones(2, 16)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_libraries_train_as_the_plain_model() -> None:
    """Where all ranks hold the same; slices of flat parameters repeat to a model of its own, the same for both."""
    expected = losses_of(lambda model: model)
    assert expected[-1] < expected[0]
    for shard in (
        nn.parallel.DistributedDataParallel,
        lambda model: sharded(model, fully_shard),
        lambda model: sharded(model, torch_fully_shard),
    ):
        assert losses_of(shard) == pytest.approx(expected, rel=1e-5)
    peer = torch.distributed.fsdp.FullyShardedDataParallel
    both = [losses_of(lambda model, each=each: wrapped(model, each)) for each in (FullyShardedDataParallel, peer)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


# ------------------------------------------------------------------ steps

ROWS, COLUMNS, UNITS, FORWARD, BACKWARD = 1024, 320, 5, 0.010, 0.020


class Computation(torch.autograd.Function):
    """The identity, which takes its time each way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, device: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.device = device
        device.compute(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient, ctx.device.compute(BACKWARD, lambda: torch.zeros_like(weight)), None


class Timed(nn.Module):
    """A weight whose computation takes so long."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.weight, self.device = nn.Parameter(torch.zeros(ROWS, COLUMNS)), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Computation.apply(x, self.weight, self.device)


def scheduled(message: float) -> float:
    """Seconds of the schedule that all-gathers one unit ahead and has one reduction in flight, all messages alike; the
    last two units stay unsharded until backward."""
    forward = message + (UNITS - 1) * max(FORWARD, message) + FORWARD
    beside = [(index - 1 in range(UNITS - 2)) + (index < UNITS - 1) for index in range(UNITS)]
    return forward + sum(max(BACKWARD, count * message) for count in beside) + message


def timed_step(streams: bool, ratio: float) -> tuple[float, float, float]:
    """Seconds of a later step on 64 ranks, of one message, and of exposed communication in a trace of the step.

    Args:
        streams: Computation and messages are on streams, as on an accelerator; else the host computes and waits.
        ratio: Time of all messages over that of computation.
    """
    nbytes = ROWS * COLUMNS * 4
    bandwidth = 3 * UNITS * nbytes * 63 / 64 / (ratio * UNITS * (FORWARD + BACKWARD))
    network = Network(bandwidth, latency=20e-6, hop_latency=5e-6, like="nccl" if streams else "collective")
    with contextlib.ExitStack() as stack:
        device: Any = SimulatedDevice(still()) if streams else HostDevice(still())
        if streams:
            stack.enter_context(simulated_streams(device))
        stack.enter_context(modelled_ranks(64, network, device=device))
        model = sharded_units(device, streams)

        def step() -> float:
            begun = device.synchronize()
            model(torch.zeros(4, requires_grad=True)).sum().backward()
            return device.synchronize() - begun

        for _ in range(3):
            step()
        clock = SimpleNamespace(mark=device.clock.now, seconds=lambda mark: mark)
        if streams:
            clock.mark = lambda: (device.clock.now(), device.current.after)
            clock.seconds = lambda mark: max([mark[0], *device.ends_of(mark[1])])
        with recorded(clock) as events:
            seconds = step()
        trace = Trace()
        trace.add(0, events, own_groups())
        return seconds, network.seconds(nbytes * 63 / 64, 64), sum(each.seconds for each in trace.exposed(0))


def sharded_units(device: Any, streams: bool) -> nn.Module:
    model = nn.Sequential(*(Timed(device) for _ in range(UNITS)))
    for module in (*model, model):
        fully_shard(module)
    if streams:
        lanes = CommStreams(*(SimulatedLane(device) for _ in CommStreams._fields))
        for unit in nested_units(model):
            unit.settings.comm_streams = lanes
    return model


@pytest.mark.parametrize(("streams", "ratio"), list(itertools.product((False, True), (0.3, 1.0, 3.0))))
def test_a_step_takes_as_long_as_its_schedule(streams: bool, ratio: float) -> None:
    """One unit is prefetched and one reduction in flight, whatever the network; a trace has what is exposed."""
    seconds, message, exposed = timed_step(streams, ratio)
    assert seconds == pytest.approx(scheduled(message), rel=0.01)
    assert exposed == pytest.approx(seconds - UNITS * (FORWARD + BACKWARD), rel=0.02)
