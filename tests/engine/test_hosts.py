"""Messages between hosts: each byte crosses a link once per host, and sums are in one order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard, replicate
from fullshard.comm import gloo
from fullshard.comm.base import CommRequest, GradScaling, Operand
from fullshard.comm.gloo import GlooTransport
from fullshard.comm.hosts import RelayThread, Routes
from fullshard.memory import HostWork, wait_for_all
from pairwise import each_value
from patience import patient
from ranks import Rank, on_ranks

# Ranks of each host; the second rank of a host is not the next one in the third.
HOSTS = [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]], [[0, 3], [1], [2]]]
SIZES = (5, 40_000, 3)  # elements of a shard: joined, sent alone, joined


@pytest.mark.parametrize("hosts", [*HOSTS, [[0, 1, 2, 3], [4, 5, 6]], [[0], [1, 2, 3, 4, 5, 6, 7], [8, 9]]])
def test_every_rank_is_reached_once(hosts: Sequence[Sequence[int]]) -> None:
    """Of each rank, one rank of each other host gets what it sends, and passes it on to its whole host."""
    world = sum(map(len, hosts))
    routes = [Routes(hosts, rank) for rank in range(world)]
    for here in routes:
        had = Counter([here.rank, *here.neighbors, *here.counterparts])
        for entry in here.counterparts:
            there = routes[entry]
            assert here.rank in there.relayed[entry]
            had.update(there.neighbors)
            for other in there.neighbors:
                assert here.rank in routes[other].relayed[entry] and here.rank not in routes[other].relayed[other]
        assert had == Counter(range(world))


class Counted:
    """A process group that counts bytes between ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sent = group, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent[peer] += sum(tensor.nbytes for tensor in tensors)
        return self.group.send(tensors, peer, tag)


def transport_of(rank: Rank, hosts: Sequence[Sequence[int]]) -> GlooTransport:
    transport = GlooTransport(rank.group)
    transport.__dict__["_routes"] = Routes(hosts, rank.rank)
    transport.group = Counted(rank.group)  # type: ignore[assignment]
    return transport


def bytes_between_hosts(transport: GlooTransport, hosts: Sequence[Sequence[int]]) -> int:
    """What all ranks have sent to ranks of other hosts."""
    here, sent = Routes(hosts, transport.rank).host, transport.group.sent  # type: ignore[attr-defined]
    total = torch.tensor(sum(size for peer, size in sent.items() if peer not in here))
    dist.all_reduce(total)
    return int(total)


@on_ranks(4)
@each_value(hosts=HOSTS, dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_collectives(rank: Rank, hosts: list[list[int]], dtype: torch.dtype) -> None:
    """Results are the same wherever ranks are, up to the order of sums; bytes between hosts are the fewest possible."""
    torch.manual_seed(rank.rank)
    transport = transport_of(rank, hosts)
    shards = [torch.randn(size).to(dtype) for size in SIZES]
    nbytes = sum(shard.nbytes for shard in shards)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, shards)

    operands = [Operand(shard, torch.full((4 * len(shard),), -1, dtype=dtype)) for shard in shards]
    wait_for_all(transport.all_gather([CommRequest("a", operands)]))
    for index, operand in enumerate(operands):
        assert torch.equal(operand.unsharded, torch.cat([each[index] for each in every]))
    assert bytes_between_hosts(transport, hosts) == 4 * (len(hosts) - 1) * nbytes

    whole = [torch.randn(4 * size).to(dtype) for size in SIZES]
    before = [each.clone() for each in whole]
    dist.all_gather_object(every, whole)
    wanted = [sum(each[index].double() for each in every) / 4 for index in range(len(SIZES))]
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    transport.group.sent.clear()  # type: ignore[attr-defined]
    operands = [Operand(torch.empty_like(shard), each) for each, shard in zip(whole, shards, strict=True)]
    wait_for_all(transport.reduce_scatter([CommRequest("a", operands, GradScaling(1, 4))]))
    for operand, expected, mine in zip(operands, wanted, before, strict=True):
        size = operand.shard.numel()
        part = expected.narrow(0, rank.rank * size, size)
        torch.testing.assert_close(operand.shard.double(), part, **tolerance)
        assert torch.equal(operand.unsharded, mine)  # it may be autograd's
    assert bytes_between_hosts(transport, hosts) == 4 * (len(hosts) - 1) * nbytes

    operands = [Operand(each, each) for each in whole]
    wait_for_all(transport.all_reduce([CommRequest("a", operands, GradScaling(1, 4))]))
    for operand, expected in zip(operands, wanted, strict=True):
        torch.testing.assert_close(operand.unsharded.double(), expected, **tolerance)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, operand.unsharded)
        assert all(torch.equal(found[0], each) for each in found)


@on_ranks(4)
@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]])
def test_a_rank_that_waits_alone(rank: Rank, hosts: list[list[int]]) -> None:
    """What is passed on needs launches of the other ranks, which may wait for this one elsewhere before they wait."""
    transport = transport_of(rank, hosts)
    whole = [torch.ones(4 * 40_000) for _ in range(2)]
    works = [
        transport.reduce_scatter([CommRequest("a", [Operand(torch.empty(40_000), whole[0])], GradScaling(1, 4))]),
        transport.all_gather([CommRequest("b", [Operand(torch.ones(40_000), whole[1])])]),
    ]
    if rank.rank:
        dist.barrier()
    for work in works[::-1] if rank.rank == 1 else works:  # in any order
        wait_for_all(work)
    if not rank.rank:
        dist.barrier()


@on_ranks(4)
def test_a_rank_that_waits_before_it_launches_more(rank: Rank) -> None:
    """The second half of an all-reduce follows waits; what others have launched by then does not hold it up."""
    transport = transport_of(rank, HOSTS[0])
    whole, unsharded = torch.ones(4 * 40_000), torch.empty(4 * 40_000)
    sums = transport.all_reduce([CommRequest("a", [Operand(whole, whole)], GradScaling(1, 1))])
    if rank.rank in (1, 2):
        wait_for_all(sums)
    works = transport.all_gather([CommRequest("b", [Operand(torch.ones(40_000), unsharded)])])
    wait_for_all([*sums, *works])
    assert whole.eq(4).all() and unsharded.eq(1).all()


class Late:
    """A work that is done after a while."""

    done = False

    def wait(self) -> None:
        time.sleep(1)
        self.done = True


def test_an_interrupted_wait() -> None:
    """What a signal handler raises is raised when the memory is not written to any more; the work stays failed."""
    late = Late()
    work = HostWork([RelayThread().wait_for(late)], lambda: None)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert late.done
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        work.wait()


EXIT = """
import os, sys, time, torch, torch.distributed as dist
from fullshard.comm.hosts import RelayThread
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group, memory = dist.group.WORLD, torch.zeros(4)
if rank:
    time.sleep(1)
    group.send([memory], 0, 1).wait()
else:
    thread = RelayThread()
    work = thread.wait_for(group.recv([memory], 1, 1))
"""


def test_exit_with_a_message_on_its_way(tmp_path: Path) -> None:
    """The process ends when it has come, and is not aborted inside of the wait for it."""
    process = subprocess.Popen([sys.executable, "-c", EXIT, str(tmp_path / "store")])
    assert process.wait(patient(60)) == 0


def test_errors_of_what_is_passed_on() -> None:
    """They are raised where the rank waits, whatever they are, and the thread goes on."""

    class Broken:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def wait(self) -> None:
            raise self.error

    thread, passed = RelayThread(), []
    for error in (RuntimeError("closed"), ValueError("a mistake"), MemoryError()):
        work = thread.wait_for(Broken(error))
        for _ in range(2):
            with pytest.raises(type(error)):
                work.wait()
    thread.wait_for(HostWork((), lambda: passed.append(1))).wait()
    assert passed == [1]
    kept = torch.ones(1)
    seen = weakref.ref(kept)
    thread.wait_for(HostWork((), kept.size)).wait()
    del kept
    thread.wait_for(HostWork((), lambda: None)).wait()
    assert seen() is None


@contextmanager
def on_hosts(rank: Rank, hosts: Sequence[Sequence[int]]) -> Iterator[Callable[[nn.Module, Any], None]]:
    """Have ranks on hosts; yields what shards a module by one of the front ends."""
    with pytest.MonkeyPatch.context() as patch:
        host = next(index for index, host in enumerate(hosts) if rank.rank in host)
        patch.setattr(gloo, "this_host", lambda: bytes([host] * 8))
        group = dist.new_group()
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        yield lambda module, by: by(module, mesh=mesh)
        assert gloo.record_of(group).routes == Routes(hosts, rank.rank)


@on_ranks(4)
@each_value(hosts=[[[0, 1], [2, 3]], [[0, 1, 2], [3]]], shard=[fully_shard, replicate])
def test_training(rank: Rank, hosts: list[list[int]], shard: Any) -> None:
    """A model computes and trains as without sharding, also if its first forward is in inference mode."""

    def train(wrap: Callable[[nn.Module, Any], None] | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
        if wrap is not None:
            for layer in (model[0], model[2], model):
                wrap(layer, shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(8, 64)
            with torch.inference_mode():
                found.append(4 * model(x))
            loss = model(x.chunk(4)[rank.rank] if wrap else x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
            if wrap:
                dist.all_reduce(found[-1])
        return found

    with on_hosts(rank, hosts) as wrap:
        found = train(wrap)
    torch.testing.assert_close([each / 4 for each in found[1::2]], train()[1::2])
    torch.testing.assert_close(found[::2], train()[::2])
