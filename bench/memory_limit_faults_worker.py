"""One rank of one contestant of ``bench.memory_limit_faults``: trains, and counts page faults and processor time.

Started as ``python -m bench.memory_limit_faults_worker``, its assignment as JSON in the first argument.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass

import torch

from bench.contestants import distribute, prepare
from bench.models import GPT, Block, GPTShape
from bench.step_worker import Assignment, ResidentMemory, Trainer, join_group, load_training_code, serve


@dataclass(frozen=True)
class FaultsAssignment(Assignment):
    """That of a plain step. ``contestant`` is a system; ``kept_bytes``: blocks that the allocator keeps; 0: its own
    affair."""

    kept_bytes: int


class CountingTrainer(Trainer):
    """Beside what a step costs in time: page faults without input or output, and processor time of all threads."""

    faults: list[int]
    user_seconds: list[float]
    system_seconds: list[float]

    def __init__(self, assignment: FaultsAssignment) -> None:
        self.rank, self.step = assignment.rank, 0
        self.shape = GPTShape(assignment.width, assignment.blocks, assignment.tokens)
        self.faults, self.user_seconds, self.system_seconds = [], [], []
        prepare(assignment.contestant)
        join_group(assignment)
        load_training_code()
        self.baseline = ResidentMemory.now()
        if assignment.kept_bytes:
            from fullshard.allocator import keep_freed_memory

            if not keep_freed_memory(assignment.kept_bytes):
                raise RuntimeError("the allocator does not take the setting")
        torch.manual_seed(0)
        self.model = distribute(assignment.contestant, GPT(self.shape), Block, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=assignment.learning_rate)
        ResidentMemory.forget_freed()

    def run(self, steps: int) -> dict[str, object]:
        """See :class:`Trainer`; the first call is the warm-up."""
        warm = self.step > 0
        before = resource.getrusage(resource.RUSAGE_SELF)
        answer = super().run(steps)
        after = resource.getrusage(resource.RUSAGE_SELF)
        if warm:
            self.faults.append((after.ru_minflt - before.ru_minflt) // steps)
            self.user_seconds.append((after.ru_utime - before.ru_utime) / steps)
            self.system_seconds.append((after.ru_stime - before.ru_stime) / steps)
        return answer

    def memory(self) -> dict[str, object]:
        """Bytes; and per round, and step of it, faults and seconds."""
        counted = {"faults": self.faults, "user_seconds": self.user_seconds, "system_seconds": self.system_seconds}
        return {**super().memory(), **counted}


if __name__ == "__main__":
    given = FaultsAssignment(**json.loads(sys.argv[1]))
    serve(given.threads, lambda: CountingTrainer(given))
