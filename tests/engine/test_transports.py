"""Transports: what arrives in gathers and reductions, and what is recorded of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from compare import assert_close, assert_equal
from fullshard.comm import (
    AllGather,
    Collective,
    CollectiveTransport,
    CommRequest,
    CustomTransport,
    GlooTransport,
    GradScaling,
    NcclTransport,
    Operand,
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    ReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
    Transport,
    make_transport,
    part_of,
    record,
)
from fullshard.comm.collective import nccl_reduction
from fullshard.comm.pooled import SymmetricMemory
from fullshard.comm.summation import fold
from ranks import Rank, on_ranks

# Gloo sends and receives host memory; on an accelerator the transports are the others.
GLOO = pytest.mark.cpu_only("gloo sends and receives host memory only")
TRANSPORTS = pytest.mark.parametrize(
    "kind",
    [pytest.param(GlooTransport, marks=GLOO), CollectiveTransport],
    ids=["GlooTransport", "CollectiveTransport"],
)
SIZES = [(1,), (5, 16), (3, 70_000, 1, 1024)]  # elements of the pieces that one call moves


_ONE_SECOND = timedelta(seconds=1)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What this rank contributes; whole numbers of at most three digits, different on every rank."""
    return ((torch.arange(numel) + 37 * rank) % 113).to(dtype)


def wait(works: object) -> None:
    for work in works:
        work.wait()


def in_place(tensors: Sequence[torch.Tensor]) -> list[Operand]:
    return [Operand(tensor, tensor) for tensor in tensors]


def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gathered(tensor: torch.Tensor, rank: Rank) -> list[torch.Tensor]:
    """``tensor`` of every rank."""
    everyone = [torch.empty_like(tensor) for _ in range(rank.world_size)]
    dist.all_gather(everyone, tensor)
    return everyone


class CommQuantization:
    """A process group that writes down the messages that pass: size, tag, and where they were sent from."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.messages, self.tags, self.places = group, [], [], []

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.messages.append((peer, tensors[0].nbytes))
        self.tags.append(tag)
        self.places.append(tensors[0].data_ptr())
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self.group.recv(tensors, peer, tag)


# Gathers


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        (CollectiveTransport, [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8]),
        pytest.param(
            GlooTransport,
            [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn],
            marks=GLOO,
        ),
    ],
    ids=["CollectiveTransport", "GlooTransport"],
)
def test_gather_fills_the_region_in_rank_order(
    rank: Rank, kind: type[Transport], dtypes: Sequence[torch.dtype]
) -> None:
    """Every region holds the pieces of all ranks in rank order, however many moves are in one call, in any dtype."""
    transport = kind(rank.group)
    for dtype in dtypes:
        for sizes in SIZES:
            operands = [Operand(values(rank.rank, n, dtype), torch.zeros(n * rank.world_size).to(dtype)) for n in sizes]
            wait(transport.all_gather([CommRequest("unit", operands)]))
            for numel, operand in zip(sizes, operands, strict=True):
                expected = torch.cat([values(r, numel, dtype) for r in range(rank.world_size)])
                assert_equal(
                    operand.unsharded.view(torch.uint8), expected.view(torch.uint8), f"{dtype} region of {numel}"
                )
                assert_equal(
                    operand.shard.view(torch.uint8), values(rank.rank, numel, dtype).view(torch.uint8), "piece"
                )


@on_ranks(2, 4)
@TRANSPORTS
def test_gather_of_mixed_dtypes_in_one_launch(rank: Rank, kind: type[Transport]) -> None:
    """The parcels of one launch may differ in dtype, and some of their moves may be empty."""
    transport = kind(rank.group)
    world = rank.world_size
    requests = [
        CommRequest(
            str(dtype), [Operand(values(rank.rank, n, dtype), torch.zeros(n * world, dtype=dtype)) for n in (7, 0, 30)]
        )
        for dtype in (torch.uint8, torch.float64, torch.bfloat16)
    ]
    wait(transport.all_gather(requests))
    for _, operands, _ in requests:
        for operand in operands:
            n, dtype = operand.shard.numel(), operand.shard.dtype
            assert_equal(operand.unsharded, torch.cat([values(r, n, dtype) for r in range(world)]), f"{dtype} of {n}")


@on_ranks(2, 4)
@TRANSPORTS
def test_gather_of_a_piece_in_its_own_region(rank: Rank, kind: type[Transport]) -> None:
    """A piece may be this rank's part of the region."""
    region = torch.zeros(100 * rank.world_size)
    piece = region.narrow(0, 100 * rank.rank, 100).copy_(values(rank.rank, 100, torch.float32))
    wait(kind(rank.group).all_gather([CommRequest("unit", [Operand(piece, region)])]))
    assert_equal(region, torch.cat([values(r, 100, torch.float32) for r in range(rank.world_size)]), "region")


# Reductions and divisions


def reduction_of(rank: Rank, sizes: Sequence[int], dtype: torch.dtype) -> list[Operand]:
    """Moves to reduce: this rank contributes ``values(rank + 3 * part)`` to the piece of rank ``part``."""
    world = range(rank.world_size)
    return [
        Operand(torch.full((n,), -1.0).to(dtype), torch.cat([values(rank.rank + 3 * part, n, dtype) for part in world]))
        for n in sizes
    ]


@on_ranks(2, 4)
@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_reduce_gives_each_rank_the_sum_of_its_part(rank: Rank, kind: type[Transport], dtype: torch.dtype) -> None:
    """A rank's piece is the sum over the ranks of its part of their regions, divided before and after."""
    transport = kind(rank.group)
    world = rank.world_size
    for scaling in (
        GradScaling(),
        GradScaling(after=world),
        GradScaling(before=2, after=world / 2),
        GradScaling(1, world, False),
    ):
        for sizes in SIZES:
            operands = reduction_of(rank, sizes, dtype)
            wait(transport.reduce_scatter([CommRequest("unit", operands, scaling)]))
            for numel, operand in zip(sizes, operands, strict=True):
                total = sum(values(r + 3 * rank.rank, numel, torch.float64) for r in range(world))
                expected = (total / (scaling.before * scaling.after)).to(dtype)
                if dtype is torch.bfloat16:  # the sums of two need 8 bits of precision, those of four 9
                    assert_close(operand.shard, expected, f"piece of {numel}", rtol=2**-7)
                else:
                    assert_equal(operand.shard, expected, f"{scaling} piece of {numel}")


@on_ranks(2, 4)
@TRANSPORTS
def test_parcels_of_one_launch_have_their_own_divisions(rank: Rank, kind: type[Transport]) -> None:
    """Sums of one launch are divided parcel by parcel."""
    transport = kind(rank.group)
    divisions = [GradScaling(), GradScaling(after=8), GradScaling(before=4), GradScaling(before=2, after=2)]
    requests = [CommRequest(str(i), reduction_of(rank, (5, 70_000), torch.float32), d) for i, d in enumerate(divisions)]
    wait(transport.reduce_scatter(requests))
    for _, operands, scaling in requests:
        for operand in operands:
            total = sum(values(r + 3 * rank.rank, operand.shard.numel(), torch.float32) for r in range(rank.world_size))
            assert_equal(operand.shard, total / (scaling.before * scaling.after), f"{scaling}")


@on_ranks(2, 4)
@TRANSPORTS
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_division_before_keeps_fp16_in_range(rank: Rank, kind: type[Transport], operation: str) -> None:
    """Inputs whose sum overflows fp16 have a finite mean when they are divided beforehand, and only then."""
    transport = kind(rank.group)
    world, n = rank.world_size, 10

    def mean(scaling: GradScaling) -> torch.Tensor:
        region = torch.full((n * world,), 60_000.0, dtype=torch.float16)
        operand = Operand(torch.empty(n, dtype=torch.float16) if operation == "reduce_scatter" else region, region)
        wait(getattr(transport, operation)([CommRequest("unit", [operand], scaling)]))
        return operand.shard

    split = mean(GradScaling(before=world))
    assert_equal(split, torch.full_like(split, 60_000.0), "divided beforehand")
    # The counterproof, where the sum is in fp16: on more ranks gloo's is in fp32, block by block.
    if world == 2:
        assert mean(GradScaling(after=world)).isinf().all()


@GLOO
@on_ranks(2, 4)
def test_gloo_sums_in_rank_order(rank: Rank) -> None:
    """The mean is bitwise the left fold of the parts in rank order, divided by the number of ranks."""
    numel, world = 1000, rank.world_size

    def part(of: int, to: int) -> torch.Tensor:
        return noise(10 * of + to, numel)

    region = torch.cat([part(rank.rank, to) for to in range(world)])
    piece = torch.empty(numel)
    wait(
        GlooTransport(rank.group).reduce_scatter(
            [CommRequest("unit", [Operand(piece, region)], GradScaling(after=world))]
        )
    )
    folded = part(0, rank.rank)
    for other in range(1, world):
        folded = folded + part(other, rank.rank)
    assert_equal(piece, folded / world, "piece")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_more_than_two_half_terms_are_rounded_once(dtype: torch.dtype) -> None:
    """Small terms survive beside a large one, which they would not in the terms' dtype; over several blocks."""
    numel = 300_000
    terms = [torch.full((numel,), 2048.0).to(dtype), *(torch.full((numel,), 0.75).to(dtype) for _ in range(30))]
    by_halves = terms[0] + terms[1]
    assert by_halves[0] == terms[0][0]
    target = terms[3]
    expected = torch.full((numel,), (2048 + 30 * 0.75) * 0.5).to(dtype)
    fold(terms, target, 0.5)
    assert_equal(target, expected, "sum")


@pytest.mark.parametrize("target", [0, 1, 2, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fold_may_write_to_any_of_its_terms(dtype: torch.dtype, target: int | None) -> None:
    """The sum is the same whether it is written to one of the terms or beside them."""
    terms = [noise(i, 1000, dtype) for i in range(3)]
    expected = ((terms[0].float() + terms[1].float() + terms[2].float()) * 0.25).to(dtype)
    into = torch.empty(1000, dtype=dtype) if target is None else terms[target]
    fold(terms, into, 0.25)
    assert_equal(into, expected, "sum")


# All-reduces

ODD_SIZES = (1, 2, 3, 5, 1000, 99_999, 131_073)


@on_ranks(2, 3, 4)
@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_reduce_of_any_size(rank: Rank, kind: type[Transport], dtype: torch.dtype) -> None:
    """Tensors whose size the ranks do not divide are summed, divided, and the same on all ranks, bit for bit."""
    transport = kind(rank.group)
    world = rank.world_size
    for scaling in (GradScaling(), GradScaling(after=world), GradScaling(before=2, after=2)):
        tensors = [noise(rank.rank, n, dtype) for n in ODD_SIZES]
        wait(transport.all_reduce([CommRequest("unit", in_place(tensors), scaling)]))
        for n, tensor in zip(ODD_SIZES, tensors, strict=True):
            total = sum(noise(r, n, dtype) for r in range(world))
            what = f"{scaling}, {n} elements"
            assert_close(tensor, total / (scaling.before * scaling.after), what, rtol=1e-5, atol=1e-6)
            for other, theirs in enumerate(gathered(tensor, rank)):
                assert_equal(theirs, tensor, f"{what}, of rank {other}")


@GLOO
@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_gloo_all_reduce_is_the_fold_in_rank_order(rank: Rank, dtype: torch.dtype) -> None:
    """Sums are bitwise the left fold in rank order; those of half precision on more than two ranks in fp32."""
    transport = GlooTransport(rank.group)
    tensors = [(100 * noise(rank.rank, n)).to(dtype) for n in ODD_SIZES]
    wait(transport.all_reduce([CommRequest("unit", in_place(tensors))]))
    wide = rank.world_size > 2 and dtype in (torch.bfloat16, torch.float16)
    for n, tensor in zip(ODD_SIZES, tensors, strict=True):
        terms = [(100 * noise(r, n)).to(dtype) for r in range(rank.world_size)]
        folded = terms[0].float() if wide else terms[0]
        for term in terms[1:]:
            folded = folded + term
        assert_equal(tensor, folded.to(dtype), f"{n} elements")


@on_ranks(2, 4)
@TRANSPORTS
def test_all_reduces_in_flight_together(rank: Rank, kind: type[Transport]) -> None:
    """All-reduces, a gather and a reduction that were all issued before the first wait do not mix up."""
    transport = kind(rank.group)
    world = rank.world_size
    tensors = [[values(rank.rank + i, n, torch.float32) for n in (3, 40_001)] for i in range(4)]
    launches = [transport.all_reduce([CommRequest(f"all {i}", in_place(each))]) for i, each in enumerate(tensors)]
    gather = Operand(values(rank.rank, 9, torch.float32), torch.zeros(9 * world))
    reduction = reduction_of(rank, (11,), torch.float32)
    others = [
        *transport.all_gather([CommRequest("g", [gather])]),
        *transport.reduce_scatter([CommRequest("r", reduction)]),
    ]
    wait(launches[0])
    wait(others)
    late = transport.all_gather([CommRequest("late", [gather])])  # between two second halves of all-reduces
    for launch in launches[1:]:
        wait(launch)
    wait(late)
    for i, each in enumerate(tensors):
        for tensor in each:
            total = sum(values(r + i, tensor.numel(), torch.float32) for r in range(world))
            assert_equal(tensor, total, f"all-reduce {i}")
    assert_equal(gather.unsharded, torch.cat([values(r, 9, torch.float32) for r in range(world)]), "all_gather")
    total = sum(values(r + 3 * rank.rank, 11, torch.float32) for r in range(world))
    assert_equal(reduction[0].shard, total, "reduction")


# Joined messages


@GLOO
@on_ranks(2, 4)
def test_small_moves_of_a_launch_share_one_message_per_peer(rank: Rank) -> None:
    """Two or more small pieces, whatever their units and dtypes, cost each peer one message; large ones one each."""
    wire = CommQuantization(rank.group)
    transport = GlooTransport(wire)
    world, peers = rank.world_size, rank.world_size - 1

    def operand(numel: int, dtype: torch.dtype = torch.float32) -> Operand:
        return Operand(values(rank.rank, numel, dtype), torch.zeros(numel * world, dtype=dtype))

    def bytes_sent(operation: str, *units: list[Operand]) -> list[int]:
        wire.messages.clear()
        wait(getattr(transport, operation)([CommRequest(str(i), operands) for i, operands in enumerate(units)]))
        sizes = {peer: sorted(n for to, n in wire.messages if to == peer) for peer, _ in wire.messages}
        assert len(sizes) == peers
        assert len({tuple(each) for each in sizes.values()}) == 1, "the same to every peer"
        return next(iter(sizes.values()))

    small = 64 * 1024 // 4 - 1
    for operation in ("all_gather", "reduce_scatter"):
        assert bytes_sent(operation, [operand(small)]) == [4 * small], "alone"
        assert bytes_sent(operation, [operand(3)], [operand(5)]) == [32], "two units"
        assert bytes_sent(operation, [operand(3), operand(7, torch.uint8)], [operand(5, torch.float64)]) == [59], (
            "dtypes"
        )
        assert bytes_sent(operation, [operand(small + 1)], [operand(small + 1)]) == [4 * small + 4] * 2, "large ones"
        assert bytes_sent(operation, [operand(small + 1), operand(2)], [operand(1)]) == [12, 4 * small + 4], "both"
        assert bytes_sent(operation, [operand(3), operand(0)], [operand(0)]) == [12], "empty ones do not travel"


@GLOO
@on_ranks(2, 4)
def test_two_gloo_launches_never_share_a_tag(rank: Rank) -> None:
    """A launch has one tag, made of its kind, the names of all its units in order, and a count."""
    wire = CommQuantization(rank.group)
    transport = GlooTransport(wire)

    def name_bits(*units: str, operation: str = "all_gather") -> int:
        wire.tags.clear()
        n = rank.world_size
        requests = [
            CommRequest(unit, [Operand(torch.ones(3), torch.ones(3 * n)), Operand(torch.ones(2), torch.ones(2 * n))])
            for unit in units
        ]
        wait(getattr(transport, operation)(requests))
        assert len(set(wire.tags)) == 1
        counts.add(wire.tags[0] & 0xFFFF)
        return wire.tags[0] >> 16

    counts: set[int] = set()
    names = [
        name_bits("a"),
        name_bits("a", "b"),
        name_bits("b", "a"),
        name_bits("ab"),
        name_bits("a", operation="reduce_scatter"),
    ]
    assert len(set(names)) == 5
    assert name_bits("a", "b") == names[1]
    assert len(counts) == 6


@GLOO
@on_ranks(2)
def test_a_lone_small_piece_and_large_ones_are_sent_from_where_they_are(rank: Rank) -> None:
    """Only what is joined is copied."""
    wire = CommQuantization(rank.group)
    large, small = torch.ones(20_000), torch.ones(3)
    operands = [Operand(piece, torch.zeros(2 * piece.numel())) for piece in (large, small)]
    wait(GlooTransport(wire).all_gather([CommRequest("unit", operands)]))
    assert sorted(wire.places) == sorted([large.data_ptr(), small.data_ptr()])


@GLOO
@on_ranks(2)
@pytest.mark.parametrize("units", [("a", "b"), ("a",)], ids=len)
def test_ranks_with_different_launches_time_out(rank: Rank, units: tuple[str, ...]) -> None:
    """A joint launch of other units on another rank is not taken for this one, though the bytes would fit."""
    mine = units if rank.rank == 0 else (*units[:-1], "x")
    group = dist.new_group(timeout=_ONE_SECOND)
    transport = GlooTransport(group)
    operands = [Operand(torch.ones(2), torch.zeros(4)) for _ in units]
    works = transport.all_gather([CommRequest(unit, [operand]) for unit, operand in zip(mine, operands, strict=True)])
    with pytest.raises(RuntimeError):
        works[0].wait()
    for operand in operands:
        other = operand.unsharded.narrow(0, 2 * (1 - rank.rank), 2)
        assert_equal(other, torch.zeros(2), "the other rank's part")
    dist.barrier()
    dist.destroy_process_group(group)


# In flight


@on_ranks(2, 4)
@TRANSPORTS
def test_several_calls_may_be_in_flight(rank: Rank, kind: type[Transport]) -> None:
    """A gather and reductions that overlap do not mix up their messages, nor those of the user."""
    transport = kind(rank.group)
    world, n = rank.world_size, 2000
    gathers = [Operand(values(rank.rank + i, n, torch.float32), torch.zeros(n * world)) for i in range(2)]
    reduction = Operand(torch.empty(n), torch.full((n * world,), float(rank.rank)))
    own, theirs = torch.full((3,), float(rank.rank)), torch.empty(3)
    works = [
        *transport.all_gather([CommRequest("a", gathers[:1])]),
        *transport.reduce_scatter([CommRequest("b", [reduction], GradScaling(after=world))]),
    ]
    to, source = (rank.rank + 1) % world, (rank.rank - 1) % world
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, theirs, source)])
    works += transport.all_gather([CommRequest("c", gathers[1:])])
    wait(requests)
    wait(works)
    assert_equal(theirs, torch.full((3,), float((rank.rank - 1) % world)), "message of the user")
    for i, operand in enumerate(gathers):
        expected = torch.cat([values(r + i, n, torch.float32) for r in range(world)])
        assert_equal(operand.unsharded, expected, f"gather {i}")
    assert_equal(reduction.shard, torch.full((n,), (world - 1) / 2), "reduction")


# Records


@on_ranks(2, 4)
@TRANSPORTS
def test_every_move_is_recorded(rank: Rank, kind: type[Transport]) -> None:
    """Recording gives kind, unit, dtype, elements, received bytes and launch of each move, inside the block only."""
    transport = kind(rank.group)
    world = rank.world_size
    operands = [Operand(torch.ones(n), torch.ones(n * world)) for n in (4, 10)]
    integers = [Operand(torch.ones(3, dtype=torch.int32), torch.ones(3 * world, dtype=torch.int32))]
    with record() as collectives:
        wait(transport.all_gather([CommRequest("a", operands), CommRequest("c", integers)]))
        with record() as inner:
            wait(transport.reduce_scatter([CommRequest("b", operands)]))
        wait(transport.all_reduce([CommRequest("d", in_place([torch.ones(7)]))]))
    wait(transport.all_gather([CommRequest("e", operands)]))
    first = collectives[0].launch
    reductions = [
        Collective("reduce_scatter", "b", torch.float32, n * world, 4 * n * (world - 1), first + 1) for n in (4, 10)
    ]
    assert inner == reductions
    assert collectives == [
        *(Collective("all_gather", "a", torch.float32, n * world, 4 * n * (world - 1), first) for n in (4, 10)),
        Collective("all_gather", "c", torch.int32, 3 * world, 4 * 3 * (world - 1), first),
        *reductions,
        Collective("all_reduce", "d", torch.float32, 7, 2 * 28 * (world - 1) // world, first + 2),
    ]


@GLOO
@on_ranks(2)
def test_launches_are_numbered_over_all_transports(rank: Rank) -> None:
    """Launches count up over transports, and also while nobody records."""
    one, two = GlooTransport(rank.group), CollectiveTransport(rank.group)
    requests = [
        CommRequest("a", [Operand(torch.ones(2), torch.ones(4))]),
        CommRequest("b", [Operand(torch.ones(2), torch.ones(4))]),
    ]
    with record() as before:
        wait(one.all_gather(requests))
    wait(two.all_gather(requests))
    with record() as after:
        wait(two.reduce_scatter(requests))
        wait(one.all_gather(requests))
    first = before[0].launch
    assert [c.launch - first for c in (*before, *after)] == [0, 0, 2, 2, 3, 3]


@GLOO
@on_ranks(2)
def test_failure_inside_a_recording_ends_it(rank: Rank) -> None:
    """A recording ends with its block also when that raises."""
    transport = GlooTransport(rank.group)
    operands = [Operand(torch.ones(2), torch.ones(4))]
    with pytest.raises(ZeroDivisionError), record() as collectives:
        raise ZeroDivisionError
    wait(transport.all_gather([CommRequest("a", operands)]))
    assert collectives == []


# Custom collectives


class CountingGather(AllGather):
    """An all-gather of the user's; ``done`` at once or later."""

    def __init__(self, done: bool) -> None:
        self.done, self.calls, self.allocated = done, [], []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(tuple(size))
        return torch.full(tuple(size), -1, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append((output_tensor.numel(), async_op))
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=not self.done)
        assert (work is None) == self.done
        return work


class CountingScatter(ReduceScatter):
    """A reduce-scatter of the user's; ``done`` at once or later."""

    def __init__(self, done: bool) -> None:
        self.done, self.calls = done, []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append((output_tensor.numel(), op, async_op))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=not self.done)


CPU = torch.device("cpu")


@GLOO
@on_ranks(2, 4)
@pytest.mark.parametrize("done", [False, True], ids=["later", "at once"])
def test_custom_collectives_are_called_once_per_move(rank: Rank, done: bool) -> None:
    """The user's objects do gathers and reductions, in their memory; the group's transport does the rest."""
    world = rank.world_size
    gather, scatter = CountingGather(done), CountingScatter(done)
    transport = CustomTransport(GlooTransport(rank.group), gather, scatter)
    assert transport.direct_bytes > 10**15
    regions = [transport.allocate("all_gather", n * world, torch.float32, CPU) for n in (3, 7)]
    assert gather.allocated == [(3 * world,), (7 * world,)]
    operands = [Operand(values(rank.rank, n, torch.float32), r) for n, r in zip((3, 7), regions, strict=True)]
    with record() as collectives:
        wait(transport.all_gather([CommRequest("a", operands[:1]), CommRequest("b", operands[1:])]))
    assert [(c.kind, c.unit) for c in collectives] == [("all_gather", "a"), ("all_gather", "b")]
    assert len({c.launch for c in collectives}) == 1
    for operand in operands:
        numel = operand.shard.numel()
        assert_equal(operand.unsharded, torch.cat([values(r, numel, torch.float32) for r in range(world)]), f"{numel}")
    assert gather.calls == [(3 * world, True), (7 * world, True)]

    for scaling in (
        GradScaling(after=world),
        GradScaling(),
        GradScaling(before=2, after=2),
        GradScaling(1, world, native=False),
    ):
        operand = reduction_of(rank, (5,), torch.float32)[0]
        wait(transport.reduce_scatter([CommRequest("a", [operand], scaling)]))
        total = sum(values(r + 3 * rank.rank, 5, torch.float32) for r in range(world))
        assert_equal(operand.shard, total / (scaling.before * scaling.after), str(scaling))
    assert scatter.calls == [(5, ReduceOp.SUM, True)] * 4, "gloo cannot average"

    tensor = values(rank.rank, 5, torch.float32)
    wait(transport.all_reduce([CommRequest("a", in_place([tensor]))]))
    assert_equal(tensor, sum(values(r, 5, torch.float32) for r in range(world)), "all-reduce")


@GLOO
@on_ranks(2)
def test_what_is_not_custom_goes_to_the_base(rank: Rank) -> None:
    """With one of the two replaced, the other is the group's own, recorded once; memory is the engine's."""
    gather, scatter = CountingGather(False), CountingScatter(False)
    base = GlooTransport(rank.group)
    with record() as collectives:
        custom = CustomTransport(base, reduce_scatter=scatter)
        wait(custom.all_gather([CommRequest("a", [Operand(torch.ones(2), torch.zeros(4))])]))
        assert custom.allocate("all_gather", 4, torch.float32, CPU) is None
        custom = CustomTransport(base, all_gather=gather)
        wait(custom.reduce_scatter([CommRequest("b", [Operand(torch.ones(2), torch.zeros(4))])]))
        assert custom.allocate("reduce_scatter", 4, torch.float32, CPU) is None
    assert [(c.kind, c.unit) for c in collectives] == [("all_gather", "a"), ("reduce_scatter", "b")]
    assert gather.calls == scatter.calls == []
    assert base.allocate("all_gather", 4, torch.float32, CPU) is None


@GLOO
@on_ranks(2)
def test_collectives_written_for_pytorch_are_taken(rank: Rank) -> None:
    """Objects of torch's own classes are called as they would be there."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    transport = CustomTransport(GlooTransport(rank.group), DefaultAllGather(), DefaultReduceScatter())
    region = transport.allocate("all_gather", 8, torch.float32, CPU)
    assert region.shape == (8,)
    wait(transport.all_gather([CommRequest("a", [Operand(values(rank.rank, 4, torch.float32), region)])]))
    assert_equal(region, torch.cat([values(r, 4, torch.float32) for r in range(2)]), "all_gather")
    operand = reduction_of(rank, (4,), torch.float32)[0]
    wait(transport.reduce_scatter([CommRequest("a", [operand], GradScaling(after=2))]))
    total = sum(values(r + 3 * rank.rank, 4, torch.float32) for r in range(2))
    assert_equal(operand.shard, total / 2, "reduction")


@GLOO
@on_ranks(2)
def test_custom_collectives_are_checked(rank: Rank) -> None:
    """What cannot be called or cannot allocate is refused, and so is memory of the wrong size or dtype."""
    base = GlooTransport(rank.group)
    with pytest.raises(TypeError, match=r"custom all-gather .* allocate.* got function"):
        CustomTransport(base, all_gather=lambda **_: None)
    with pytest.raises(TypeError, match=r"custom reduce-scatter .* got object"):
        CustomTransport(base, reduce_scatter=object())

    class Short(CountingGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(size[0] - 1, dtype=dtype)

    with pytest.raises(ValueError, match=r"Short.allocate: expected 4 elements of torch.float32 on cpu, got 3"):
        CustomTransport(base, Short(False)).allocate("all_gather", 4, torch.float32, CPU)


@GLOO
@on_ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_process_group_memory_falls_back_to_ordinary_memory(rank: Rank, asynchronous: bool) -> None:
    """Gloo has no memory pool: the collectives work in ordinary memory."""
    gather, scatter = ProcessGroupMemoryAllGather(rank.group), ProcessGroupMemoryReduceScatter(rank.group)
    region = gather.allocate((2, 3), dtype=torch.float64, device=CPU)
    assert (region.shape, region.dtype) == ((2, 3), torch.float64)
    work = gather(region.view(-1), torch.full((3,), rank.rank, dtype=torch.float64), rank.group, asynchronous)
    assert (work is not None) == asynchronous
    wait([work] if asynchronous else [])
    assert_equal(region, torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64), "all_gather")
    piece = torch.empty(3, dtype=torch.float64)
    work = scatter(piece, region.view(-1), rank.group, ReduceOp.SUM, asynchronous)
    wait([work] if asynchronous else [])
    assert_equal(piece, torch.full((3,), 2.0 * rank.rank, dtype=torch.float64), "reduction")
    transport = CustomTransport(GlooTransport(rank.group), gather, scatter)
    assert transport.allocate("reduce_scatter", 6, torch.float32, CPU).shape == (6,)


@pytest.mark.cpu_only("what is refused without NCCL")
@on_ranks(2)
@pytest.mark.parametrize("kind", [SymmetricMemoryAllGather, SymmetricMemoryReduceScatter])
def test_symmetric_memory_says_what_it_needs(rank: Rank, kind: type) -> None:
    """Without CUDA and NCCL, and with another back end than NCCL's, it is refused before anything is set up."""
    with pytest.raises(ValueError, match="needs a CUDA device and a process group whose back end there is NCCL"):
        kind(rank.group)
    with pytest.raises(ValueError, match="must be \"NCCL\", got 'NVSHMEM'"):
        kind(rank.group, "NVSHMEM")


def test_symmetric_memory_is_used_again_once_it_was_released() -> None:
    """Who still refers to a tensor does not count: that may differ between ranks, and making memory is a collective."""
    made: list[torch.Tensor] = []

    class OnOneProcess(SymmetricMemory):
        def __init__(self) -> None:
            self._free = {}

        def _make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            made.append(torch.empty(numel, dtype=dtype, device=device))
            return made[-1]

    memory, cpu = OnOneProcess(), torch.device("cpu")
    first = memory.allocate((2, 5), dtype=torch.float32, device=cpu)
    assert first.shape == (2, 5)
    second = memory.allocate((10,), dtype=torch.float32, device=cpu)
    assert len(made) == 2 and second.data_ptr() != first.data_ptr()
    memory.release(first)
    assert memory.allocate((10,), dtype=torch.float32, device=cpu).data_ptr() == first.data_ptr()
    memory.release(second)
    memory.allocate((10,), dtype=torch.bfloat16, device=cpu)
    memory.allocate((5,), dtype=torch.float32, device=cpu)
    assert len(made) == 4
    assert memory.allocate((10,), dtype=torch.float32, device=cpu).data_ptr() == second.data_ptr()


# Which transport, and what it tells the back end


@GLOO
@on_ranks(2)
def test_gloo_group_gets_the_gloo_transport(rank: Rank) -> None:
    """The transport is chosen by the back end of the group on the device; gloo has one communicator only."""
    transport = make_transport(rank.group, torch.device("cpu"))
    assert type(transport) is GlooTransport
    assert (transport.rank, transport.world_size) == (rank.rank, rank.world_size)
    for enable in (True, False):
        transport.separate_reduce_group(enable)
        assert transport.reduce_group is transport.group
    assert issubclass(NcclTransport, CollectiveTransport)


@on_ranks(2)
def test_part_of_a_group_has_its_timeout(rank: Rank) -> None:
    """A group that is made from the user's gives up on silent ranks when the user's does.

    All ranks make it, also if one has made a group that is only its own.
    """
    timeout = timedelta(seconds=77)
    if rank.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    part = part_of(dist.new_group(timeout=timeout), list(range(rank.world_size)), "test")
    assert part._get_backend(torch.device("cpu")).options._timeout == timeout


@on_ranks(4)
def test_parts_of_ranks_in_different_numbers_of_groups(rank: Rank) -> None:
    """Ranks of a part find each other, also if one is in a group more, which c10d has in the names that it makes."""
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    if rank.rank in (0, 3):
        dist.new_group([rank.rank], use_local_synchronization=True)
    first = rank.rank // 2 * 2
    part = part_of(pairs[rank.rank // 2], [first, first + 1], "test")
    assert part is part_of(pairs[rank.rank // 2], [first, first + 1], "test")
    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total, group=part)
    assert total == 2 * first + 1


@pytest.mark.parametrize(
    ("dtype", "scaling", "op", "before", "after"),
    [
        (torch.float32, GradScaling(after=8), ReduceOp.AVG, 1, 1),
        (torch.float16, GradScaling(after=8), ReduceOp.AVG, 1, 1),
        (torch.float32, GradScaling(), ReduceOp.SUM, 1, 1),
        (torch.bfloat16, GradScaling(after=3), ReduceOp.PREMUL_SUM, 1, 1),
        (torch.float32, GradScaling(after=16), ReduceOp.PREMUL_SUM, 1, 1),
        (torch.float64, GradScaling(after=16), ReduceOp.SUM, 1, 1 / 16),
        (torch.float16, GradScaling(after=16), ReduceOp.SUM, 1, 1 / 16),
        (torch.float32, GradScaling(after=8, native=False), ReduceOp.SUM, 1, 1 / 8),
        (torch.float16, GradScaling(before=4, after=2), ReduceOp.SUM, 1 / 4, 1 / 2),
        (torch.float32, GradScaling(before=8), ReduceOp.SUM, 1 / 8, 1),
    ],
)
def test_nccl_divides_by_itself_where_it_may(
    dtype: torch.dtype, scaling: GradScaling, op: object, before: float, after: float
) -> None:
    """NCCL averages or premultiplies when that is the whole division; else there are explicit factors."""
    reduction = nccl_reduction(dtype, scaling, 8)
    assert reduction.op == op
    assert (reduction.before, reduction.after) == (before, after)


def test_nccl_does_not_average_over_one_rank() -> None:
    """NCCL's average over a single rank is not to be relied on; a sum is the same there."""
    assert nccl_reduction(torch.float32, GradScaling(after=1), 1).op == ReduceOp.SUM


class GroupCalls:
    """Stands for a process group of 4 ranks: writes down what it is asked for."""

    def __init__(self) -> None:
        self.log = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4

    def wait(self) -> None:
        self.log.append("wait")

    def _note(self, *what: object) -> GroupCalls:
        self.log.append(what if len(what) > 1 else what[0])
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self._note("start")

    def _end_coalescing(self, device: torch.device) -> GroupCalls:
        return self._note("end")

    def _allgather_base(self, region, piece, options) -> GroupCalls:
        return self._note("all_gather", piece.numel(), piece.dtype)

    def _reduce_scatter_base(self, piece, region, options) -> GroupCalls:
        return self._note("reduce_scatter", piece.numel(), options.reduceOp.op, float(region[0]))

    def allreduce(self, tensors, options) -> GroupCalls:
        return self._note("all_reduce", tensors[0].numel(), options.reduceOp.op)


def test_nccl_launch_is_one_group_call() -> None:
    """All moves of all parcels, with whatever operations, are between one start and one end; one work for all."""
    group, reductions = GroupCalls(), GroupCalls()
    transport = NcclTransport(group, reductions)
    assert transport.reduce_group is reductions

    def operand(numel: int, dtype: torch.dtype = torch.float32) -> Operand:
        return Operand(torch.full((numel,), 6.0).to(dtype), torch.full((4 * numel,), 8.0).to(dtype))

    wait(transport.all_gather([CommRequest("a", [operand(2)]), CommRequest("b", [operand(3, torch.int16)])]))
    assert group.log == ["start", ("all_gather", 2, torch.float32), ("all_gather", 6, torch.uint8), "end", "wait"]
    assert reductions.log == []

    averaged, halved, split = operand(2), operand(3), operand(4, torch.float16)
    divisions = [GradScaling(after=4), GradScaling(after=2), GradScaling(before=8, after=3)]
    group.log.clear()
    wait(
        transport.reduce_scatter(
            [
                CommRequest(str(i), [m], d)
                for i, (m, d) in enumerate(zip((averaged, halved, split), divisions, strict=True))
            ]
        )
    )
    assert group.log == []
    assert reductions.log == [
        "start",
        ("reduce_scatter", 2, ReduceOp.AVG, 8.0),
        ("reduce_scatter", 3, ReduceOp.PREMUL_SUM, 8.0),
        ("reduce_scatter", 4, ReduceOp.SUM, 1.0),  # divided beforehand
        "end",
        "wait",
    ]
    assert [float(m.shard[0]) for m in (averaged, halved, split)] == [6, 6, 2], "divided afterwards, where needed"

    reductions.log.clear()
    transport.separate_reduce_group(False)
    wait(transport.reduce_scatter([CommRequest("a", [operand(5)])]))
    wait(transport.all_reduce([CommRequest("a", in_place([torch.ones(7)]), GradScaling(after=4))]))
    assert reductions.log == []
    assert group.log == [("reduce_scatter", 5, ReduceOp.SUM, 8.0), "wait", ("all_reduce", 7, ReduceOp.AVG), "wait"]
    transport.separate_reduce_group(True)
    assert transport.reduce_group is reductions


def test_custom_reduce_scatter_may_average_on_nccl() -> None:
    """A user's reduce-scatter gets AVG from NCCL when that is the whole division, on the group for reductions."""
    group, reductions = GroupCalls(), GroupCalls()
    seen = []

    class Scatter(CountingScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            seen.append((group, op))

    transport = CustomTransport(NcclTransport(group, reductions), reduce_scatter=Scatter(True))
    for scaling in (
        GradScaling(after=4),
        GradScaling(after=3),
        GradScaling(2, 2),
        GradScaling(1, 4, False),
        GradScaling(),
    ):
        wait(transport.reduce_scatter([CommRequest("a", [Operand(torch.ones(2), torch.ones(8))], scaling)]))
    transport.separate_reduce_group(False)
    wait(transport.reduce_scatter([CommRequest("a", [Operand(torch.ones(2), torch.ones(8))])]))
    ops = [ReduceOp.AVG, ReduceOp.SUM, ReduceOp.SUM, ReduceOp.SUM, ReduceOp.SUM]
    assert seen == [*((reductions, op) for op in ops), (group, ReduceOp.SUM)]


def on_fake_group(script: str) -> None:
    """Run ``script`` in a process of its own, as rank 3 of c10d's fake group of 8."""
    preamble = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from fullshard.comm import *
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
"""
    code = preamble + textwrap.dedent(script) + 'print("done")\n'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]


def test_other_back_ends_get_the_collective_transport() -> None:
    """On c10d's fake group every operation returns works that end; results are what the fake makes of them, divided."""
    on_fake_group("""
        transport = make_transport(dist.group.WORLD, torch.device("cpu"))
        assert type(transport) is CollectiveTransport
        for dtype in (torch.float32, torch.float16, torch.int16):
            operands = [Operand(torch.ones(n, dtype=dtype), torch.ones(8 * n, dtype=dtype)) for n in (0, 4, 5)]
            for work in transport.all_gather([CommRequest("a", operands), CommRequest("b", operands)]):
                work.wait()
        with record() as collectives:
            tensor, operand = torch.ones(5), Operand(torch.ones(2), torch.ones(16))
            for work in transport.all_reduce([CommRequest("a", [Operand(tensor, tensor)], GradScaling(2, 4))]):
                work.wait()
            for work in transport.reduce_scatter(
                [CommRequest("a", [operand], GradScaling(2, 4)), CommRequest("b", [operand], GradScaling())]
            ):
                work.wait()
        assert tensor.tolist() == [0.125] * 5, tensor
        assert operand.unsharded.unique().tolist() == [0.5]
        assert len(collectives) == 3 and len({c.launch for c in collectives}) == 2
        assert transport.allocate("all_gather", 4, torch.float32, torch.device("cpu")) is None
    """)


def test_models_train_on_other_back_ends() -> None:
    """On c10d's fake group of 8 ranks a model trains with one gather and one reduction per unit as planned."""
    on_fake_group("""
        from fullshard import fully_shard
        blocks = [fully_shard(torch.nn.Linear(16, 16)) for _ in range(3)]
        model = fully_shard(torch.nn.Sequential(*blocks))
        assert model[0].weight.to_local().shape == (2, 16)
        with record() as collectives:
            model(torch.ones(2, 16)).sum().backward()
        assert all(p.grad.to_local().shape == p.to_local().shape for p in model.parameters())
        kinds = [(c.kind, c.unit) for c in collectives]
        forward = [("all_gather", "0"), ("all_gather", "1"), ("all_gather", "2")]
        assert [k for k in kinds if k[0] == "all_gather"][:3] == forward, kinds
        assert [name for kind, name in kinds if kind == "reduce_scatter"] == ["2", "1", "0"], kinds
    """)
