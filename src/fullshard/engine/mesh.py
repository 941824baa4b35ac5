"""The ranks that parameters are sharded over, seen from this rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.transport import Transport, make_transport

__all__ = ["ShardMesh"]


class ShardMesh:
    """A 1-D device mesh, its process group and the transport on it. Shared by the units of one mesh."""

    device_mesh: DeviceMesh
    device: torch.device  # where this rank keeps its shards and computes
    rank: int
    world_size: int
    transport: Transport | None  # None on a single rank, where nothing ever travels

    def __init__(self, device_mesh: DeviceMesh) -> None:
        group: dist.ProcessGroup = device_mesh.get_group()
        self.device_mesh = device_mesh
        self.device = _compute_device(device_mesh.device_type)
        self.rank, self.world_size = group.rank(), group.size()
        self.transport = make_transport(group, self.device) if self.world_size > 1 else None

    @property
    def direct_bytes(self) -> int:
        """Smallest piece worth a message of its own."""
        return self.transport.direct_bytes if self.transport is not None else 0


def _compute_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
