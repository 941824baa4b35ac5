"""Process groups of meshes, and of saves and loads, with a separate communicator for coordination."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from fullshard.comm import part_of
from fullshard.comm.mesh import ShardMesh
from fullshard.ranks.agreement import resolve_group
from fullshard.ranks.barrier import step_timeout

__all__ = ["coordination_group", "data_parallel_groups", "groups_of"]


def data_parallel_groups(mesh: ShardMesh) -> list[dist.ProcessGroup]:
    """Return the process groups of the shard and of the replicate axis that have more than one rank, in this order."""
    return [axis.get_group() for axis in (mesh.shard, mesh.replicate) if axis is not None and axis.size() > 1]


def groups_of(meshes: Iterable[ShardMesh]) -> list[dist.ProcessGroup]:
    """Return the ``data_parallel_groups`` of several meshes, each once."""
    return list(dict.fromkeys(group for mesh in meshes for group in data_parallel_groups(mesh)))


def coordination_group(group: dist.ProcessGroup | None, *, background: bool = False) -> dist.ProcessGroup | None:
    """Return the group in which ranks plan saves and loads: a gloo group of the same ranks. A collective.

    It is created in the first call. Training may continue in the other group meanwhile; plans do not need an
    accelerator; and its timeout is that of saving, where ranks may write very different amounts, and not that of a
    collective in a step. For a subset of all ranks it is the subset's own group, unless ``background`` saves require
    another one.
    """
    found = resolve_group(group)
    if found is None:
        return None
    if found is not dist.group.WORLD and not background:
        return found
    limit = timedelta(seconds=step_timeout())
    return part_of(found, dist.get_process_group_ranks(found), "checkpoint", backend="gloo", timeout=limit)
