"""One rank of one contestant of ``bench.checkpoint``: holds a sharded model with AdamW state, saves and loads it.

Started by ``bench.checkpoint`` as ``python -m bench.checkpoint_worker``, its assignment as JSON in the first argument.
It answers every line it reads from its standard input with one line of JSON. A closed input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bench.checkpoint_systems import KEEPERS, Keeper, digest, load_code, spoil
from bench.contestants import distribute, prepare
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.step_worker import Assignment, ResidentMemory, join_group, load_training_code

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

    def as_message(self) -> dict[str, object]:
        return {"do": "perform", **asdict(self)}


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
    """Samples this process's resident memory without pages of files, until it is stopped. Empty where there is no
    such count (Linux has it)."""

    highest: int | None
    _over: threading.Event

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self._over = self.now(), threading.Event()

    @staticmethod
    def now() -> int | None:
        """Anonymous and shared memory."""
        try:
            text = Path("/proc/self/status").read_text()
        except OSError:
            return None
        sizes = [int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:"))]
        return 1024 * sum(sizes) if sizes else None

    def run(self) -> None:
        while self.highest is not None and not self._over.wait(SAMPLE_S):
            self.highest = max(self.highest, self.now() or 0)

    def stop(self) -> int | None:
        """The highest value seen."""
        self._over.set()
        self.join()
        return self.highest


class Holder:
    """The model of one rank, its optimizer with state, and what their bits are."""

    rank: int
    loss: float
    keeper: Keeper
    expected: dict[str, str]

    def __init__(self, assignment: Assignment) -> None:
        self.rank = assignment.rank
        shape = GPTShape(assignment.width, assignment.blocks, assignment.tokens)
        system = assignment.contestant
        prepare(system)
        join_group(assignment)
        load_training_code()
        load_code(system)
        torch.manual_seed(0)
        model = distribute(system, GPT(shape), Block, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=assignment.learning_rate)
        self.keeper = KEEPERS[system](model, optimizer)
        self.expected = {INITIAL: digest(self.keeper.weights())}
        loss = next_token_loss(model, batch_of(shape, 0, self.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()
        self.expected[TRAINED] = digest(self.keeper.weights())
        self.expected["state"] = digest(self.keeper.state())

    def perform(self, request: Request) -> Answer:
        """One call, and whether what it read is right. The file system is at rest when it begins."""
        keeper, path = self.keeper, Path(request.path)
        if request.expect is not None:
            spoil(keeper.weights())
            if request.optimizer:
                spoil(keeper.state())
        ResidentMemory.forget_freed()
        if request.expect is None and self.rank == 0:
            os.sync()
        before, own_before = ResidentMemory.now(), OwnMemory.now()
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
        own, peak = None if sampler is None else sampler.stop(), ResidentMemory.peak()
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


def serve(threads: int, build: Callable[[], Holder]) -> None:
    """Build on ``threads`` compute threads, then perform requests until the input is closed; does not return."""
    # Whatever libraries print goes to stderr; the original stdout carries answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        torch.set_num_threads(threads)
        holder = build()
        answers.write(json.dumps({"ready": True, "loss": holder.loss}) + "\n")
        for line in sys.stdin:
            message = json.loads(line)
            if message.pop("do") != "perform":
                break
            answers.write(json.dumps(asdict(holder.perform(Request(**message)))) + "\n")
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        os._exit(1)  # no orderly goodbye: the other rank may be waiting in a collective
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    given = Assignment(**json.loads(sys.argv[1]))
    serve(given.threads, lambda: Holder(given))
