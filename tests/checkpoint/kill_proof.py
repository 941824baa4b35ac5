"""Kills a rank at random moments of ``save``, ``async_save`` and ``load``, and looks at what is left.

    cd tests && python -m checkpoint.kill_proof 200

The other ranks have to end by themselves, and a checkpoint is whole, with the values that were saved, or none.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from ranks.rank import Rank
from watchdog_proof import ODD, STORES, Case, run_all

WIDTH, LONGEST_S = 256, 0.5


def model_of(seed: int) -> nn.Module:
    """A model whose checkpoint takes some time to write."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))


def train(rank: Rank, what: str, front_end: str, delay: float, path: str) -> str:
    """Save twice; in the second save, or in a load, rank 2 is killed after some time."""
    shard = fully_shard if front_end == "composable" else FullyShardedDataParallel
    model = shard(model_of(0))
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = fullshard.checkpoint
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    checkpoints.save(path, model, optimizer)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    torch.distributed.barrier()
    if rank.rank == ODD:
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.start()
    if what == "save":
        checkpoints.save(path, model, optimizer)
    elif what == "async_save":
        checkpoints.async_save(path, model, optimizer).result()
    else:
        for _ in range(10):
            checkpoints.load(path, model, optimizer)
    if rank.rank == ODD:
        time.sleep(LONGEST_S + 1)
    return "done"


class Kill(Case):
    """One kill."""

    def wrong_about(self, said: dict[int, str]) -> str:
        """What is wrong about what is left."""
        left = [said.get(rank) for rank in range(self.world) if rank != ODD]
        if None in left:
            return f"no word from a rank: {said}"
        path = self.folder / "own"
        model = model_of(1)
        try:
            fullshard.checkpoint.load(str(path), model)
        except fullshard.FullshardError as error:
            return f"a third state: {error}; {sorted(each.name for each in path.iterdir())}"
        found = [
            torch.allclose(parameter, value, atol=1e-5)
            for parameter, value in zip(model.parameters(), AFTER, strict=True)
        ]
        first = [
            torch.allclose(parameter, value, atol=1e-5)
            for parameter, value in zip(model.parameters(), BEFORE, strict=True)
        ]
        if not all(found) and not all(first):
            return f"it has other values than those that were saved: {found}, {first}"
        if not all(found) and left == ["done"] * len(left) and self.arguments[0] != "load":
            return "ranks say that they have saved, and it has what was saved before"
        return ""


def states() -> list[list[torch.Tensor]]:
    """The parameters after one step and after two."""
    model, found = model_of(0), []
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


BEFORE, AFTER = states()


def main() -> None:
    """Kill as often as the command line says."""
    chance = random.Random(20261128)
    kills = []
    for number in range(int(sys.argv[1])):
        what, front_end = ("save", "async_save", "load")[number % 3], ("composable", "wrapper")[number // 3 % 2]
        arguments = (what, front_end, chance.uniform(0, LONGEST_S), "FOLDER")
        name = f"{what}, {front_end}, killed after {arguments[2]:.3f} s"
        kills.append(Kill(name, train, arguments, [], 3 + number % 2, STORES[number % 3]))
    sys.exit(run_all(kills, at_once=6))


if __name__ == "__main__":
    main()
