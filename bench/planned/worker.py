"""One rank that runs configurations of a plan, with every allocation recorded."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.contestants import start_fake_group
from bench.memory_limit.ledger import mark, range_of, recorded
from bench.models import batch_of, next_token_loss
from bench.planned.cases import Case
from bench.turns import reason_of
from bench.worker import join_group
from fullshard.progress import PROGRESS, Event

PLACE = "place"
MEASURED = "measured step"
WARMUP_STEPS = 2
PHASES = ("forward", "backward", "the end of backward", "optimizer step")


class Worker:
    """Runs cases."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Peak of the last of three steps, its place, and bytes at rest; or why there is none."""
        try:
            return _run(Case(**case), self.rank)
        except Exception as error:
            return {"error": reason_of(error)}
        finally:
            gc.collect()

    def time(self, case: dict[str, Any], steps: int) -> dict[str, Any]:
        """Seconds of each of some steps, after two others; or why there are none."""
        try:
            return {"seconds": list(_times(Case(**case), self.rank, steps))}
        except Exception as error:
            return {"error": reason_of(error)}
        finally:
            gc.collect()


def _times(case: Case, rank: int, steps: int) -> Iterator[float]:
    torch.manual_seed(0)
    model, optimizer = case.build("cpu")
    batches = [batch_of(case.shape, step, rank) for step in range(WARMUP_STEPS + steps)]
    for number, batch in enumerate(batches):
        dist.barrier()
        begun = time.perf_counter()
        _step(model, optimizer, batch, case.microbatches)
        if number >= WARMUP_STEPS:
            yield time.perf_counter() - begun


def _mark_place(event: Event, _: object) -> None:
    if event.group < 0:
        mark(f"{PLACE}|{event.kind}|{event.what}")


def _run(case: Case, rank: int) -> dict[str, Any]:
    batches = [batch_of(case.shape, step, rank) for step in range(WARMUP_STEPS + 1)]
    with recorded() as ledger:
        torch.manual_seed(0)
        model, optimizer = case.build("cpu")
        gc.collect()
        for batch in batches[:-1]:
            _step(model, optimizer, batch, case.microbatches)
        gc.collect()
        with PROGRESS.observed(_mark_place), range_of(MEASURED):
            _step(model, optimizer, batches[-1], case.microbatches)
    span = ledger.span(MEASURED)
    moment, nbytes = ledger.peak(span.begin, span.end)
    place = ("forward", "")
    for each in ledger.spans:
        if each.name.startswith(PLACE) and each.begin <= moment:
            _, phase, unit = each.name.split("|")
            if phase in ("forward", "backward", "the end of backward", "optimizer step") or phase.startswith(
                "user code"
            ):
                place = phase, unit
    resting = sum(block.nbytes for block in ledger.alive(span.begin))
    return {"peak": nbytes, "place": place, "resting": resting}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, microbatches: int) -> None:
    for _ in range(microbatches):
        next_token_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def build(ranks: int, rank: int = 0, store: str = "", threads: int = 1) -> Worker:
    """Make rank 0 of a fake group if there is no file where ranks meet."""
    torch.set_flush_denormal(True)
    if store:
        join_group(rank, ranks, store)
    else:
        start_fake_group(ranks)
    return Worker(rank)
