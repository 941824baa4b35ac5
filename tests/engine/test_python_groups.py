"""Process groups without a back end of c10d's: ranks that are threads, and groups that are written in Python."""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, replicate
from fullshard.comm import CommRequest, GradScaling, Operand, PythonGroupTransport, SingleRankTransport, make_transport
from fullshard.wrap import ModuleWrapPolicy
from models import Block, Stack
from ranks import Rank, on_ranks


def on_threads(count: int, function: Callable[[int], None]) -> None:
    """Run ``function`` with the ranks 0 to ``count - 1``, each on a thread with a default group of its own."""
    failures: list[str] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            function(rank)
        except BaseException as error:
            failures.append(f"rank {rank}: {traceback.format_exc()}")
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded.ProcessLocalGroup.reset()
    assert not failures, "\n".join(failures)


BLOCKS = ModuleWrapPolicy({Block})
WAYS: dict[str, tuple[int, Callable[[nn.Module], nn.Module]]] = {
    "fully_shard": (3, lambda m: fully_shard(m, policy=BLOCKS)),
    "2-D": (4, lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (2, 2)), policy=BLOCKS)),
    "replicate": (2, lambda m: replicate(m, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))),
    "wrapper on a group": (
        2,
        lambda m: FullyShardedDataParallel(m, dist.group.WORLD, auto_wrap_policy=BLOCKS, use_orig_params=True),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_are_threads(way: str) -> None:
    """Two steps end in the weights of the unsharded model on all ranks' batches."""
    count, shard = WAYS[way]
    torch.manual_seed(0)
    reference = Stack()
    copies = [copy.deepcopy(reference) for _ in range(count)]
    batches = torch.randn(2, count, 5, 6)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in batches:
        (sum(reference(batch).square().mean() for batch in step) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(rank: int) -> None:
        model = shard(copies[rank])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in batches:
            model(step[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(model, FullyShardedDataParallel):
            found = model.state_dict()
        else:
            found = get_model_state_dict(
                model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
            )
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(found[name], value)

    on_threads(count, train)


class _Doubling(dist.ProcessGroup):
    """Two ranks with the same data, on one process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802 # as torch calls it
        return "doubling"

    def _done(self, name: str, result: Any) -> Any:
        self.calls.append(name)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, *_: Any) -> Any:
        return self._done("all_gather", output.view(2, -1).copy_(own))

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, *_: Any) -> Any:
        return self._done("reduce_scatter", output.copy_(own.view(2, -1)[self.rank()] * 2))

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> Any:
        for tensor in tensors:
            tensor.mul_(2)
        return self._done("all_reduce", tensors)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # names before torch 2.13


@on_ranks(1, fresh=True)  # torch cannot destroy such a group, as the next body would
def test_a_group_written_in_python(rank: Rank) -> None:
    """A back end that a program has registered, and that implements nothing but the collectives, is used."""
    assert type(make_transport(rank.group, torch.device("meta"))) is SingleRankTransport

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return _Doubling(0, 2)

    if not hasattr(dist.Backend, "DOUBLING"):
        dist.Backend.register_backend("doubling", make, devices=["cpu"])
    group = dist.new_group([0], backend="doubling")
    assert isinstance(group, _Doubling)
    transport = make_transport(group, torch.device("cpu"))
    assert type(transport) is PythonGroupTransport
    piece, region = torch.tensor([1.0, 2.0]), torch.zeros(4)
    for dtype in (torch.float32, torch.int16):
        operand = Operand(piece.to(dtype), region.to(dtype))
        for work in transport.all_gather([CommRequest("", [operand])]):
            work.wait()
        assert operand.unsharded.tolist() == [1, 2, 1, 2]
    for work in transport.reduce_scatter([CommRequest("", [Operand(piece, torch.arange(4.0))], GradScaling(after=4))]):
        work.wait()
    assert piece.tolist() == [0, 0.5]
    for work in transport.all_reduce([CommRequest("", [Operand(piece, piece)], GradScaling(before=2))]):
        work.wait()
    assert piece.tolist() == [0, 0.5] and group.calls == ["all_gather", "all_gather", "reduce_scatter", "all_reduce"]


@on_ranks(2)
def test_a_device_without_a_back_end(rank: Rank) -> None:
    """It is refused in c10d's words."""
    with pytest.raises(RuntimeError, match="No backend type associated with device type"):
        make_transport(rank.group, torch.device("meta"))
