"""One rank of a contestant that trains a GPT when its turn comes, in any of the ways that are measured."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench import resident_memory
from bench.contestants import BF16, FP32, HSDP, OFFLOAD, Contestant, distribute, prepare, set_allocator
from bench.ledger import Ledger, range_of, recorded
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.worker import join_group, load_training_code

MEASURED = "measured step"
SUMMON, SUMMON_WRITEBACK = "summon", "summon_writeback"
# Offset of tcpi_bytes_acked in struct tcp_info of linux/tcp.h: sent and arrived, retransmissions not counted.
TCPI_BYTES_ACKED = 120


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Who this process is and what it does. ``tokens`` are those of one microbatch."""

    contestant: Contestant
    rank: int
    ranks: int
    store: str
    threads: int
    what: str
    width: int
    blocks: int
    tokens: int
    microbatches: int = 1
    learning_rate: float = 1e-3

    @classmethod
    def of(cls, contestant: Mapping[str, Any], **others: Any) -> Assignment:
        return cls(contestant=Contestant(**contestant), **others)


def unsynchronized(model: Any, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Around a microbatch's forward and backward: gradients are exchanged in the ``last`` one only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


class Trainer:
    """The model of one rank, its optimizer, and how many steps it has trained."""

    def __init__(self, given: Assignment) -> None:
        self.assignment, self.shape = given, GPTShape(given.width, given.blocks, given.tokens)
        self.step = 0
        self._peak_of_summons: int | None = None
        prepare(given.contestant.system)  # so that its code counts in the baseline
        join_group(given.rank, given.ranks, given.store)
        load_training_code()
        with recorded():  # whose first use needs memory too
            pass
        self.baseline = resident_memory.now()
        torch.manual_seed(0)
        self._recording = contextlib.ExitStack()  # of the ledger, until the warm-up is over
        self._ledger: Ledger = self._recording.enter_context(recorded())
        self.model, self.optimizer = self._built()
        resident_memory.forget_freed()
        self._sent_before_first_step = bytes_sent()

    def _built(self) -> tuple[Any, torch.optim.Optimizer]:
        contestant, what = self.assignment.contestant, self.assignment.what
        mode = what if what in (BF16, HSDP, OFFLOAD) else FP32
        model = GPT(self.shape)
        set_allocator(contestant)
        chosen = {key: getattr(contestant, key) for key in ("prefetch", "keep_last", "quantized", "ahead")}
        model = distribute(contestant.system, model, Block, torch.device("cpu"), mode, **chosen)
        return model, torch.optim.AdamW(model.parameters(), lr=self.assignment.learning_rate)

    def warm_up(self, steps: int) -> dict[str, object]:
        """Train ``steps`` steps with every allocation recorded, of which the last is counted, and then one more.

        The recording and what the allocator held for it are gone before that one, so that neither counts later.
        """
        losses = [loss for _ in range(steps - 1) for loss in self.run(1)["losses"]]
        with range_of(MEASURED):
            losses += self.run(1)["losses"]
        self._recording.close()
        span = self._ledger.span(MEASURED)
        self._counted = {
            "counted": self._ledger.peak(span.begin, span.end)[1],
            "counted_resting": self._ledger.peak(span.begin, span.begin)[1],
        }
        del self._ledger
        resident_memory.forget_freed()
        self._peak_of_summons = None
        return {"losses": [*losses, *self.run(1)["losses"]]}

    def run(self, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps; or train one, whose time does not count, and summon so often."""
        if self.summons:
            _, loss = self.train()
            return {"seconds": self.summon(steps), "losses": [loss]}
        seconds, losses = zip(*(self.train() for _ in range(steps)), strict=True)
        return {"seconds": seconds, "losses": losses}

    def train(self) -> tuple[float, float]:
        """Seconds of one step, and its loss; ``zero_grad`` is part of the timed step, making its data is not."""
        count, losses = self.assignment.microbatches, []
        batches = [batch_of(self.shape, count * self.step + i, self.assignment.rank) for i in range(count)]
        start = time.perf_counter()
        for index, batch in enumerate(batches):
            alone = count == 1
            with contextlib.nullcontext() if alone else unsynchronized(self.model, last=index == count - 1):
                loss = next_token_loss(self.model, batch)
                loss = loss if alone else loss / count
                loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        self.step += 1
        return seconds, sum(loss.item() for loss in losses)

    @property
    def summons(self) -> bool:
        """Whether summons are measured, and not training steps."""
        return self.assignment.what in (SUMMON, SUMMON_WRITEBACK)

    def summon(self, times: int) -> list[float]:
        """Seconds of each: all units' full parameters are there, and gone again. Memory is that of this part only."""
        writeback = self.assignment.what == SUMMON_WRITEBACK
        resident_memory.reset_peak()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            with type(self.model).summon_full_params(self.model, writeback=writeback):
                pass
            seconds.append(time.perf_counter() - start)
        peak = resident_memory.peak()
        if peak is not None:
            self._peak_of_summons = max(peak, self._peak_of_summons or 0)
        return seconds

    def memory(self) -> dict[str, object]:
        """Bytes: of tensors as they were counted in one step, resident, and sent in a step on average."""
        sent, before = bytes_sent(), self._sent_before_first_step
        known = not self.summons and sent is not None and before is not None
        return {
            **self._counted,
            "baseline": self.baseline,
            "peak": self._peak_of_summons if self.summons else resident_memory.peak(),
            "resting": resident_memory.now(),
            "sent_per_step": (sent - before) // max(1, self.step) if known else None,  # type: ignore[operator]
        }


def bytes_sent() -> int | None:
    """Payload bytes that this process sent over its open TCP connections so far (Linux; None elsewhere).

    The kernel's count, so that it means the same for every contestant, however it calls the process group.
    Gloo keeps the connections of a group open, so no count is lost.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, not TCP, or a kernel without the field
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("=Q", information, TCPI_BYTES_ACKED)[0]
    return total


def build(**given: Any) -> Trainer:
    return Trainer(Assignment.of(**given))
