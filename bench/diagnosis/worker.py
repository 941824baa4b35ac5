"""A rank that trains a GPT, is traced, is delayed on demand, and counts what watching costs."""

from __future__ import annotations

import contextlib
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fullshard
from bench.contestants import FULLSHARD, distribute
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.worker import GROUP_TIMEOUT
from fullshard.debug.tracing.exposed import late_ranks
from fullshard.engine.reduction import queue
from fullshard.progress import PROGRESS, LaunchLog, Progress

DELAYED_UNIT = "blocks.5"
IN_BACKWARD, IN_REDUCTION = "in its backward", "in its reduction"
_NOTED = ("enter", "launch", "begin_wait", "end_wait", "leave")


class Servant:
    """One rank."""

    def __init__(self, shape: GPTShape, rank: int) -> None:
        torch.manual_seed(0)
        model = GPT(shape)
        self.model = distribute(FULLSHARD, model, Block, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch, self.rank, self.delay = batch_of(shape, 0, rank), rank, 0.0
        self.model.get_submodule(DELAYED_UNIT).register_full_backward_pre_hook(lambda *_: time.sleep(self.delay))
        for _ in range(3):
            self._step()

    def _step(self) -> None:
        next_token_loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _steps(self, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            self._step()
        return time.perf_counter() - begun

    def steps(self, count: int, traced: bool) -> dict[str, float]:
        """Seconds of some steps, and seconds that the trace accounts for."""
        dist.barrier()
        if not traced:
            return {"seconds": self._steps(count)}
        with tempfile.TemporaryDirectory() as folder, fullshard.trace(folder) as trace:
            begun = time.perf_counter()
            seconds = self._steps(count)
            whole = time.perf_counter() - begun
        parts = sum(segment.seconds for segment in trace.segments[self.rank])
        return {"seconds": seconds, "parts": parts / whole}

    def late(self, steps: int, seconds: float, where: str, rank: int) -> list[list[Any]]:
        """What a trace names if ``rank`` is late by so much in the delayed unit, everyone's table alike."""
        delay = seconds if self.rank == rank else 0.0
        with contextlib.ExitStack() as stack:
            if where == IN_BACKWARD:
                self.delay = delay
            else:
                stack.enter_context(_slow_reductions(delay))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with fullshard.trace(folder) as trace:
                self._steps(steps)
        self.delay = 0.0
        return [list(each) for each in late_ranks(trace.segments)]

    def watched(self, steps: int) -> dict[str, float]:
        """What the watchdog costs: seconds in a step on the training thread, and per second on its own thread."""
        calls: Counter[str] = Counter()

        def counted(name: str) -> Any:
            original = getattr(Progress, name)

            def call(*args: Any) -> Any:
                calls[name] += 1
                return original(*args)

            return mock.patch.object(Progress, name, call)

        seconds = self._steps(steps) / steps
        with contextlib.ExitStack() as stack:
            for name in _NOTED:
                stack.enter_context(counted(name))
            self._step()
        other, log = Progress(), LaunchLog(Progress, 0)
        each = {
            "enter": lambda: other.enter("forward", DELAYED_UNIT),
            "launch": lambda: other.launch(log, "all_gather", [DELAYED_UNIT]),
            "begin_wait": lambda: other.begin_wait((0, 1)),
            "end_wait": other.end_wait,
            "leave": lambda: other.leave("forward"),
        }
        cost = {name: timeit.timeit(call, number=20_000) / 20_000 for name, call in each.items()}
        looks, begun = 50, time.thread_time()
        for _ in range(looks):
            PROGRESS.watchdog._look()
        return {
            "step": seconds,
            "noted": sum(calls[name] * seconds for name, seconds in cost.items()),
            "notes": float(sum(calls.values())),
            "thread_per_second": (time.thread_time() - begun) / looks,
        }


@contextlib.contextmanager
def _slow_reductions(seconds: float) -> Iterator[None]:
    """The reductions of the delayed unit are issued late: it is not in what the unit computes."""
    issue = queue.issue_reduce_scatters

    def slow(batch: Any, *rest: Any) -> None:
        if any(unit == DELAYED_UNIT for unit, _ in batch):
            time.sleep(seconds)
        issue(batch, *rest)

    with mock.patch.object(queue, "issue_reduce_scatters", slow):
        yield


def build(rank: int, ranks: int, store: str, threads: int, shape: dict[str, int]) -> Servant:
    """A rank of a team, with a store as torchrun's: that of a file has no signs of life."""
    file = dist.FileStore(store, ranks)
    if rank == 0:
        server = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False)
        file.set("port", str(server.port))
    else:
        server = dist.TCPStore("localhost", int(file.get("port")), ranks)
    dist.init_process_group("gloo", store=server, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
    return Servant(GPTShape(**shape), rank)
