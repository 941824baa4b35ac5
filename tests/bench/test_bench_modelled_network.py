"""The modelled network: exact times, contents, groups, and the libraries on top of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from bench.simulators.clocks import HostDevice, SkippingClock, WallClock
from bench.simulators.network import Fabric, Network, modelled_ranks
from bench.simulators.streams import SimulatedDevice, SimulatedEvent, SimulatedLane, simulated_streams
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# One byte takes a second, and a launch 100.
SLOW = Network(bandwidth=1.0, latency=100.0, hops="ring")


def _still() -> SkippingClock:
    """A clock for which the host's own work takes no time."""
    return SkippingClock(lambda: 0.0)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Rank 1 of 4."""
    with modelled_ranks(4, SLOW, rank=1, device=HostDevice(_still())) as fabric:
        yield fabric


def _bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def _gather(nbytes: int, group: dist.ProcessGroup | None = None) -> dist.Work:
    """A gather of which every rank has ``nbytes``."""
    group = group or dist.group.WORLD
    return group._allgather_base(_bytes(nbytes * group.size()), _bytes(nbytes))


def _reduce(nbytes: int, group: dist.ProcessGroup | None = None) -> dist.Work:
    group = group or dist.group.WORLD
    return group._reduce_scatter_base(_bytes(nbytes), _bytes(nbytes * group.size()))


@pytest.mark.parametrize(("hops", "ranks", "seconds"), [("ring", 8, 1 + 7), ("tree", 8, 1 + 3), ("tree", 9, 1 + 4)])
def test_latency_grows_with_the_hops(hops: str, ranks: int, seconds: float) -> None:
    """A ring has N - 1 hops, a tree log2 N of them, rounded up."""
    network = Network(bandwidth=1.0, latency=1.0, hop_latency=1.0, hops=hops)
    assert network.alpha(ranks) == seconds
    assert network.seconds(10, ranks) == seconds + 10
    assert network.seconds(10, 1) == 0


def test_a_link_needs_bandwidth() -> None:
    """A bandwidth of 0 and negative latencies are refused."""
    with pytest.raises(ValueError, match="positive bandwidth"):
        Network(bandwidth=0)
    with pytest.raises(ValueError, match="at least 0"):
        Network(bandwidth=1, latency=-1)


def test_a_skipping_clock_shows_work_and_what_it_skipped() -> None:
    """It never goes back, and stands still where it is told to."""
    worked = 0.0
    clock = SkippingClock(lambda: worked)
    clock.wait_until(5)
    worked = 2.0
    assert clock.now() == 7
    clock.wait_until(6)
    assert clock.now() == 7
    with clock.outside():
        worked = 10.0
    assert clock.now() == 7


def test_a_wall_clock_does_not_return_early() -> None:
    """But for the smoothed error that it allows for, which is below a millisecond."""
    clock = WallClock()
    for _ in range(5):
        deadline = clock.now() + 0.002
        clock.wait_until(deadline)
        assert clock.now() >= deadline - 1e-3


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("all_gather", 100 + 30),
        ("reduce_scatter", 100 + 30),
        ("all_reduce", 200 + 2 * 30),
        ("broadcast", 100 + 40),
        ("all_to_all", 100 + 30),
        ("barrier", 200),
    ],
)
def test_a_collective_takes_latency_and_what_it_receives(fabric: Fabric, what: str, seconds: float) -> None:
    """40 bytes over 4 ranks, of which 30 are others'."""
    {
        "all_gather": lambda: dist.all_gather([_bytes(10) for _ in range(4)], _bytes(10)),
        "reduce_scatter": lambda: dist.reduce_scatter(_bytes(10), [_bytes(10) for _ in range(4)]),
        "all_reduce": lambda: dist.all_reduce(_bytes(40)),
        "broadcast": lambda: dist.broadcast(_bytes(40), src=0),
        "all_to_all": lambda: dist.all_to_all_single(_bytes(40), _bytes(40)),
        "barrier": dist.barrier,
    }[what]()
    assert fabric.device.clock.now() == seconds


def test_one_link_takes_one_message_after_another(fabric: Fabric) -> None:
    """A message that is issued while another is on its way starts when that ends; waiting in any order."""
    first, second = _gather(10), _reduce(10, dist.new_group())
    assert not first.is_completed()
    second.wait()
    assert fabric.device.clock.now() == 260 and first.is_completed()
    first.wait()
    assert fabric.device.clock.now() == 260


@pytest.mark.parametrize(
    ("options", "same", "seconds"),
    [
        ({"links": "own"}, False, 130),
        ({"links": "own"}, True, 260),
        ({"duplex": True}, False, 130),
        ({"duplex": True}, True, 260),  # one communicator is in order
        ({"duplex": True, "like": "collective"}, True, 130),
    ],
)
def test_who_shares_a_link(options: dict[str, object], same: bool, seconds: float) -> None:
    """A gather and a reduction, of one communicator or of two, side by side or not."""
    network = Network(1.0, latency=100.0, **options)
    with modelled_ranks(4, network, device=HostDevice(_still())) as fabric:
        works = [_gather(10), _reduce(10, None if same else dist.new_group())]
        for work in works:
            work.wait()
        assert fabric.device.clock.now() == seconds


@pytest.mark.parametrize(("like", "seconds"), [("nccl", 100 + 60), ("collective", 200 + 60)])
def test_a_group_call_is_one_launch_where_nccl_makes_it_one(like: str, seconds: float) -> None:
    """Its collectives share the latency."""
    with modelled_ranks(4, Network(1.0, latency=100.0, like=like), device=HostDevice(_still())) as fabric:
        group, device = dist.group.WORLD, torch.device("cpu")
        group._start_coalescing(device)
        works = [_gather(10), _gather(10)]
        last = group._end_coalescing(device)
        for work in [last] if last is not None else works:
            work.wait()
        assert fabric.device.clock.now() == seconds
        outputs = [torch.empty(8), torch.empty(8)]
        with dist._coalescing_manager():
            for index, output in enumerate(outputs):
                dist.all_gather_into_tensor(output, torch.full((2,), float(index + 1)))
        assert torch.equal(torch.stack(outputs), torch.tensor([[1.0] * 8, [2.0] * 8]))


def test_all_ranks_hold_what_this_rank_holds(fabric: Fabric) -> None:
    """Gathers repeat, sums multiply, means and broadcasts keep, an all-to-all repeats the own part."""
    own = torch.tensor([1.0, 2.0])
    gathered = torch.empty(8)
    dist.all_gather_into_tensor(gathered, own)
    assert torch.equal(gathered, own.repeat(4))
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(8.0))
    assert torch.equal(part, torch.tensor([8.0, 12.0]))
    dist.reduce_scatter_tensor(part, torch.arange(8.0), op=dist.ReduceOp.AVG)
    assert torch.equal(part, torch.tensor([2.0, 3.0]))
    dist.reduce_scatter_tensor(part, torch.arange(8.0), op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(part, torch.tensor([4.0, 6.0]))
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


def test_futures_and_fills_under_a_wall_clock() -> None:
    """The link's thread writes what arrives, and calls back at the end and not before."""
    with modelled_ranks(4, Network(1e4, latency=0.01), device=HostDevice(WallClock())) as fabric:
        fabric.messages = []
        own, gathered = torch.arange(2.0), torch.empty(8)
        work = dist.all_gather_into_tensor(gathered, own, async_op=True)
        work.get_future().wait()
        assert fabric.device.clock.now() >= fabric.messages[0].passage.end - 2e-3
        work.wait()
        assert torch.equal(gathered, own.repeat(4))
        later = dist.all_reduce(own, async_op=True)
        later.wait()
        assert torch.equal(later.get_future().wait()[0], torch.tensor([0.0, 4.0]))


def test_two_axes() -> None:
    """A mesh of 4 x 64 has groups of 64, and fullshard's replicas and shards train on it."""
    from fullshard import fully_shard

    with modelled_ranks(256, Network(1e9), rank=70, device=HostDevice(_still())) as fabric:
        mesh = init_device_mesh("cpu", (4, 64), mesh_dim_names=("replicate", "shard"))
        assert list(mesh.get_coordinate()) == [1, 6] and mesh.get_group("shard").size() == 64
        model = fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh)
        fabric.messages = []
        model(torch.ones(1, 64)).sum().backward()
        assert {message.what for message in fabric.messages} == {"all_gather", "reduce_scatter", "all_reduce"}
        assert torch.equal(model.weight.grad.to_local(), torch.ones(1, 64))


def test_four_thousand_ranks() -> None:
    """Ranks cost nothing: the last of 4,096 has one row of each gradient."""
    from fullshard import fully_shard

    with modelled_ranks(4096, Network(1e9), rank=4095, device=HostDevice(_still())) as fabric:
        model = fully_shard(nn.Linear(4, 4096, bias=False), mesh=init_device_mesh("cpu", (4096,)))
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(model.weight.grad.to_local(), torch.ones(1, 4))
        assert fabric.device.clock.now() > 0


def test_no_group_outside() -> None:
    """Nothing is left behind, and a rank outside the ranks is refused."""
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="one of the 4 ranks"), modelled_ranks(4, SLOW, rank=4):
        pass


def _losses(library: str, steps: int = 3) -> list[float]:
    """Of a model whose weights are alike in all rows, so that every sharding repeats to the same full weights."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * (index + 1))
    with modelled_ranks(4, Network(1e9)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if library == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif library in ("fsdp1", "wrapper"):
            if library == "fsdp1":
                from torch.distributed.fsdp import FullyShardedDataParallel
            else:
                from fullshard import FullyShardedDataParallel
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        elif library != "plain":
            if library == "fsdp2":
                from torch.distributed.fsdp import fully_shard
            else:
                from fullshard import fully_shard
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(steps):
            loss = (model(torch.ones(2, 16)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("library", ["ddp", "fullshard", "fsdp2"])
def test_libraries_train_as_the_plain_model(library: str) -> None:
    """Where all ranks hold the same, gradients are those of the plain model."""
    expected = _losses("plain")
    assert expected[-1] < expected[0]
    assert _losses(library) == pytest.approx(expected, rel=1e-5)


def test_wrappers_train_alike() -> None:
    """One slice of all parameters repeats to a model of its own, the same for both."""
    assert _losses("wrapper") == pytest.approx(_losses("fsdp1"), rel=1e-5)


# ---------------------------------------------------------------------------------------------- streams that keep time


def test_streams_run_beside_one_another() -> None:
    """Computation on one stream and a message on another overlap; an event has one wait for the other."""
    device = SimulatedDevice(_still())
    with simulated_streams(device), modelled_ranks(4, Network(1.0), device=device):
        side = torch.cpu.Stream()
        device.compute(50.0)
        with torch.cpu.stream(side):
            _gather(10).wait()
            done = side.record_event()
        assert device.clock.now() == 0
        torch.cpu.current_stream().wait_event(done)
        device.compute(5.0)
        assert device.synchronize() == 55
        assert done.query()


def test_a_stream_waits_for_another() -> None:
    """A message behind an event starts when the event's stream has come there, and holds up who waits for it."""
    device = SimulatedDevice(_still())
    with simulated_streams(device), modelled_ranks(4, Network(1.0), device=device):
        side = device.stream()
        device.compute(50.0)
        side.wait_stream(device.current)
        with device.on(side):
            _gather(10).wait()
        event = SimulatedEvent(device)
        event.record(side)
        event.synchronize()
        assert device.clock.now() == 80


def test_the_link_goes_to_the_message_that_is_ready_first() -> None:
    """Also if the host has enqueued it later."""
    device = SimulatedDevice(_still())
    with modelled_ranks(4, Network(1.0), device=device) as fabric:
        other, early = dist.new_group(), device.stream()
        fabric.messages = []
        device.compute(50.0)
        _gather(10)
        with device.on(early):
            _reduce(10, other)
        device.synchronize()
        assert [(m.what, m.passage.start) for m in fabric.messages] == [("all_gather", 50.0), ("reduce_scatter", 0.0)]


def test_a_simulated_lane_orders_by_events() -> None:
    """What a lane issues starts after the computation before it, and only who waits for its ticket is held up."""
    device = SimulatedDevice(_still())
    with modelled_ranks(4, Network(1.0), device=device):
        lane = SimulatedLane(device)
        device.compute(10.0)
        ticket = lane.issue(lambda: [_gather(10)], lambda: None)
        device.compute(10.0)
        ticket.wait()
        device.compute(1.0)
        assert device.synchronize() == 41
