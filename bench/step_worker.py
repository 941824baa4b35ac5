"""One rank of one contestant of ``bench.step``: builds its model, then trains only when its turn comes.

Started by ``bench.step`` as ``python -m bench.step_worker``, its assignment as JSON in the first argument. It
answers every line it reads from its standard input with one line of JSON. A closed input ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from bench.contestants import contestant_named, distribute, prepare
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss


@dataclass(frozen=True)
class Assignment:
    """Who this process is and what it trains. ``store`` is the rendezvous file of this contestant's ranks."""

    contestant: str
    rank: int
    ranks: int
    store: str
    threads: int
    width: int
    blocks: int
    tokens: int
    learning_rate: float

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


class ResidentMemory:
    """Resident memory of this process as the kernel counts it (Linux); None elsewhere."""

    @staticmethod
    def now() -> int | None:
        return _kernel_bytes("/proc/self/status", "VmRSS")

    @staticmethod
    def peak() -> int | None:
        return _kernel_bytes("/proc/self/status", "VmHWM")

    @staticmethod
    def return_freed() -> None:
        """Give memory that the allocator holds but nobody uses back to the kernel (glibc)."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    @classmethod
    def forget_freed(cls) -> None:
        """To be called on a model just built: the unsharded one was the benchmark's own way to initialise, so
        hand back what it left behind and measure the peak from here."""
        gc.collect()
        cls.return_freed()
        cls.reset_peak()

    @staticmethod
    def reset_peak() -> None:
        """From here on ``peak`` is the highest value since now; 5 resets the mark, see proc(5)."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _kernel_bytes(file: str, field: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def available_memory() -> int | None:
    """Bytes the machine can still give out, None where the kernel does not say."""
    return _kernel_bytes("/proc/meminfo", "MemAvailable")


class Trainer:
    """The model of one rank, its optimizer, and how many steps it has trained."""

    def __init__(self, assignment: Assignment) -> None:
        self.rank = assignment.rank
        self.shape = GPTShape(assignment.width, assignment.blocks, assignment.tokens)
        self.step = 0
        system = contestant_named(assignment.contestant).system
        prepare(system)
        join_group(assignment)
        load_training_code()
        self.baseline = ResidentMemory.now()
        torch.manual_seed(0)
        self.model = distribute(system, GPT(self.shape), Block, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=assignment.learning_rate)
        ResidentMemory.forget_freed()

    def run(self, steps: int) -> dict[str, object]:
        """Train ``steps`` steps; ``zero_grad`` is part of the timed step, making its data is not."""
        seconds, losses = [], []
        for _ in range(steps):
            batch = batch_of(self.shape, self.step, self.rank)
            start = time.perf_counter()
            loss = next_token_loss(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            self.step += 1
        return {"seconds": seconds, "losses": losses}

    def memory(self) -> dict[str, object]:
        return {"baseline": self.baseline, "peak": ResidentMemory.peak(), "resting": ResidentMemory.now()}


class Servant(Protocol):
    """What :func:`serve` asks of the object that trains."""

    def run(self, steps: int) -> dict[str, object]: ...

    def memory(self) -> dict[str, object]: ...


def join_group(assignment: Assignment) -> None:
    """Make the default process group that of the contestant's ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{assignment.store}",
        rank=assignment.rank,
        world_size=assignment.ranks,
        timeout=timedelta(seconds=120),
    )


def load_training_code() -> None:
    """Train four numbers once, with a collective: torch imports parts of itself at the first step, and that
    memory is no contestant's own."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()


def serve(threads: int, build: Callable[[], Servant]) -> None:
    """Build on ``threads`` compute threads, then answer requests until the input is closed; does not return."""
    # Whatever libraries print goes to stderr; the original stdout carries answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, object]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        torch.set_num_threads(threads)
        trainer = build()
        answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "run":
                answer(trainer.run(request["steps"]))
            elif request["do"] == "memory":
                answer(trainer.memory())
            else:
                break
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        answers.flush()
        os._exit(1)  # no orderly goodbye: the other rank may be waiting in a collective
    # The process group is not destroyed: its ranks leave at different times, and nothing is left to flush.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    given = Assignment(**json.loads(sys.argv[1]))
    serve(given.threads, lambda: Trainer(given))
