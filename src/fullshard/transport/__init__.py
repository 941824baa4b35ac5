"""Transports: how a bucket's gather and reduce become messages on a given back end."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from fullshard.transport.base import Collective, Division, Move, Parcel, Transport, record
from fullshard.transport.collective import CollectiveTransport, NcclTransport
from fullshard.transport.custom import AllGather, Comm, CustomTransport, ReduceScatter
from fullshard.transport.gloo import GlooTransport
from fullshard.transport.pooled import (
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
)

__all__ = [
    "AllGather",
    "Collective",
    "CollectiveTransport",
    "Comm",
    "CustomTransport",
    "Division",
    "GlooTransport",
    "Move",
    "NcclTransport",
    "Parcel",
    "ProcessGroupMemoryAllGather",
    "ProcessGroupMemoryReduceScatter",
    "ReduceScatter",
    "SymmetricMemoryAllGather",
    "SymmetricMemoryReduceScatter",
    "Transport",
    "make_transport",
    "record",
]

_reduce_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def make_transport(group: dist.ProcessGroup, device: torch.device, *, reduces: bool = True) -> Transport:
    """The transport for the back end that ``group`` uses on ``device``. Call it on all ranks of the group.

    Args:
        group: The ranks.
        device: Where the tensors are.
        reduces: Whether :meth:`Transport.reduce` will be used. On NCCL that makes a second communicator, once per
            group; a transport for all-reduces only can do without.
    """
    backend = group._get_backend(device).name().lower()
    if backend == "nccl":
        return NcclTransport(group, _make_reduce_group(group) if reduces and group.size() > 1 else None)
    if backend == "gloo" and device.type == "cpu":
        return GlooTransport(group)
    return CollectiveTransport(group)  # also gloo's: it stages device memory in its collectives, not in send and recv


def _make_reduce_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The same ranks with another communicator; the one made before if there is one.

    None where it would be of no use, and reductions share the group's. If the job's communicators are split off that
    of all ranks (which is so when init_process_group got a device_id), all ranks of the job would have to take part,
    not only those of the group. And a new group sorts its ranks, so that they would get each other's pieces if those
    of ``group`` are in another order.
    """
    world, ranks = dist.group.WORLD, dist.get_process_group_ranks(group)
    assert world is not None
    if ranks != sorted(ranks) or (world.bound_device_id is not None and len(ranks) < world.size()):
        return None
    if group not in _reduce_groups:
        _reduce_groups[group] = dist.new_group(
            ranks, backend="nccl", use_local_synchronization=True, group_desc="fullshard reduce"
        )
    return _reduce_groups[group]
