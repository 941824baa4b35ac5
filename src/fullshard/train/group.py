"""The ranks of a run: who they are, where they compute, and how they agree."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.ranks import agreement
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
        """Initialize the default process group from torch elastic's environment.

        Args:
            device: what ``choose`` takes. The back end is the one that c10d names for the type of device.

        Raises:
            ValueError: this node has no such devices, or fewer than ranks; or torchrun may restart ranks with a store
                in which they find addresses of killed ones.
        """
        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if shares_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise ValueError(
                f"torchrun --max-restarts needs {OWN_STORE}=1 in its environment and --standalone or --rdzv-backend "
                f"c10d: otherwise restarted ranks read the addresses of killed ranks from the store, and hang"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        try:
            kind, _ = choose(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        except ConfigError as error:
            raise ValueError(str(error)) from None  # which every rank reports: other nodes may have such devices
        own = torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank)
        if kind != "cpu":
            torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(dist.get_default_backend_for_device(kind), device_id=None if kind == "cpu" else own)
        return cls(dist.get_rank(), dist.get_world_size(), own)

    def gather(self, value: T) -> list[T]:
        """Return every rank's small picklable `value`, in rank order, on every rank."""
        return list(agreement.gather(value, None).values())

    @contextlib.contextmanager
    def raised_on_all_ranks(self) -> Iterator[None]:
        """Raise a `ConfigError` or `OSError` of the `with` block on all ranks, as `ConfigError`. A collective."""
        problem = ""
        try:
            yield
        except (ConfigError, OSError) as error:
            problem = str(error)
        for rank, found in enumerate(self.gather(problem)):
            if found:
                raise ConfigError(f"rank {rank}: {found}" if self.size > 1 else found)


def choose(wanted: str, ranks: int) -> tuple[str, int]:
    """Choose the device type and the number of ranks of this machine.

    Args:
        wanted: "cpu", the type of this machine's accelerators, or "auto": those if there is one for each rank, else
            the CPU.
        ranks: number of ranks on this machine; 0: one per accelerator, or two on the CPU.

    Returns:
        The type of the device, and the number of ranks.

    Raises:
        ConfigError: this machine has no such devices, or fewer than ranks.
    """
    found, count = ("cpu", 0) if wanted == "cpu" else _accelerators()
    if wanted not in ("auto", "cpu", found):
        raise ConfigError(
            f"device must be one of {', '.join(dict.fromkeys(('auto', 'cpu', found)))} on this machine, found "
            f"{wanted!r}. Other device types need a torch build that supports them, with a process group backend"
        )
    if wanted not in ("auto", "cpu") and count < max(1, ranks):
        raise ConfigError(
            f"--device {wanted} needs one accelerator per rank: found {count} for {max(1, ranks)} ranks. "
            f"Use fewer --ranks, or --device cpu"
        )
    ranks = ranks or count or CPU_RANKS
    return (found if count >= ranks else "cpu"), ranks


def _accelerators() -> tuple[str, int]:
    """Return type and number of the accelerators that ranks of this machine can divide; "cpu" and 0 without any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.Backend.default_device_backend_map.get(found.type) if found is not None else None
    if found is None or backend is None or not dist.is_backend_available(backend):
        return "cpu", 0
    # torch's DeviceMesh calls this function, which torch.mps does not have.
    if not hasattr(torch.get_device_module(found), "is_initialized"):
        return "cpu", 0
    return found.type, torch.accelerator.device_count()
