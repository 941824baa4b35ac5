"""One rank of one contestant: holds a sharded model with AdamW state, saves and loads it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import resident_memory
from bench.checkpoint.systems import KEEPERS, digest, load_code, spoil
from bench.contestants import distribute, prepare
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.worker import join_group, load_training_code

TRAINED, INITIAL = "trained", "initial"


@dataclass(frozen=True)
class Answer:
    """How a call went on one rank."""

    returned: float  # seconds until the call returned
    done: float  # seconds until what it wrote had reached the disk, or, if it reads, as ``returned``
    extra: int | None  # bytes of resident memory at its peak beyond those before; None where the kernel does not say
    right: bool | None  # whether every bit that was read is right; None if it writes


class Holder:
    """The model of one rank, its optimizer with state, and what their bits are."""

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

    def perform(self, method: str, path: str, expect: str | None = None, optimizer: bool = False) -> dict[str, Any]:
        """One call, as an :class:`Answer`. The file system is at rest when it begins.

        Args:
            method: Of :meth:`Keeper.perform`.
            path: The folder that it writes to, and that exists; or that it reads.
            expect: After reading: which values must be there, TRAINED or INITIAL. None: it writes.
            optimizer: Whether the optimizer's state is read as well.
        """
        keeper, folder, writes = self.keeper, Path(path), expect is None
        if not writes:
            spoil(keeper.weights())
        if optimizer:
            spoil(keeper.state())
        resident_memory.forget_freed()
        if writes and self.rank == 0:
            os.sync()
        before = resident_memory.now()
        dist.barrier()
        start = time.perf_counter()
        wait = keeper.perform(method, folder)
        returned = time.perf_counter() - start
        if wait is not None:
            wait()
        if writes and self.rank == 0:
            flush(folder)
        done = time.perf_counter() - start if writes else returned
        peak = resident_memory.peak()
        extra = None if peak is None or before is None else peak - before
        right = None if expect is None else digest(keeper.weights()) == self.expected[expect]
        if optimizer:
            right = bool(right) and digest(keeper.state()) == self.expected["state"]
        return {"returned": returned, "done": done, "extra": extra, "right": right}


def flush(folder: Path) -> None:
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
