"""The ranks of a run: who they are, where they compute, and how they agree."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.train.config import ConfigError

CPU_RANKS = 2  # ranks on a machine without accelerators
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # "1": rank 0 of each start serves a store of its own
T = TypeVar("T")


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
        """Initialize the default process group from torch elastic's environment, with c10d's back end for the device.

        Args:
            device: as for ``choose``.

        Raises:
            ValueError: torchrun may restart ranks with a store in which they read the addresses of killed ones.
        """
        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if shares_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise ValueError(
                f"torchrun --max-restarts needs {OWN_STORE}=1 in its environment and --standalone or --rdzv-backend "
                f"c10d: otherwise restarted ranks read the addresses of killed ranks from the store, and hang"
            )
        kind, _ = choose(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        own = torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        if own.index is not None:
            torch.accelerator.set_device_index(own.index)
        backend = dist.get_default_backend_for_device(kind)
        dist.init_process_group(backend, device_id=None if own.index is None else own)
        return cls(dist.get_rank(), dist.get_world_size(), own)

    def gather(self, value: T) -> list[T]:
        """Return every rank's small picklable `value`, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def raised_on_all_ranks(self) -> Iterator[None]:
        """Raise a `ConfigError` or `OSError` of the `with` block on all ranks, as `ConfigError`. A collective."""
        problem = ""
        try:
            yield
        except (ConfigError, OSError) as error:
            problem = str(error)
        for rank, text in enumerate(self.gather(problem)):
            if text:
                raise ConfigError(f"rank {rank}: {text}" if self.size > 1 else text)


def choose(wanted: str, ranks: int) -> tuple[str, int]:
    """Return the type of device on which this machine's ranks compute, and their number.

    Args:
        wanted: "cpu", or "auto": accelerators that have a process group back end, if there is one for each rank.
        ranks: number of ranks on this machine; 0: one per accelerator, or two on the CPU.
    """
    found = torch.accelerator.current_accelerator(check_available=True) if wanted == "auto" else None
    backend = dist.Backend.default_device_backend_map.get(found.type) if found is not None else None
    count = 0
    # MPS has a back end, but torch's DeviceMesh calls a function that torch.mps does not have.
    if found is not None and found.type != "mps" and backend is not None and dist.is_backend_available(backend):
        count = torch.accelerator.device_count()
    ranks = ranks or count or CPU_RANKS
    return (found.type if found is not None and 0 < ranks <= count else "cpu"), ranks
