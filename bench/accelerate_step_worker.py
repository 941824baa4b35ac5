"""One rank of one contestant of ``bench.accelerate_step``: a GPT that accelerate has sharded with FSDP2.

Started by ``bench.accelerate_step`` as ``python -m bench.accelerate_step_worker``, its assignment as JSON in the first
argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from bench.contestants import FULLSHARD, contestant_named
from bench.models import GPT, GPTShape, batch_of, next_token_loss
from bench.step_worker import Assignment, ResidentMemory, join_group, load_training_code, serve

CLIP = 1.0  # largest norm of the gradients


class Trainer:
    """The prepared model of one rank, its optimizer, and how many steps it has trained."""

    def __init__(self, assignment: Assignment) -> None:
        self.rank = assignment.rank
        self.shape = GPTShape(assignment.width, assignment.blocks, assignment.tokens)
        self.step = 0
        self.accelerator = _accelerator(assignment)
        load_training_code()
        self.baseline = ResidentMemory.now()
        torch.manual_seed(0)
        model = GPT(self.shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=assignment.learning_rate)
        prepared: Any = self.accelerator.prepare(model, optimizer)
        self.model, self.optimizer = prepared
        ours = any(base.__module__.startswith("fullshard") for base in type(self.model).__mro__)
        if ours != (contestant_named(assignment.contestant).system == FULLSHARD):
            raise RuntimeError(f"the model became a {type(self.model).__mro__}, which is not {assignment.contestant}'s")
        del model, optimizer
        ResidentMemory.forget_freed()

    def run(self, steps: int) -> dict[str, object]:
        """Train ``steps`` steps; ``zero_grad`` is part of the timed step, making its data is not."""
        seconds, losses = [], []
        for _ in range(steps):
            batch = batch_of(self.shape, self.step, self.rank)
            start = time.perf_counter()
            with self.accelerator.accumulate(self.model):
                loss = next_token_loss(self.model, batch)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            self.step += 1
        return {"seconds": seconds, "losses": losses}

    def memory(self) -> dict[str, object]:
        return {"baseline": self.baseline, "peak": ResidentMemory.peak(), "resting": ResidentMemory.now()}


def _accelerator(assignment: Assignment) -> Any:
    """One with FSDP2, torch's or fullshard's in its place.

    accelerate shards on accelerators only: it is told that these processes are such.
    """
    if contestant_named(assignment.contestant).system == FULLSHARD:
        import fullshard.dropin

        fullshard.dropin.install(quiet=True)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    join_group(assignment)
    ranks = {"RANK": assignment.rank, "LOCAL_RANK": assignment.rank}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"WORLD_SIZE": str(assignment.ranks), "LOCAL_WORLD_SIZE": str(assignment.ranks)}
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin)


if __name__ == "__main__":
    given = Assignment(**json.loads(sys.argv[1]))
    serve(given.threads, lambda: Trainer(given))
