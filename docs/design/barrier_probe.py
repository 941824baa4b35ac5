"""What ranks are told if one does not arrive: monitored_barrier beside rank_barrier; ranks.md quotes the output.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 docs/design/barrier_probe.py
"""

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from fullshard.ranks.barrier import rank_barrier

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
TIMEOUT_S, GROUP_TIMEOUT_S, TURNS = 2, 6, 100
os.environ.update(FULLSHARD_WATCHDOG_S="0", FULLSHARD_STEP_TIMEOUT_S=str(TIMEOUT_S))


def monitored(group: dist.ProcessGroup) -> None:
    dist.monitored_barrier(group, timeout=timedelta(seconds=TIMEOUT_S), wait_all_ranks=True)


def ours(_: dist.ProcessGroup) -> None:
    with rank_barrier("save /a"):
        pass


def new_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))


def say(text: str) -> None:
    for rank in range(RANKS):
        if rank == RANK:
            print(text, flush=True)
        dist.barrier()


def outcome(what: str, enter: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup) -> str:
    start = time.monotonic()
    try:
        enter(group)
        told = "passed"
    except RuntimeError as error:
        told = f"{str(error)[:150]!r}"
    return f"    {what:8} rank {RANK} {time.monotonic() - start:5.2f} s  {told}"


for enter in (monitored, ours):
    group = new_group()
    enter(group)
    dist.barrier()
    start = time.monotonic()
    for _ in range(TURNS):
        enter(group)
    say(f"{enter.__name__}: {(time.monotonic() - start) / TURNS * 1e3:.2f} ms")
    for absent in (2, 0):
        group = new_group()
        enter(group)
        dist.barrier()
        lines = [outcome("missing", enter, group)] if absent != RANK else []
        dist.barrier()
        lines += [outcome("late", enter, group)] if absent == RANK else []
        dist.barrier()
        lines.append(outcome("next", enter, group))
        dist.barrier()
        say(f"  rank {absent} is late\n" + "\n".join(lines))
os._exit(0)  # the groups are broken
