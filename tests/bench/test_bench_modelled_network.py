"""The modelled network: exact times, contents, groups, the libraries on top of it, and steps beside their bounds."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench.contestants import DDP, FSDP1_FLAT, FSDP2, FULLSHARD, UNSHARDED, WRAPPER_FLAT, distribute
from bench.overlap.bound import UnitCosts, Window, keep_last, scheduled_seconds, step_bound
from bench.overlap.cells import Cell, even_units, measure, uneven_units
from bench.overlap.systems import SYSTEMS
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import run_small
from torch import nn

from fullshard.planning.simulation.clocks import HostDevice, SkippingClock
from fullshard.planning.simulation.group import Fabric
from fullshard.planning.simulation.network import Network
from fullshard.planning.simulation.ranks import modelled_ranks
from fullshard.planning.simulation.streams import SimulatedDevice

SLOW = Network(bandwidth=1.0, latency=100.0)  # one byte takes a second, and a launch 100
BY_NAME = {system.name: system for system in SYSTEMS}


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


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("all_gather", 100 + 30),
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
        "all_reduce": lambda: dist.all_reduce(_bytes(40)),
        "broadcast": lambda: dist.broadcast(_bytes(40), src=0),
        "all_to_all": lambda: dist.all_to_all_single(_bytes(40), _bytes(40)),
        "barrier": dist.barrier,
    }[what]()
    assert fabric.device.clock.now() == seconds


def test_one_link_takes_one_message_after_another(fabric: Fabric) -> None:
    """A message of another communicator starts when the one before it ends; waiting in any order."""
    first, second = _gather(10), _reduce(10, dist.new_group())
    assert not first.is_completed()
    second.wait()
    assert fabric.device.clock.now() == 260 and first.is_completed()
    first.wait()
    assert fabric.device.clock.now() == 260


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


def test_all_ranks_hold_what_this_rank_holds(fabric: Fabric) -> None:
    """Gathers repeat, sums multiply, means and broadcasts keep, an all-to-all repeats the own part."""
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


# ------------------------------------------------------------------ libraries


def _losses(system: str) -> list[float]:
    """Of a model whose weights are alike in all rows, so that every sharding repeats to the same full weights."""
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * (index + 1))
    with modelled_ranks(4, Network(1e9)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = distribute(system, model, nn.Linear, torch.device("cpu"))
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
    expected = _losses(UNSHARDED)
    assert expected[-1] < expected[0]
    for system in (DDP, FULLSHARD, FSDP2):
        assert _losses(system) == pytest.approx(expected, rel=1e-5)
    assert _losses(WRAPPER_FLAT) == pytest.approx(_losses(FSDP1_FLAT), rel=1e-5)


# ------------------------------------------------------------------ streams that keep time


def test_the_link_goes_to_the_message_that_is_ready_first() -> None:
    """Also if the host has enqueued it later; but launches of one communicator are in order."""
    for same, starts in ((False, [50.0, 0.0]), (True, [50.0, 80.0])):
        device = SimulatedDevice(_still())
        with modelled_ranks(4, Network(1.0), device=device) as fabric:
            other, early = None if same else dist.new_group(), device.stream()
            fabric.passages = []
            device.compute(50.0)
            _gather(10)
            with device.on(early):
                _reduce(10, other)
            device.synchronize()
            assert [passage.start for passage in fabric.passages] == starts


# ------------------------------------------------------------------ bounds

_seconds = st.integers(1, 40).map(float)
_units = st.lists(
    st.builds(UnitCosts, _seconds, _seconds, _seconds, _seconds, _seconds, st.integers(1, 9)), min_size=1, max_size=9
)


@settings(max_examples=40, deadline=None)
@given(_units)
def test_the_schedule_of_one_unit_ahead(units: list[UnitCosts]) -> None:
    """The sum over units of the larger of computation and link; a window in bytes is one in units of equal ones."""
    equal = [units[0]] * len(units)
    some, same = Window(2), Window(nbytes=2 * units[0].nbytes)
    assert scheduled_seconds(keep_last(equal, some), some) == scheduled_seconds(keep_last(equal, same), same)
    units = keep_last(units)
    forward = units[0].gather + sum(max(unit.forward, after.gather) for unit, after in itertools.pairwise(units))
    order = units[::-1]
    beside = [
        (order[i + 1].regather if i + 1 < len(order) else 0) + (order[i - 1].reduce if i else 0)
        for i in range(len(order))
    ]
    backward = sum(max(unit.backward, link) for unit, link in zip(order, beside, strict=True))
    expected = forward + units[-1].forward + backward + units[0].reduce
    assert scheduled_seconds(units, Window(1)) == pytest.approx(expected)


def some_schedule(units: list[UnitCosts], limit: int, choices: random.Random) -> float:
    """Seconds of a schedule that gathers ahead, drops units and delays reductions as ``choices`` say."""
    link = now = room_since = 0.0
    arrived: dict[int, float] = {}  # of what is gathered or on its way
    pending: list[tuple[float, float]] = []  # reductions: when they can begin, and how long they take
    order = [*range(len(units)), *reversed(range(len(units)))]

    def gather(index: int) -> None:
        nonlocal link
        while pending and choices.random() < 0.3:
            ready, seconds = pending.pop(choices.randrange(len(pending)))
            link = max(link, ready) + seconds
        link = arrived[index] = max(link, room_since) + units[index].gather

    def held() -> int:
        return sum(units[index].nbytes for index in arrived)

    for place, index in enumerate(order):
        ahead = [each for each in order[place:] if each not in arrived]
        if index not in arrived:
            for other in choices.sample(sorted(arrived), len(arrived)):
                if held() + units[index].nbytes > limit:
                    del arrived[other]
                    room_since = now
            gather(index)
        for other in dict.fromkeys(ahead):
            if other not in arrived and held() + units[other].nbytes <= limit and choices.random() < 0.7:
                gather(other)
        backward = place >= len(units)
        now = max(now, arrived[index]) + (units[index].backward if backward else units[index].forward)
        if backward:
            pending.append((now, units[index].reduce))
        if choices.random() < 0.5 or backward:
            del arrived[index]
            room_since = now
    for ready, seconds in sorted(pending):
        link = max(link, ready) + seconds
    return max(now, link)


@settings(max_examples=150, deadline=None)
@given(_units, st.integers(0, 30), st.randoms(use_true_random=False))
def test_no_schedule_is_faster_than_the_bound(units: list[UnitCosts], more: int, choices: random.Random) -> None:
    """Whatever it does within its memory, and without a limit; more memory never raises the bound."""
    limit = max(unit.nbytes for unit in units) + more
    bound, free = step_bound(units, limit), step_bound(units)
    assert free.seconds - 1e-9 <= bound.seconds <= some_schedule(units, limit, choices) + 1e-9
    assert bound.seconds >= max(bound.computation, bound.link)
    assert bound.seconds >= units[0].gather + bound.computation + units[0].reduce - 1e-9
    assert step_bound(units, limit + 3).seconds <= bound.seconds + 1e-9
    with pytest.raises(ValueError, match="less than the largest unit"):
        step_bound(units, 0)


def test_the_bound_is_reached() -> None:
    """By hand: two units of one byte, memory for one: every message but the regather of the last is on the way."""
    units = [UnitCosts(1.0, 2.0, 3.0, 3.0, 4.0, 1)] * 2
    # g1 f1 g2 f2 b2 g1 b1 s1, s2 beside the end; with room for both, nothing is gathered again.
    assert step_bound(units, 1).seconds == 3 + 1 + 3 + 1 + 2 + 3 + 4 + 4
    assert step_bound(units, 2).seconds == 3 + 3 + 1 + 2 + 4 + 4


@pytest.mark.parametrize(("device", "ranks", "ratio"), [("streams", 8, 0.3), ("host", 1024, 1.0), ("streams", 64, 3.0)])
def test_nobody_undercuts_the_bound_and_we_are_near_it(device: str, ranks: int, ratio: float) -> None:
    """What schedules take, the host's own work left out; nothing ahead is far above."""
    measured = measure(Cell("even", even_units(5), device, ranks, ratio, "none"), SYSTEMS, rounds=1, warmup=1)
    assert not measured.failures
    over = {system.name: measured.over_bound(system.name).median for system in SYSTEMS}
    assert min(over.values()) >= 1 - 1e-9
    assert over["fullshard"] <= 1.06 and over["fullshard, none ahead"] >= 1.2
    assert measured.scheduled() == pytest.approx(measured.steps["fullshard"][0], rel=0.01)


@pytest.mark.parametrize("device", ["host", "streams"])
def test_more_ahead_gains_what_the_schedule_predicts(device: str) -> None:
    """Two units ahead and two reductions in flight: a fifth less than one of each, and one kept, with uneven units."""
    system = BY_NAME["fullshard, 2 ahead, 2 reductions"]
    measured = measure(Cell("uneven", uneven_units(), device, 64, 1.0, "none"), [system], rounds=1, warmup=1)
    predicted, costs = measured.scheduled(2, 2), measured.costs
    one_kept = scheduled_seconds([*costs[:-1], replace(costs[-1], regather=0.0)], measured.window(1))
    assert predicted < 0.8 * one_kept and predicted < measured.scheduled() < one_kept
    assert measured.over_bound(system.name).median >= 1 - 1e-9
    assert measured.steps[system.name] == pytest.approx([predicted], rel=0.01)


def test_overlap(tmp_path: Path) -> None:
    """The benchmark: FSDP2 and FSDP1 block on a CPU host; with streams that keep time they overlap as ours do."""
    options = "--ranks 64 --ratio 1 --what even --rounds 1 --clock none --only fullshard --only FSDP2 --only"
    page, stored = run_small(tmp_path, "overlap", options, "FSDP1 PRE")
    over = {
        (cell["device"], name): entry["over_bound"]["median"]
        for cell in stored["cells"]
        for name, entry in cell["contestants"].items()
    }
    assert len(over) == 6 and all(over[device, "fullshard"] <= 1.05 for device in ("host", "streams"))
    for peer in ("FSDP2", "FSDP1 PRE"):
        assert over["host", peer] > 1.5 and over["streams", peer] < 1.1
    assert "| fullshard |" in page and list(tmp_path.glob("*.png"))
