"""One rank of one contestant: holds a sharded model with AdamW state, saves and loads it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import resident_memory
from bench.checkpoint.systems import KEEPERS, Keeper, digest, load_code, spoil
from bench.contestants import distribute, prepare
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.worker import join_group, load_training_code

TRAINED, INITIAL = "trained", "initial"
SAMPLE_S = 0.001


@dataclass(frozen=True)
class Request:
    """One call of one method. All ranks get the same.

    Attributes:
        method: Of :meth:`Keeper.perform`.
        path: The folder that it writes to, and that exists; or that it reads.
        expect: After reading: which values must be there, TRAINED or INITIAL. None: it writes.
        optimizer: Whether the optimizer's state is read as well.
        sample: Whether memory is sampled meanwhile, which takes time of its own.
    """

    method: str
    path: str
    expect: str | None = None
    optimizer: bool = False
    sample: bool = False


@dataclass(frozen=True)
class Answer:
    """How a call went on one rank.

    Attributes:
        returned: Seconds until the call returned.
        done: Seconds until what it wrote had reached the disk, or, if it reads, as ``returned``.
        extra: Bytes of resident memory at its peak beyond those before; None where the kernel does not say.
        own: The same without pages of files, which are the kernel's cache; None unless sampled.
        right: Whether every bit that was read is right; None if it writes.
    """

    returned: float
    done: float
    extra: int | None
    own: int | None
    right: bool | None


class OwnMemory(threading.Thread):
    """Samples this process's resident memory without pages of files, until it is stopped. None where there is no
    such count (Linux has it)."""

    highest: int | None
    _over: threading.Event

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self._over = resident_memory.own(), threading.Event()

    def run(self) -> None:
        while self.highest is not None and not self._over.wait(SAMPLE_S):
            self.highest = max(self.highest, resident_memory.own() or 0)

    def stop(self) -> int | None:
        """The highest value seen."""
        self._over.set()
        self.join()
        return self.highest


class Holder:
    """The model of one rank, its optimizer with state, and what their bits are."""

    rank: int
    keeper: Keeper
    expected: dict[str, str]
    _loss: float

    def __init__(self, system: str, shape: GPTShape, rank: int) -> None:
        self.rank = rank
        load_training_code()
        load_code(system)
        torch.manual_seed(0)
        model = distribute(system, GPT(shape), Block, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.keeper = KEEPERS[system](model, optimizer)
        self.expected = {INITIAL: digest(self.keeper.weights())}
        loss = next_token_loss(model, batch_of(shape, 0, self.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._loss = loss.item()
        self.expected[TRAINED] = digest(self.keeper.weights())
        self.expected["state"] = digest(self.keeper.state())

    def loss(self) -> float:
        """That of the only step."""
        return self._loss

    def perform(self, **request: Any) -> dict[str, Any]:
        """Do one call; as JSON."""
        return asdict(self.performed(Request(**request)))

    def performed(self, request: Request) -> Answer:
        """One call, and whether what it read is right. The file system is at rest when it begins."""
        keeper, path = self.keeper, Path(request.path)
        if request.expect is not None:
            spoil(keeper.weights())
            if request.optimizer:
                spoil(keeper.state())
        resident_memory.forget_freed()
        if request.expect is None and self.rank == 0:
            os.sync()
        before, own_before = resident_memory.now(), resident_memory.own()
        sampler = OwnMemory() if request.sample else None
        if sampler is not None:
            sampler.start()
        dist.barrier()
        start = time.perf_counter()
        wait = keeper.perform(request.method, path)
        returned = time.perf_counter() - start
        if wait is not None:
            wait()
        if request.expect is None and self.rank == 0:
            flush(path)
        done = time.perf_counter() - start if request.expect is None else returned
        own, peak = None if sampler is None else sampler.stop(), resident_memory.peak()
        return Answer(
            returned=returned,
            done=done,
            extra=None if peak is None or before is None else peak - before,
            own=None if own is None or own_before is None else own - own_before,
            right=self._right(request),
        )

    def _right(self, request: Request) -> bool | None:
        if request.expect is None:
            return None
        right = digest(self.keeper.weights()) == self.expected[request.expect]
        if request.optimizer:
            right &= digest(self.keeper.state()) == self.expected["state"]
        return right


def flush(folder: Path) -> None:
    """Wait until all files in it are on the disk."""
    for path in [*(path for path in folder.rglob("*") if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def build(system: str, rank: int, ranks: int, store: str, threads: int, width: int, blocks: int, tokens: int) -> Holder:
    prepare(system)
    join_group(rank, ranks, store)
    return Holder(system, GPTShape(width, blocks, tokens), rank)
