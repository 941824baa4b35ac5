"""One rank of one contestant: builds what its module says, then answers requests; see ``bench.teams``.

Started as ``python -m bench.worker MODULE ASSIGNMENT``, the latter JSON; ``MODULE.build(**assignment)`` makes the
object that answers. A request is a line of JSON on standard input, ``{"do": method, ...}``, and the answer a line on
standard output, ``{"answer": what the method returned}`` or ``{"error": why}``. A closed input ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=120)


def join_group(rank: int, ranks: int, store: str) -> None:
    """Make the default process group that of the contestant's ranks, which meet in the file ``store``."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)


def load_training_code() -> None:
    """Train four numbers once, with a collective: torch imports parts of itself at the first step, and that
    memory is no contestant's own."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()


def serve(module: str, assignment: dict[str, Any]) -> None:
    """Build, then answer requests until the input is closed; does not return."""
    # Whatever libraries print goes to stderr; the original stdout carries answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def write(kind: str, value: Any) -> None:
        answers.write(json.dumps({kind: value}) + "\n")

    try:
        torch.set_num_threads(assignment.get("threads", 1))
        servant = importlib.import_module(module).build(**assignment)
        write("answer", "ready")
        for line in sys.stdin:
            request = json.loads(line)
            write("answer", getattr(servant, request.pop("do"))(**request))
    except Exception as error:
        traceback.print_exc()
        write("error", f"{type(error).__name__}: {error}")
        answers.flush()
        os._exit(1)  # no orderly goodbye: the other rank may be waiting in a collective
    # The process group is not destroyed: its ranks leave at different times, and nothing is left to flush.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
