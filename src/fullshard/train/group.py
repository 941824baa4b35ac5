"""The ranks of a run, with the few small collectives beside the engine's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fullshard.ranks import agreement
from fullshard.train.config import ConfigError

CPU_RANKS = 2  # ranks on a machine without accelerators
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
            device: what :func:`choose` takes. The back end is the one that c10d names for the type of device.

        Raises:
            ValueError: this node has no such devices, or fewer than ranks.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        try:
            kind, _ = choose(device, local_size)
        except ConfigError as error:
            raise ValueError(str(error)) from None  # which every rank reports: other nodes may have such devices
        own = torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank)
        if kind != "cpu":
            torch.accelerator.set_device_index(local_rank)
        _initialize(dist.get_default_backend_for_device(kind), None if kind == "cpu" else own)
        return cls(dist.get_rank(), dist.get_world_size(), own)

    @property
    def leads(self) -> bool:
        """True on rank 0, which prints and writes files."""
        return self.rank == 0

    def processes_here(self) -> list[int]:
        """Return the process ids of the other ranks of this node, as torch elastic numbers nodes. A collective."""
        node, own = os.environ.get("GROUP_RANK"), os.getpid()
        return [process for other, process in self.gather((node, own)) if other == node and process != own]

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def sum(self, *values: float) -> list[float]:
        """All-reduce each value in float64; the same on every rank."""
        own = torch.tensor(values, dtype=torch.float64).view(torch.uint8).to(self.device)  # some know no float64
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        total: list[float] = torch.stack(parts).cpu().view(torch.float64).sum(0).tolist()
        return total

    def gather(self, value: T) -> list[T]:
        """Return every rank's small picklable `value`, in rank order, on every rank."""
        return list(agreement.gather(value, None).values())

    def from_rank0(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on rank 0, on every rank.

        Raises:
            ConfigError: on all ranks, if `make` raises that or an `OSError`.
        """
        made, problem = None, ""
        if self.leads:
            try:
                made = make()
            except (ConfigError, OSError) as error:
                problem = str(error)
        made, problem = self.gather((made, problem))[0]
        if problem:
            raise ConfigError(problem)
        return made  # type: ignore[return-value]


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
            f"{wanted!r}. Others need a torch with support for them and for process groups on them"
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


def _initialize(backend: str, device: torch.device | None) -> None:
    """Initialize the process group of this start.

    [Note: Stores of torchrun]
    Unless it is told otherwise, torchrun keeps one store for all of its starts, and torch (as of 2.13) uses the same
    keys in each, so that ranks which were started anew would wait at the addresses of killed ones. On one node the
    number of restarts tells the starts apart. Nodes count them each for itself, so that on several torchrun has to be
    told.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, device_id=device)
        return
    nodes, restarts = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if nodes != "1" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ValueError(
            "torchrun --max-restarts on several nodes needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment "
            "and --rdzv-backend c10d: otherwise restarted ranks find addresses of killed ones"
        )
    store, rank, size = next(rendezvous("env://"))
    own = PrefixStore(f"start-{restarts}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, device_id=device)
