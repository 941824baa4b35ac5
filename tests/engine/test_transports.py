"""Transports: what arrives in all-gathers and reductions, and what is recorded of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore
from user_collectives import Scatter

from compare import assert_close, assert_equal
from fullshard import fully_shard
from fullshard.comm import (
    Collective,
    CollectiveTransport,
    CommRequest,
    CustomTransport,
    GlooTransport,
    GradScaling,
    NcclTransport,
    Operand,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
    Transport,
    collective,
    make_transport,
    part_of,
    record,
)
from fullshard.comm.base import issue_all
from fullshard.comm.collective import nccl_reduction
from fullshard.comm.group_costs import smallest_direct
from fullshard.comm.groups import record_of
from fullshard.comm.hosts import Routes
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
SIZES = [(1,), (5, 16), (3, 70_000, 1, 0, 1024)]  # elements of the shards that one request moves
ODD_SIZES = (1, 2, 3, 5, 1000, 99_999, 131_073)
CPU = torch.device("cpu")


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What this rank contributes; whole numbers of at most three digits, different on every rank."""
    return ((torch.arange(numel) + 37 * rank) % 113).to(dtype)


def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def wait(works: object) -> None:
    for work in works:
        work.wait()


def in_place(tensors: Sequence[torch.Tensor]) -> list[Operand]:
    return [Operand(tensor, tensor) for tensor in tensors]


def to_gather(rank: Rank, numel: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Operand:
    """``values`` of this rank (and of the ``offset``), to be all-gathered."""
    shard = values(rank.rank + offset, numel, dtype)
    return Operand(shard, torch.zeros(numel * rank.world_size).to(dtype))


def assert_gathered(rank: Rank, operand: Operand, what: str, offset: int = 0) -> None:
    """Require the ``values`` of all ranks in rank order, and the rank's own as they were."""
    numel, dtype = operand.shard.numel(), operand.shard.dtype
    pieces = [values(r + offset, numel, dtype).view(torch.uint8) for r in range(rank.world_size)]
    assert_equal(operand.unsharded.view(torch.uint8), torch.cat(pieces), what)
    assert_equal(operand.shard.view(torch.uint8), pieces[rank.rank], f"shard: {what}")


def to_reduce(rank: Rank, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Operand]:
    """Operands to reduce: this rank contributes ``values(rank + 3 * part)`` to the shard of rank ``part``."""
    world = range(rank.world_size)
    return [
        Operand(torch.full((n,), -1.0).to(dtype), torch.cat([values(rank.rank + 3 * part, n, dtype) for part in world]))
        for n in sizes
    ]


def sum_for(rank: Rank, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a reduction of ``to_reduce`` leaves to this rank, not divided."""
    return sum(values(r + 3 * rank.rank, numel, dtype) for r in range(rank.world_size))


class FakeWork:
    """A work that notes that it was waited for, and may have failed."""

    def __init__(self, name: str, waited: list[str], error: str | None = None) -> None:
        self.name, self.waited, self.error = name, waited, error

    def wait(self) -> None:
        self.waited.append(self.name)
        if self.error is not None:
            raise RuntimeError(self.error)


class MessageLog:
    """A process group that notes what is sent: to whom, how many bytes, and from where."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.messages, self.places = group, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.messages.append((peer, tensors[0].nbytes))
        self.places.append(tensors[0].data_ptr())
        return self.group.send(tensors, peer, tag)


@on_ranks(2, 4)
@TRANSPORTS
def test_all_gather_fills_the_unsharded_buffer_in_rank_order(rank: Rank, kind: type[Transport]) -> None:
    """Requests of one launch may have many operands, empty ones too, of different dtypes, and shards in place."""
    transport = kind(rank.group)
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8]
    if kind is GlooTransport:
        dtypes += [torch.bool, torch.float8_e4m3fn]
    for sizes in SIZES:
        requests = [CommRequest(str(dtype), [to_gather(rank, n, dtype) for n in sizes]) for dtype in dtypes]
        wait(transport.all_gather(requests))
        for unit, operands, _ in requests:
            for operand in operands:
                assert_gathered(rank, operand, f"{unit} of {operand.shard.numel()}")
    buffer = torch.zeros(100 * rank.world_size)
    inside = Operand(buffer.narrow(0, 100 * rank.rank, 100).copy_(values(rank.rank, 100)), buffer)
    wait(transport.all_gather([CommRequest("unit", [inside])]))
    assert_gathered(rank, inside, "shard in its own unsharded buffer")


@on_ranks(2, 4)
@TRANSPORTS
def test_reduce_scatter_gives_each_rank_the_sum_of_its_part(rank: Rank, kind: type[Transport]) -> None:
    """Sums of one launch are divided before and after as each request says, so that fp16 does not overflow."""
    transport, world = kind(rank.group), rank.world_size
    scalings = [GradScaling(), GradScaling(after=world), GradScaling(2, world / 2), GradScaling(1, world, False)]
    for sizes, dtype in itertools.product(SIZES, (torch.float64, torch.bfloat16)):
        requests = [CommRequest(str(s), to_reduce(rank, *sizes, dtype=dtype), s) for s in scalings]
        wait(transport.reduce_scatter(requests))
        for unit, operands, scaling in requests:
            for operand in operands:
                total = sum_for(rank, operand.shard.numel(), torch.float64)
                expected = (total / (scaling.before * scaling.after)).to(dtype)
                if dtype is torch.bfloat16:  # the sums of two need 8 bits of precision, those of four 9
                    assert_close(operand.shard, expected, unit, rtol=2**-7)
                else:
                    assert_equal(operand.shard, expected, f"{unit} of {operand.shard.numel()}")


@GLOO
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gloo_sums_in_rank_order(rank: Rank, dtype: torch.dtype) -> None:
    """Sums are bitwise the left fold in rank order; those of half precision on more than two ranks in fp32."""
    transport, world = GlooTransport(rank.group), rank.world_size
    wide = world > 2 and dtype in (torch.bfloat16, torch.float16)

    def term(of: int, numel: int) -> torch.Tensor:
        return (100 * noise(of, numel)).to(dtype)

    def folded(numel: int) -> torch.Tensor:
        total = term(0, numel).float() if wide else term(0, numel)
        for other in range(1, world):
            total = total + term(other, numel)
        return total.to(dtype)

    halved = GradScaling(before=2, after=2)  # powers of two round nothing in fp32
    for scaling in (GradScaling(), halved) if dtype is torch.float32 else (GradScaling(),):
        tensors = [term(rank.rank, n) for n in ODD_SIZES]
        wait(transport.all_reduce([CommRequest("unit", in_place(tensors), scaling)]))
        for n, tensor in zip(ODD_SIZES, tensors, strict=True):
            assert_equal(tensor, folded(n) / (4 if scaling is halved else 1), f"all-reduce of {n} elements")
    shard = torch.empty(1000, dtype=dtype)
    wait(transport.reduce_scatter([CommRequest("unit", [Operand(shard, term(rank.rank, 1000 * world))])]))
    assert_equal(shard, folded(1000 * world).chunk(world)[rank.rank], "reduce-scatter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sum_of_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Small terms survive beside a large one, over several blocks; the sum may be written to one of its terms."""
    terms = [torch.full((300_000,), value).to(dtype) for value in (2048.0, *[0.75] * 30)]
    assert dtype is torch.float32 or (terms[0] + terms[1])[0] == terms[0][0]
    for target in (torch.empty(300_000, dtype=dtype), terms[0], terms[3]):
        expected = sum(term.double() for term in terms) * 0.5
        fold(terms, target, 0.5)
        assert_equal(target, expected.to(dtype), "sum")


@on_ranks(2, 4)
@TRANSPORTS
def test_launches_in_flight_together_do_not_mix(rank: Rank, kind: type[Transport]) -> None:
    """All-reduces, all-gathers, a reduction and messages of the user, all issued before the first wait."""
    transport, world = kind(rank.group), rank.world_size
    tensors = [[values(rank.rank + i, n) for n in (3, 40_001)] for i in range(4)]
    launches = [transport.all_reduce([CommRequest(f"all {i}", in_place(each))]) for i, each in enumerate(tensors)]
    gathers = [to_gather(rank, 2000, offset=i) for i in range(3)]
    (reduction,) = to_reduce(rank, 11)
    others = [
        *transport.all_gather([CommRequest("a", gathers[:1])]),
        *transport.reduce_scatter([CommRequest("b", [reduction], GradScaling(after=world))]),
    ]
    own, theirs = torch.full((3,), float(rank.rank)), torch.empty(3)
    to, source = (rank.rank + 1) % world, (rank.rank - 1) % world
    messages = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, theirs, source)])
    others += transport.all_gather([CommRequest("c", gathers[1:2])])
    wait(messages)
    wait(launches[0])
    wait(others)
    late = transport.all_gather([CommRequest("late", gathers[2:])])  # between two second halves of all-reduces
    for launch in launches[1:]:
        wait(launch)
    wait(late)
    assert_equal(theirs, torch.full((3,), float(source)), "message of the user")
    for i, each in enumerate(tensors):
        for tensor in each:
            assert_equal(tensor, sum(values(r + i, tensor.numel()) for r in range(world)), f"all-reduce {i}")
    for i, operand in enumerate(gathers):
        assert_gathered(rank, operand, f"all-gather {i}", offset=i)
    assert_equal(reduction.shard, sum_for(rank, 11) / world, "reduction")


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_issued_collectives_are_waited_for_before_an_error_is_raised(error: type[BaseException]) -> None:
    """All works are waited for, even if some failed, and no later call runs; without a failure none is waited for."""
    waited: list[str] = []

    def fails() -> list[FakeWork]:
        assert waited == []  # not before: they run side by side
        raise error("the cause")

    def never() -> list[FakeWork]:
        raise AssertionError("called after a failure")

    works = [FakeWork("a", waited), FakeWork("b", waited, "failed"), FakeWork("c", waited)]
    assert issue_all([lambda: works[:1], lambda: (), lambda: works[1:]]) == works and waited == []
    with pytest.raises(error, match="the cause"):
        issue_all([lambda: works[:2], lambda: works[2:], fails, never])
    assert waited == ["a", "b", "c"]


@GLOO
@on_ranks(2, 4)
def test_small_operands_of_a_launch_share_one_message_per_peer(rank: Rank) -> None:
    """Two or more small ones, whatever their units and dtypes, cost each peer one message; large ones one each."""
    log = MessageLog(rank.group)
    record_of(log).routes = Routes([range(rank.world_size)], rank.rank)
    transport = GlooTransport(log)

    def bytes_sent(operation: str, *units: list[tuple[int, torch.dtype]]) -> list[int]:
        log.messages.clear()
        requests = [CommRequest(str(i), [to_gather(rank, *each) for each in unit]) for i, unit in enumerate(units)]
        wait(getattr(transport, operation)(requests))
        sizes = {peer: sorted(n for to, n in log.messages if to == peer) for peer, _ in log.messages}
        assert len(sizes) == rank.world_size - 1
        assert len({tuple(each) for each in sizes.values()}) == 1, "the same to every peer"
        return next(iter(sizes.values()))

    fp32, fp64 = torch.float32, torch.float64
    small = 64 * 1024 // 4 - 1
    large = (small + 1, fp32)
    for operation in ("all_gather", "reduce_scatter"):
        assert bytes_sent(operation, [(small, fp32)]) == [4 * small]
        assert bytes_sent(operation, [(3, fp32)], [(5, fp32)]) == [32]
        assert bytes_sent(operation, [(3, fp32), (7, torch.uint8)], [(5, fp64)]) == [59]
        assert bytes_sent(operation, [large], [large]) == [4 * small + 4] * 2
        assert bytes_sent(operation, [large, (2, fp32)], [(1, fp32)]) == [12, 4 * small + 4]
        assert bytes_sent(operation, [(3, fp32), (0, fp32)], [(0, fp32)]) == [12]  # empty ones are not sent

    log.places.clear()
    alone, operands = to_gather(rank, 3), to_gather(rank, 20_000)
    wait(transport.all_gather([CommRequest("unit", [alone, operands])]))
    assert set(log.places) == {alone.shard.data_ptr(), operands.shard.data_ptr()}, "only what is joined is copied"


@GLOO
@on_ranks(2)
def test_ranks_with_different_launches_time_out(rank: Rank) -> None:
    """A launch of other units on another rank is not taken for this one, though the bytes would fit."""
    launched = []
    for units in (("a", "b"), ("a",)):
        group = dist.new_group(timeout=timedelta(seconds=1))
        mine = units if rank.rank == 0 else (*units[:-1], "x")
        operands = [Operand(torch.ones(2), torch.zeros(4)) for _ in units]
        requests = [CommRequest(unit, [operand]) for unit, operand in zip(mine, operands, strict=True)]
        launched.append((group, operands, GlooTransport(group).all_gather(requests)))
    for _, operands, works in launched:
        with pytest.raises(RuntimeError):
            works[0].wait()
        for operand in operands:
            assert_equal(operand.unsharded.narrow(0, 2 * (1 - rank.rank), 2), torch.zeros(2), "the other rank's part")
    dist.barrier()
    for group, _, _ in launched:
        dist.destroy_process_group(group)


@on_ranks(2, 4)
@TRANSPORTS
def test_every_operand_is_recorded(rank: Rank, kind: type[Transport]) -> None:
    """Recording gives kind, unit, dtype, elements, received bytes and launch, inside its block only, also if it raises.

    Launches count up over all transports, also while nobody records.
    """
    transport, others = kind(rank.group), rank.world_size - 1
    operands, integers = [to_gather(rank, n) for n in (4, 10)], [to_gather(rank, 3, torch.int32)]
    with record() as collectives:
        wait(transport.all_gather([CommRequest("a", operands), CommRequest("c", integers)]))
        with record() as inner:
            wait(transport.reduce_scatter([CommRequest("b", operands)]))
        wait(transport.all_reduce([CommRequest("d", in_place([torch.ones(7)]))]))
    wait(CollectiveTransport(rank.group).all_gather([CommRequest("e", operands)]))
    with contextlib.suppress(ZeroDivisionError), record() as failed:
        wait(transport.all_gather([CommRequest("f", operands[:1])]))
        raise ZeroDivisionError
    wait(transport.all_gather([CommRequest("g", operands)]))
    first = collectives[0].launch

    def expected(operation: str, unit: str, dtype: torch.dtype, numel: int, launch: int) -> Collective:
        return Collective(operation, unit, dtype, numel * (others + 1), 4 * numel * others, first + launch)

    assert inner == [expected("reduce_scatter", "b", torch.float32, n, 1) for n in (4, 10)]
    assert collectives == [
        *(expected("all_gather", "a", torch.float32, n, 0) for n in (4, 10)),
        expected("all_gather", "c", torch.int32, 3, 0),
        *inner,
        Collective("all_reduce", "d", torch.float32, 7, 2 * 28 * others // (others + 1), first + 2),
    ]
    assert failed == [expected("all_gather", "f", torch.float32, 4, 4)]


@GLOO
@on_ranks(2)
@pytest.mark.parametrize("kind", [SymmetricMemoryAllGather, SymmetricMemoryReduceScatter])
def test_symmetric_memory_needs_nccl(rank: Rank, kind: Any) -> None:
    """Without it, and with another back end of symmetric memory, making the object raises."""
    for back_end, words in (
        ("NCCL", "expected a CUDA device and a process group with the NCCL backend"),
        ("NVSHMEM", "expected backend=\"NCCL\", found 'NVSHMEM'"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(rank.group, back_end)


def test_symmetric_memory_is_used_again_once_it_was_released() -> None:
    """Who still refers to a tensor does not count: that may differ between ranks, and making memory is a collective."""
    made: list[torch.Tensor] = []

    class OnOneProcess(SymmetricMemory):
        def __init__(self) -> None:
            self._free = {}

        def _make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            made.append(torch.empty(numel, dtype=dtype, device=device))
            return made[-1]

    memory = OnOneProcess()
    first, second = (memory.allocate(shape, dtype=torch.float32, device=CPU) for shape in ((2, 5), (10,)))
    assert first.shape == (2, 5) and len(made) == 2 and second.data_ptr() != first.data_ptr()
    for released in (first, second):
        memory.release(released)
        assert memory.allocate((10,), dtype=torch.float32, device=CPU).data_ptr() == released.data_ptr()
    memory.release(second)
    memory.allocate((10,), dtype=torch.bfloat16, device=CPU)
    memory.allocate((5,), dtype=torch.float32, device=CPU)
    assert len(made) == 4


@on_ranks(4)
def test_part_of_a_group(rank: Rank) -> None:
    """A group made from the user's has its time-out; its ranks find each other, also if one is in more groups."""
    timeout = timedelta(seconds=77)
    pairs = [dist.new_group([first, first + 1], timeout=timeout) for first in (0, 2)]
    if rank.rank in (0, 3):
        dist.new_group([rank.rank], use_local_synchronization=True)
    first = rank.rank // 2 * 2
    part = part_of(pairs[rank.rank // 2], [first, first + 1], "test")
    assert part is part_of(pairs[rank.rank // 2], [first, first + 1], "test")
    assert part._get_backend(CPU).options._timeout == timeout
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
    halves, thirds = (nccl_reduction(torch.float32, GradScaling(after=n), 8) for n in (2, 3))  # equal for torch
    options = collective._reduce_scatter_options
    assert halves.op == thirds.op and options(halves, False) is not options(thirds, False)
    # Its average over a single rank is not to be relied on; a sum is the same there.
    assert nccl_reduction(torch.float32, GradScaling(after=1), 1).op == ReduceOp.SUM


class GroupCalls:
    """A process group that logs what is called, and whether it would run on the current stream, as NCCL's does then."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4

    def _note(self, options: object, *what: object) -> None:
        assert not options.asyncOp, "it would run on NCCL's own stream, which has no priority"
        self.log.append(what)

    def _start_coalescing(self, device: torch.device) -> None:
        self.log.append("start")

    def _end_coalescing(self, device: torch.device) -> None:
        self.log.append("end")

    def _allgather_base(self, unsharded, shard, options) -> None:
        self._note(options, "all_gather", shard.numel(), shard.dtype)

    def _reduce_scatter_base(self, shard, unsharded, options) -> None:
        self._note(options, "reduce_scatter", shard.numel(), options.reduceOp.op, float(unsharded[0]))

    def allreduce(self, tensors, options) -> None:
        self._note(options, "all_reduce", tensors[0].numel(), options.reduceOp.op)


def test_nccl_launch_is_one_group_call_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """All operands of all requests, with whatever operations, are between one start and one end, without a work."""
    group, reductions = GroupCalls(), GroupCalls()
    transport = NcclTransport(group)

    def operand(numel: int, dtype: torch.dtype = torch.float32) -> Operand:
        return Operand(torch.full((numel,), 6.0).to(dtype), torch.full((4 * numel,), 8.0).to(dtype))

    assert transport.all_gather([CommRequest("a", [operand(2)]), CommRequest("b", [operand(3, torch.int16)])]) == []
    assert group.log == ["start", ("all_gather", 2, torch.float32), ("all_gather", 6, torch.uint8), "end"]

    group.log.clear()
    operands = [operand(2), operand(3), operand(4, torch.float16)]
    scalings = [GradScaling(after=4), GradScaling(after=2), GradScaling(before=8, after=3)]
    requests = [CommRequest(str(s), [o], s) for o, s in zip(operands, scalings, strict=True)]
    assert transport.reduce_scatter(requests) == []
    assert group.log == [
        "start",
        ("reduce_scatter", 2, ReduceOp.AVG, 8.0),
        ("reduce_scatter", 3, ReduceOp.PREMUL_SUM, 8.0),
        ("reduce_scatter", 4, ReduceOp.SUM, 1.0),  # divided beforehand
        "end",
    ]
    assert [float(o.shard[0]) for o in operands] == [6, 6, 2], "divided afterwards, where needed"

    made: list[tuple[list[int], str]] = []
    ranks = [0, 1, 2, 3]
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(ranks))
    monkeypatch.setattr(collective, "part_of", lambda _, of, purpose: made.append((of, purpose)) or reductions)
    assert transport.reduce_group is group and not made, "a second communicator is made when it is asked for"
    transport.separate_reduce_group(True)
    assert transport.reduce_group is reductions and made == [(ranks, "reduce_scatter")]
    group.log.clear()
    transport.reduce_scatter([CommRequest("a", [operand(5)])])
    transport.all_reduce([CommRequest("a", in_place([torch.ones(7)]), GradScaling(after=4))])
    assert reductions.log == [("reduce_scatter", 5, ReduceOp.SUM, 8.0)] and group.log == [
        ("all_reduce", 7, ReduceOp.AVG)
    ]

    asked: list[tuple[object, object]] = []  # a user's reduce-scatter gets AVG when that is the whole division

    class Noting(Scatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            asked.append((group, op))

    custom = CustomTransport(transport, reduce_scatter=Noting())
    for scaling in (GradScaling(after=4), GradScaling(after=3), GradScaling(2, 2), GradScaling(1, 4, False)):
        wait(custom.reduce_scatter([CommRequest("a", [operand(2)], scaling)]))
    custom.separate_reduce_group(False)
    wait(custom.reduce_scatter([CommRequest("a", [operand(2)])]))
    sums = [(reductions, ReduceOp.SUM)] * 3
    assert asked == [(reductions, ReduceOp.AVG), *sums, (group, ReduceOp.SUM)]

    ranks.reverse()
    with pytest.raises(ValueError, match=r"ascending order, found \[3, 2, 1, 0\]"):
        transport.separate_reduce_group(True)


@pytest.mark.parametrize(("ranks", "alone"), [(2, 7), (8, 5), (128, 0), (1024, 0)])
def test_nccl_packs_what_is_cheaper_to_copy_than_to_send_alone(ranks: int, alone: int) -> None:
    """Of a block of Llama 8B in bf16 few ranks send large shards alone, many none; what is copied anyway is packed."""
    mib = 2**20
    sizes = [32 * mib, 8 * mib, 8 * mib, 32 * mib, 112 * mib, 112 * mib, 112 * mib]
    shards = [size // ranks for size in sizes]
    smallest = smallest_direct(shards, ranks, copied=False)
    assert sum(shard >= smallest for shard in shards) == alone
    assert smallest_direct(shards, ranks, copied=True) > max(shards)
    assert smallest_direct([], ranks, copied=False) > 0
    huge = smallest_direct([2**36 // ranks] * 3 + [4096], ranks, copied=False)
    assert 4096 < huge <= 2**36 // ranks  # one that is far smaller goes packed


@GLOO
@on_ranks(1, fresh=True)
def test_other_back_ends_get_the_collective_transport(rank: Rank) -> None:
    """On c10d's fake group of 8 every operation ends and is divided, and a model trains as planned."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    transport = make_transport(dist.group.WORLD, CPU)
    assert type(transport) is CollectiveTransport and transport.allocate("all_gather", 4, torch.float32, CPU) is None
    operands = [Operand(torch.ones(n).half(), torch.ones(8 * n).half()) for n in (0, 4, 5)]
    wait(transport.all_gather([CommRequest("a", operands), CommRequest("b", operands)]))
    with record() as collectives:
        tensor, operand = torch.ones(5), Operand(torch.ones(2), torch.ones(16))
        wait(transport.all_reduce([CommRequest("a", in_place([tensor]), GradScaling(2, 4))]))
        scalings = {"a": GradScaling(2, 4), "b": GradScaling()}
        wait(transport.reduce_scatter([CommRequest(unit, [operand], each) for unit, each in scalings.items()]))
    assert tensor.tolist() == [0.125] * 5 and operand.unsharded.unique().tolist() == [0.5]
    assert len(collectives) == 3 and len({c.launch for c in collectives}) == 2

    model = fully_shard(nn.Sequential(*(fully_shard(nn.Linear(16, 16)) for _ in range(3))))
    with record() as collectives:
        model(torch.ones(2, 16)).sum().backward()
    assert all(p.grad.to_local().shape == p.to_local().shape for p in model.parameters())
    assert [c.unit for c in collectives if c.kind == "all_gather"][:3] == ["0", "1", "2"]
    assert [c.unit for c in collectives if c.kind == "reduce_scatter"] == ["2", "1", "0"]
