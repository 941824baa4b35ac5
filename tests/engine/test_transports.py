"""Transports: what arrives in gathers and reductions, and what is recorded of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from compare import assert_equal
from fullshard.transport import (
    Collective,
    CollectiveTransport,
    GlooTransport,
    Move,
    NcclTransport,
    Transport,
    make_transport,
    record,
)
from ranks import Rank, on_ranks

TRANSPORTS = pytest.mark.parametrize("kind", [GlooTransport, CollectiveTransport], ids=lambda kind: kind.__name__)
SIZES = [(1,), (5, 16), (3, 70_000, 1, 1024)]  # elements of the pieces that one call moves


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What this rank contributes; whole numbers of at most three digits, different on every rank."""
    return ((torch.arange(numel) + 37 * rank) % 113).to(dtype)


def wait(works: object) -> None:
    for work in works:
        work.wait()


@on_ranks(2, 4)
@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_gather_fills_the_region_in_rank_order(rank: Rank, kind: type[Transport], dtype: torch.dtype) -> None:
    """Every region holds the pieces of all ranks in rank order, however many moves are in one call."""
    transport = kind(rank.group)
    for sizes in SIZES:
        moves = [Move(values(rank.rank, n, dtype), torch.zeros(n * rank.world_size, dtype=dtype)) for n in sizes]
        wait(transport.gather(moves, "unit"))
        for numel, move in zip(sizes, moves, strict=True):
            expected = torch.cat([values(r, numel, dtype) for r in range(rank.world_size)])
            assert_equal(move.region, expected, f"region of {numel}")
            assert_equal(move.piece, values(rank.rank, numel, dtype), "piece")


@on_ranks(2, 4)
@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reduce_gives_each_rank_the_mean_of_its_part(rank: Rank, kind: type[Transport], dtype: torch.dtype) -> None:
    """A rank's piece is the mean over the ranks of its part of their regions."""
    transport = kind(rank.group)
    world = range(rank.world_size)
    for sizes in SIZES:
        regions = [torch.cat([values(rank.rank + 3 * part, n, dtype) for part in world]) for n in sizes]
        moves = [Move(torch.full((n,), -1.0, dtype=dtype), r) for n, r in zip(sizes, regions, strict=True)]
        wait(transport.reduce(moves, "unit"))
        for numel, move in zip(sizes, moves, strict=True):
            total = sum(values(r + 3 * rank.rank, numel, dtype) for r in world)
            assert_equal(move.piece, total / rank.world_size, f"piece of {numel}")


@on_ranks(2, 4)
def test_gloo_sums_in_rank_order(rank: Rank) -> None:
    """The mean is bitwise the left fold of the parts in rank order, divided by the number of ranks."""
    numel, world = 1000, rank.world_size

    def part(of: int, to: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(10 * of + to))

    region = torch.cat([part(rank.rank, to) for to in range(world)])
    piece = torch.empty(numel)
    wait(GlooTransport(rank.group).reduce([Move(piece, region)], "unit"))
    folded = part(0, rank.rank)
    for other in range(1, world):
        folded = folded + part(other, rank.rank)
    assert_equal(piece, folded / world, "piece")


@on_ranks(2, 4)
@TRANSPORTS
def test_several_calls_may_be_in_flight(rank: Rank, kind: type[Transport]) -> None:
    """A gather and reductions that overlap do not mix up their messages, nor those of the user."""
    transport = kind(rank.group)
    world, n = rank.world_size, 2000
    gathers = [Move(values(rank.rank + i, n, torch.float32), torch.zeros(n * world)) for i in range(2)]
    reduction = Move(torch.empty(n), torch.full((n * world,), float(rank.rank)))
    own, theirs = torch.full((3,), float(rank.rank)), torch.empty(3)
    works = [*transport.gather(gathers[:1], "a"), *transport.reduce([reduction], "b")]
    requests = [dist.isend(own, (rank.rank + 1) % world), dist.irecv(theirs, (rank.rank - 1) % world)]
    works += transport.gather(gathers[1:], "c")
    wait(requests)
    wait(works)
    assert_equal(theirs, torch.full((3,), float((rank.rank - 1) % world)), "message of the user")
    for i, move in enumerate(gathers):
        expected = torch.cat([values(r + i, n, torch.float32) for r in range(world)])
        assert_equal(move.region, expected, f"gather {i}")
    assert_equal(reduction.piece, torch.full((n,), (world - 1) / 2), "reduction")


@on_ranks(2, 4)
@TRANSPORTS
def test_every_move_is_recorded(rank: Rank, kind: type[Transport]) -> None:
    """Recording gives kind, unit, dtype, elements and received bytes of each move, inside the block only."""
    transport = kind(rank.group)
    world = rank.world_size
    moves = [Move(torch.ones(n), torch.ones(n * world)) for n in (4, 10)]
    integers = [Move(torch.ones(3, dtype=torch.int32), torch.ones(3 * world, dtype=torch.int32))]
    with record() as collectives:
        wait(transport.gather(moves, "a"))
        with record() as inner:
            wait(transport.reduce(moves, "b"))
        wait(transport.gather(integers, "c"))
    wait(transport.gather(moves, "d"))
    reductions = [Collective("reduce", "b", torch.float32, n * world, 4 * n * (world - 1)) for n in (4, 10)]
    assert inner == reductions
    assert collectives == [
        *(Collective("gather", "a", torch.float32, n * world, 4 * n * (world - 1)) for n in (4, 10)),
        *reductions,
        Collective("gather", "c", torch.int32, 3 * world, 4 * 3 * (world - 1)),
    ]


@on_ranks(2)
def test_failure_inside_a_recording_ends_it(rank: Rank) -> None:
    """A recording ends with its block also when that raises."""
    transport = GlooTransport(rank.group)
    moves = [Move(torch.ones(2), torch.ones(4))]
    with pytest.raises(ZeroDivisionError), record() as collectives:
        raise ZeroDivisionError
    wait(transport.gather(moves, "a"))
    assert collectives == []


@on_ranks(2)
def test_gloo_group_gets_the_gloo_transport(rank: Rank) -> None:
    """The transport is chosen by the back end of the group on the device."""
    transport = make_transport(rank.group, torch.device("cpu"))
    assert type(transport) is GlooTransport
    assert (transport.rank, transport.world_size) == (rank.rank, rank.world_size)
    assert issubclass(NcclTransport, CollectiveTransport)


def test_other_back_ends_get_the_collective_transport() -> None:
    """On c10d's fake group of 8 ranks a model trains with one gather and one reduction per unit as planned."""
    script = """
        import torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from fullshard import fully_shard
        from fullshard.transport import CollectiveTransport, make_transport, record
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
        assert type(make_transport(dist.group.WORLD, torch.device("cpu"))) is CollectiveTransport
        blocks = [fully_shard(torch.nn.Linear(16, 16)) for _ in range(3)]
        model = fully_shard(torch.nn.Sequential(*blocks))
        assert model[0].weight.to_local().shape == (2, 16)
        with record() as collectives:
            model(torch.ones(2, 16)).sum().backward()
        assert all(p.grad.to_local().shape == p.to_local().shape for p in model.parameters())
        kinds = [(c.kind, c.unit) for c in collectives]
        forward = [("gather", "0"), ("gather", "1"), ("gather", "2")]
        assert [k for k in kinds if k[0] == "gather"][:3] == forward, kinds
        assert [k for k in kinds if k[0] == "reduce"] == [("reduce", "2"), ("reduce", "1"), ("reduce", "0")], kinds
        print("trained")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["trained"]
