"""Collectives of the emulated accelerator: values as gloo's, and NCCL's rules of what is allowed and ordered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from accelerator_tools import expect_races, on_emulated, settled
from torch.distributed.distributed_c10d import _coalescing_manager

from patience import patient
from ranks import Rank, RankPool
from ranks.device import unavailable

Collective = Callable[[Rank, Callable[..., torch.Tensor]], list[torch.Tensor]]
ReduceOp = dist.ReduceOp


def values(rank: Rank, device: str, dtype: torch.dtype = torch.float32) -> Callable[..., torch.Tensor]:
    """Return a maker of tensors that differ by rank: small whole numbers, so that every order of summing agrees."""

    def make(*shape: int) -> torch.Tensor:
        whole = torch.arange(torch.Size(shape).numel(), device="cpu").reshape(shape) * (rank.rank + 1) % 5 + rank.rank
        return whole.to(dtype).to(device)

    return make


def in_place(operation: Callable[..., object], *shape: int, **options: object) -> Collective:
    """A collective that leaves its result in the tensor that it gets."""

    def run(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        value = make(*shape)
        operation(value, **options)
        return [value] if options.get("dst", rank.rank) == rank.rank else []

    return run


def all_gather(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    parts, whole = [make(2, 3) for _ in range(rank.world_size)], make(2 * rank.world_size, 3)
    dist.all_gather(parts, make(2, 3))
    dist.all_gather_into_tensor(whole, make(2, 3))
    return [*parts, whole]


def gather_and_scatter(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    parts = [make(4) + index for index in range(rank.world_size)] if rank.rank == 0 else []
    value = make(4)
    dist.scatter(value, parts or None, src=0)
    dist.gather(make(4), parts or None, dst=0)
    return [*parts, value]


def reduce_scatter(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    value, other = make(4), make(4)
    dist.reduce_scatter(value, [make(4) + index for index in range(rank.world_size)])
    dist.reduce_scatter_tensor(other, make(4 * rank.world_size))
    return [value, other]


def all_to_all(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    even = make(2 * rank.world_size)
    dist.all_to_all_single(even, make(2 * rank.world_size))
    sent = [1 + peer for peer in range(rank.world_size)]  # rows to each peer; hence as many of its own from everyone
    value = make((1 + rank.rank) * rank.world_size, 2)
    dist.all_to_all_single(value, make(sum(sent), 2), [1 + rank.rank] * rank.world_size, sent)
    return [even, value]


def point_to_point(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    value, batched = make(6), make(6)
    after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    calls = [lambda: dist.send(make(6), after), lambda: dist.recv(value, before)]
    for call in calls if rank.rank % 2 == 0 else reversed(calls):
        call()
    operations = [dist.P2POp(dist.isend, make(6), after), dist.P2POp(dist.irecv, batched, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [value, batched]


def functional_collectives(rank: Rank, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    made = [
        functional.all_reduce(make(4), "sum", rank.group),
        functional.all_gather_tensor(make(2, 3), 0, rank.group),
        functional.reduce_scatter_tensor(make(2 * rank.world_size, 3), "sum", 0, rank.group),
        functional.all_to_all_single(make(2 * rank.world_size), None, None, rank.group),
        functional.broadcast(make(4), 1, rank.group),
    ]
    return [value + 0 for value in made]


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": in_place(dist.all_reduce, 3, 4),
    "broadcast": in_place(dist.broadcast, 5, src=1),
    "reduce": in_place(dist.reduce, 5, dst=1),
    "all_gather": all_gather,
    "gather and scatter": gather_and_scatter,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "point to point": point_to_point,
    "functional": functional_collectives,
}


@on_emulated(3)
def test_values_are_gloos(rank: Rank) -> None:
    """Every collective leaves on the device what gloo leaves in host memory, of any dtype where NCCL knows it."""
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
    cases = [(name, torch.float32) for name in COLLECTIVES]
    cases += [(name, dtype) for name in ("all_reduce", "all_gather", "reduce_scatter") for dtype in dtypes]
    for name, dtype in cases:
        exact = torch.float32 if dtype is torch.float32 else torch.float64
        expected = COLLECTIVES[name](rank, values(rank, "cpu", exact))
        got = COLLECTIVES[name](rank, values(rank, "emulated", dtype))
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.device == rank.device and ours.dtype is dtype
            assert torch.equal(ours.cpu().to(exact), theirs), (name, dtype)


@on_emulated(2)
def test_complex_and_bool(rank: Rank) -> None:
    """Complex tensors are summed as pairs of numbers; a sum of truth values is their disjunction."""
    value = torch.full((3,), 1 + 2j * (rank.rank + 1))
    dist.all_reduce(value)
    assert value.tolist() == [2 + 6j] * 3
    truth = torch.tensor([rank.rank == 0, False])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, False]
    parts = [torch.empty(2, dtype=torch.cfloat) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), 1j * rank.rank))
    assert [part.tolist() for part in parts] == [[0, 0], [1j, 1j]]


REDUCTIONS: list[tuple[Any, torch.dtype, float]] = [  # of 1, 2, 3 and 4
    (ReduceOp.AVG, torch.float32, 2.5),
    (ReduceOp.AVG, torch.int32, 2),
    (ReduceOp.PRODUCT, torch.float32, 24),
    (ReduceOp.MIN, torch.float32, 1),
    (ReduceOp.MAX, torch.bfloat16, 4),
    (dist._make_nccl_premul_sum(0.5), torch.float32, 5),
]


@on_emulated(4)
def test_reductions(rank: Rank) -> None:
    """AVG, PREMUL_SUM, PRODUCT, MIN and MAX are NCCL's."""
    by_tensor = (dist._make_nccl_premul_sum(torch.tensor(0.25)), torch.float32, 2.5)
    for operation, dtype, expected in (*REDUCTIONS, by_tensor):
        value, scattered = torch.full((3,), rank.rank + 1, dtype=dtype), torch.empty(1, dtype=dtype)
        dist.all_reduce(value, operation)
        dist.reduce_scatter_tensor(scattered, torch.full((4,), rank.rank + 1, dtype=dtype), operation)
        assert scattered[0] == value[0] == expected, (operation, dtype)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: dist.all_reduce(torch.ones(4, 4).t()[:2]), "contiguous"),
    (lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16)), "NCCL type"),
    (lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)), "float8"),
    (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BXOR), "ReduceOp"),
    (lambda: dist.all_reduce(torch.ones(2, dtype=torch.cfloat), ReduceOp.MAX), "complex"),
    (lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(2)), "size"),
    (lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)), "size"),
    (lambda: dist.all_gather_into_tensor(torch.empty(4), torch.empty(2).half()), "type|dtype"),
    (lambda: dist.all_gather_into_tensor(torch.empty(4), torch.empty(2, device="cpu")), "emulated|device"),
]


@on_emulated(2)
def test_refusals(rank: Rank) -> None:
    """What NCCL refuses is refused: gaps, dtypes that it lacks, sums of float8, sizes that do not fit."""
    for call, message in REFUSED:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            call()
    moved = torch.empty(8).to(torch.float8_e4m3fn)
    dist.all_gather_into_tensor(moved, torch.full((4,), 2.0).to(torch.float8_e4m3fn))
    assert moved.float().tolist() == [2.0] * 8


@on_emulated(2)
def test_late_delivery(rank: Rank) -> None:
    """The output reads as NaN, and as a race, on a stream that nothing orders after the collective.

    ``wait()`` orders the current stream only: another one is ordered when it waits for that one.
    """
    other, value = torch.Stream(rank.device), torch.ones(4)
    torch.accelerator.synchronize()
    work = dist.all_reduce(value, async_op=True)
    with other:
        early = value + 0
    with expect_races("read after write"):
        other.synchronize()
        assert early.isnan().all()
    work.wait()
    assert value.tolist() == [2.0] * 4
    dist.all_reduce(value, async_op=True).wait()
    with other:
        early = value + 0
    with expect_races("read after write"):
        pass
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        late = value + 0
    torch.accelerator.current_stream().wait_stream(other)
    assert late.tolist() == [4.0] * 4
    del early


@on_emulated(2)
def test_input_is_read_until_the_wait(rank: Rank) -> None:
    """Writing to an input before ``wait()`` is a race; after it, it is none."""
    value, whole = torch.ones(4), torch.empty(8)
    work = dist.all_gather_into_tensor(whole, value, async_op=True)
    value.zero_()
    with expect_races("write after read"):
        work.wait()
    dist.all_gather_into_tensor(whole, value, async_op=True).wait()
    value.fill_(3)
    assert whole.tolist() == [0.0] * 8


@on_emulated(2)
def test_coalescing(rank: Rank) -> None:
    """Collectives of a coalescing block are one work; waiting for it orders all of them."""
    values, whole = [torch.full((3,), float(rank.rank + 1)) for _ in range(3)], torch.empty(6)
    with _coalescing_manager(rank.group, rank.device, async_ops=True) as all_reduces:
        for value in values:
            dist.all_reduce(value)
    all_reduces.wait()
    assert [value.tolist() for value in values] == [[3.0] * 3] * 3
    rank.group._start_coalescing(rank.device)
    dist.all_reduce(values[0], async_op=True)
    dist.all_gather_into_tensor(whole, values[1], async_op=True)
    rank.group._end_coalescing(rank.device).wait()
    assert (values[0].tolist(), whole.tolist()) == ([6.0] * 3, [3.0] * 6)


@on_emulated(2)
def test_barrier_blocks_the_host(rank: Rank) -> None:
    """A barrier is a host synchronization; a synchronous all-reduce is none, and what follows it is ordered."""
    from accelerator.races import count

    own = dist.new_group(backend="emulated_nccl")  # the default group has gloo, too, which barriers prefer
    value = torch.ones(4)
    with count() as counts:
        dist.all_reduce(value)
        doubled = value * 2
        dist.barrier(own)
    assert [sync.what for sync in counts.host_syncs] == ["barrier"]
    assert doubled.tolist() == [4.0] * 4


@on_emulated(2)
def test_dropped_works(rank: Rank) -> None:
    """A work that nobody waits for, and whose output is dropped, still ends, and touches no memory that was reused."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1 << 12), async_op=True)
    settled()
    value = torch.ones(1 << 12)
    dist.all_reduce(value)
    assert value.sum().item() == 2 << 12


def only_some_ranks(rank: Rank) -> str:
    group = dist.new_group(list(range(4)), timeout=None)
    if rank.rank < 2:  # ranks 2 and 3 have nothing to send, and go on
        peer = 1 - rank.rank
        operations = [
            dist.P2POp(dist.isend, torch.ones(3), peer, group),
            dist.P2POp(dist.irecv, torch.empty(3), peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return "done"


def test_first_batch_needs_all_ranks(ranks: RankPool) -> None:
    """A group whose first operation is a point-to-point batch waits for all of its ranks, as NCCL's does."""
    outcomes = ranks(4, only_some_ranks, device_type="emulated", fresh=True, expect_failure=True, timeout=2)
    assert [outcome.kind for outcome in outcomes[:2]] == ["hung", "hung"]


def abort_with_pending(rank: Rank) -> str:
    dist.all_reduce(torch.ones(4))  # all ranks have to come to the first one, on NCCL, too
    torch.accelerator.synchronize()
    if rank.rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        dist.distributed_c10d._abort_process_group()
        with pytest.raises(Exception, match=r"abort|not been initialized|Default process group"):
            dist.all_reduce(torch.ones(4))
    return "aborted"


def test_abort_does_not_hang(ranks: RankPool) -> None:
    """A rank whose collective nobody else joins can abort, synchronize and go on."""
    assert ranks(2, abort_with_pending, device_type="emulated", fresh=True, timeout=20) == ["aborted"] * 2


LEAVES = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import accelerator
accelerator.register()
rank = int(sys.argv[2])
dist.init_process_group("cpu:gloo,emulated:emulated_nccl", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
value, other = torch.ones(4, device="emulated"), torch.ones(4, device="emulated")
destroyed = dist.new_group(backend="emulated_nccl")
dist.all_reduce(value)
dist.all_reduce(other, group=destroyed)
torch.accelerator.synchronize()
if rank == 0:
    works = [dist.all_reduce(value, async_op=True), dist.all_reduce(other, group=destroyed, async_op=True)]
dist.destroy_process_group(destroyed)
print("left", flush=True)
"""


def test_exit_with_pending_does_not_hang(tmp_path: Path) -> None:
    """A program ends at once, and without an error, while collectives that nobody else joined are pending.

    One of them was of a group that the program has destroyed.
    """
    if reason := unavailable("emulated"):
        pytest.skip(reason)
    tests, store = Path(__file__).resolve().parent.parent, tmp_path / "store"
    command = [sys.executable, "-c", LEAVES, str(tests)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    programs = [subprocess.Popen([*command, str(rank), str(store)], **options) for rank in range(2)]
    try:
        for program in programs:
            output, _ = program.communicate(timeout=patient(25))  # gloo would wait for 30 minutes
            assert (program.returncode, "left" in output) == (0, True), output
    finally:
        for program in programs:
            program.kill()
