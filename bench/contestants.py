"""The contestants: fullshard and its peers, each applied to a model as its own documentation recommends.

FSDP1 on CPU needs no patch: without ``device_id`` it raises "FSDP needs a non-CPU accelerator device";
with ``device_id=torch.device("cpu")`` it takes ``torch.cpu`` as its device module and trains (torch 2.13).
Its gather is then a blocking ``all_gather`` into chunks of the flat parameter, its own path for CPU tensors,
so it overlaps nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

UNSHARDED, DDP, FSDP1, FSDP2, FULLSHARD = "unsharded", "ddp", "fsdp1", "fsdp2", "fullshard"
# Where each finds its fully_shard and the policies that go with it.
COMPOSABLE = {FSDP2: "torch.distributed.fsdp", FULLSHARD: "fullshard"}

# glibc reads these when a process starts: never return freed memory to the kernel, so that the next step does
# not fault the same pages in again. fullshard may choose as much for its own process; given to the peers too,
# it shows how much of a gain is the allocator's.
KEEP_FREED_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
# Removed from every contestant's environment before its own are added.
GOVERNED_VARIABLES = (*KEEP_FREED_MEMORY, "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "FULLSHARD_KEEP_FREED_MEMORY")


@dataclass(frozen=True)
class Contestant:
    """A system and the environment variables its processes are started with."""

    name: str
    system: str
    environment: Mapping[str, str] = field(default_factory=dict)


CONTESTANTS: tuple[Contestant, ...] = (
    Contestant("unsharded", UNSHARDED),
    Contestant("ddp", DDP),
    Contestant("fsdp1", FSDP1),
    Contestant("fsdp1+malloc", FSDP1, KEEP_FREED_MEMORY),
    Contestant("fsdp2", FSDP2),
    Contestant("fsdp2+malloc", FSDP2, KEEP_FREED_MEMORY),
    Contestant("fullshard", FULLSHARD),
    Contestant("fullshard-malloc", FULLSHARD, {"FULLSHARD_KEEP_FREED_MEMORY": "0"}),
)


def contestant_named(name: str) -> Contestant:
    for contestant in CONTESTANTS:
        if contestant.name == name:
            return contestant
    raise ValueError(f"unknown contestant {name!r}; known are {', '.join(c.name for c in CONTESTANTS)}")


def process_environment(contestant: Contestant, threads: int) -> dict[str, str]:
    """The environment of a contestant's processes: this one's, less what would favour one of them."""
    kept = {name: value for name, value in os.environ.items() if name not in GOVERNED_VARIABLES}
    network = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**kept, **network, "OMP_NUM_THREADS": str(threads), **contestant.environment}


def start_fake_group(ranks: int) -> None:
    """Become rank 0 of a group whose collectives return at once without moving anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def prepare(system: str) -> None:
    """Import what the system needs, so that its code is loaded before a memory baseline is taken."""
    if system == DDP or system in (FSDP1, FSDP2):
        pass
    elif system == FULLSHARD:
        import fullshard  # noqa: F401


def distribute(system: str, model: nn.Module, unit_type: type[nn.Module], device: torch.device) -> nn.Module:
    """Apply ``system`` to ``model`` over the default group: every ``unit_type`` a unit, and the root."""
    if system == UNSHARDED:
        return model
    if system == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if system == FSDP1:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({unit_type})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    if system not in COMPOSABLE:
        raise ValueError(f"unknown system {system!r}")
    shard_units(system, model, unit_type, init_device_mesh(device.type, (dist.get_world_size(),)))
    return model


def shard_units(system: str, model: nn.Module, unit_type: type[nn.Module], mesh: DeviceMesh, **options: Any) -> None:
    """Call the system's ``fully_shard`` with the same options on every ``unit_type``, then on the root."""
    fully_shard = importlib.import_module(COMPOSABLE[system]).fully_shard
    for module in model.modules():
        if isinstance(module, unit_type):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
