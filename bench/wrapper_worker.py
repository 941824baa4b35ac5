"""One rank of one contestant of ``bench.wrapper``: a wrapped model that trains, or whose parameters are summoned.

Started by ``bench.wrapper`` as ``python -m bench.wrapper_worker``, its assignment as JSON in the first argument.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.contestants import (
    FAIRSCALE,
    FSDP1,
    FSDP1_FLAT,
    KEEP_FREED_MEMORY,
    PEER_WITH_SAME_FLAG,
    WRAPPER,
    WRAPPER_FLAT,
    WRAPPING,
    Contestant,
    distribute,
    prepare,
    wrap_units,
)
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from bench.modes_worker import bytes_sent
from bench.step_worker import Assignment, ResidentMemory, join_group, load_training_code, serve

STEP, ACCUMULATION, PREFETCH = "step", "accumulation", "prefetch"
SUMMON, SUMMON_WRITEBACK = "summon", "summon_writeback"
# The end of a contestant's name, and the member of BackwardPrefetch that it passes; without such an end the default.
PREFETCHES = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": None}


@dataclass(frozen=True, kw_only=True)
class WrapperContestant(Contestant):
    """A wrapper in one configuration, and the contestant it is measured by: FSDP1 in the same one (None: itself)."""

    peer: str | None = None
    prefetch: str | None = None  # a key of PREFETCHES; None: not passed


def _contestants() -> dict[str, WrapperContestant]:
    found = []
    for system in WRAPPING:
        peer = PEER_WITH_SAME_FLAG.get(system)
        found.append(WrapperContestant(system, system, peer=peer))
        for name in PREFETCHES:
            with_prefetch = None if peer is None else f"{peer}-{name}"
            found.append(WrapperContestant(f"{system}-{name}", system, peer=with_prefetch, prefetch=name))
    for system in (FSDP1, FSDP1_FLAT):
        found.append(WrapperContestant(f"{system}+malloc", system, KEEP_FREED_MEMORY, peer=system))
    for system in (WRAPPER, WRAPPER_FLAT):
        unkept = {"FULLSHARD_KEEP_FREED_MEMORY": "0"}
        found.append(WrapperContestant(f"{system}-malloc", system, unkept, peer=PEER_WITH_SAME_FLAG[system]))
    switch = {"ENABLE_NCCL_BASE_COLLECTIVES": "0"}
    found.append(WrapperContestant(FAIRSCALE, FAIRSCALE, switch, peer=FSDP1_FLAT))
    return {contestant.name: contestant for contestant in found}


WRAPPER_CONTESTANTS = _contestants()


def wrapper_contestant_named(name: str) -> WrapperContestant:
    if name not in WRAPPER_CONTESTANTS:
        raise ValueError(f"unknown contestant {name!r}; known are {', '.join(WRAPPER_CONTESTANTS)}")
    return WRAPPER_CONTESTANTS[name]


@dataclass(frozen=True)
class WrapperAssignment(Assignment):
    """That of a plain step, and what is measured. ``tokens`` are those of one microbatch."""

    what: str
    microbatches: int


def wrap(contestant: WrapperContestant, model: nn.Module) -> nn.Module:
    """The model in the contestant's wrapper, over the default group."""
    device = torch.device("cpu")
    if contestant.prefetch is None:
        return distribute(contestant.system, model, Block, device)
    library = importlib.import_module(WRAPPING[contestant.system].library)
    member = PREFETCHES[contestant.prefetch]
    value = None if member is None else library.BackwardPrefetch[member]
    return wrap_units(contestant.system, model, Block, device, backward_prefetch=value)


class Trainer:
    """The wrapped model of one rank, its optimizer, and how many steps it has trained."""

    def __init__(self, assignment: WrapperAssignment) -> None:
        self.assignment = assignment
        self.shape = GPTShape(assignment.width, assignment.blocks, assignment.tokens)
        contestant = wrapper_contestant_named(assignment.contestant)
        self.step = 0
        prepare(contestant.system)
        join_group(assignment)
        load_training_code()
        self.baseline = ResidentMemory.now()
        torch.manual_seed(0)
        self.model: Any = wrap(contestant, GPT(self.shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=assignment.learning_rate)
        ResidentMemory.forget_freed()
        self.sent_before_first_step = bytes_sent()
        self.peak_of_summons: int | None = None

    @property
    def summons(self) -> bool:
        """Whether summons are measured, and not training steps."""
        return self.assignment.what in (SUMMON, SUMMON_WRITEBACK)

    def run(self, steps: int) -> dict[str, object]:
        """Train ``steps`` steps; or train one, whose time does not count, and summon so often."""
        if self.summons:
            _, loss = self.train()
            return {"seconds": self.summon(steps), "losses": [loss]}
        seconds, losses = zip(*(self.train() for _ in range(steps)), strict=True)
        return {"seconds": seconds, "losses": losses}

    def train(self) -> tuple[float, float]:
        """Seconds of one step, and its loss; ``zero_grad`` is part of the timed step, making its data is not."""
        count = self.assignment.microbatches
        first = count * self.step
        batches = [batch_of(self.shape, first + index, self.assignment.rank) for index in range(count)]
        start = time.perf_counter()
        partial = []
        for index, batch in enumerate(batches):
            with contextlib.nullcontext() if index == count - 1 else self.model.no_sync():
                loss = next_token_loss(self.model, batch) / count
                loss.backward()
            partial.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        self.step += 1
        return seconds, sum(loss.item() for loss in partial)

    def summon(self, times: int) -> list[float]:
        """Seconds of each: all units' full parameters are there, and gone again. Memory is that of this part only."""
        writeback = self.assignment.what == SUMMON_WRITEBACK
        ResidentMemory.reset_peak()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            with type(self.model).summon_full_params(self.model, writeback=writeback):
                pass
            seconds.append(time.perf_counter() - start)
        peak = ResidentMemory.peak()
        if peak is not None:
            self.peak_of_summons = max(peak, self.peak_of_summons or 0)
        return seconds

    def memory(self) -> dict[str, object]:
        """Resident memory in bytes, and what a training step sent, warm-up included."""
        sent, before = bytes_sent(), self.sent_before_first_step
        per_step = None
        if not self.summons and sent is not None and before is not None:
            per_step = (sent - before) // max(1, self.step)
        return {
            "baseline": self.baseline,
            "peak": self.peak_of_summons if self.summons else ResidentMemory.peak(),
            "resting": ResidentMemory.now(),
            "sent_per_step": per_step,
        }


if __name__ == "__main__":
    given = WrapperAssignment(**json.loads(sys.argv[1]))
    serve(given.threads, lambda: Trainer(given))
