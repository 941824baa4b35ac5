"""The ranks of a run: who this process is, and the few small collectives beside the engine's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.train.meeting import agent_store, meet, own_store


@dataclass(frozen=True)
class Group:
    """This process among the ranks of a run.

    Attributes:
        rank: this process, from 0 over all nodes.
        size: number of ranks.
        device: where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> Group:
        """Initialise the default process group from torch elastic's environment.

        Args:
            device: "cpu" (gloo), "cuda" (NCCL, one GPU per local rank), or "auto": "cuda" where this node has
                a GPU for each of its ranks.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_size else "cpu"
        if device == "cuda":
            if torch.cuda.device_count() < local_size:
                raise ValueError(
                    f"device cuda needs one GPU per rank: found {torch.cuda.device_count()} GPUs for "
                    f"{local_size} ranks on this node; use fewer ranks or --device cpu"
                )
            own = torch.device("cuda", local_rank)
            torch.cuda.set_device(own)
            _initialise("nccl", own)
        else:
            own = torch.device("cpu")
            _initialise("gloo", None)
        return cls(dist.get_rank(), dist.get_world_size(), own)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def processes_here(self) -> list[int]:
        """Process ids of the other ranks of this node, as torch elastic numbers nodes. A collective."""
        found = self.gather((os.environ.get("GROUP_RANK"), os.getpid()))
        node = found[self.rank][0]
        return [process for other, process in found if other == node and process != os.getpid()] if node else []

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def sum(self, *values: float) -> list[float]:
        """Sum each value over ranks, in float64; the same on every rank."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small picklable `value`, in rank order, on every rank."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered


def _initialise(backend: str, device: torch.device | None) -> None:
    store = agent_store()
    if store is None:
        dist.init_process_group(backend, device_id=device)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = own_store(meet(store, rank, size), rank, os.environ["MASTER_ADDR"])
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, device_id=device)
