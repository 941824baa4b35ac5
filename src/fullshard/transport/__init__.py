"""Transports: how a bucket's gather and reduce become messages on a given back end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.transport.base import Collective, Division, Move, Parcel, Transport, issue_all, launch_all, record
from fullshard.transport.collective import CollectiveTransport, NcclTransport
from fullshard.transport.custom import AllGather, Comm, CustomTransport, ReduceScatter
from fullshard.transport.gloo import GlooTransport
from fullshard.transport.groups import part_of
from fullshard.transport.hooked import HookedTransport
from fullshard.transport.pooled import (
    ProcessGroupMemoryAllGather,
    ProcessGroupMemoryReduceScatter,
    SymmetricMemoryAllGather,
    SymmetricMemoryReduceScatter,
)
from fullshard.transport.python_group import PythonGroupTransport

__all__ = [
    "AllGather",
    "Collective",
    "CollectiveTransport",
    "Comm",
    "CustomTransport",
    "Division",
    "GlooTransport",
    "HookedTransport",
    "Move",
    "NcclTransport",
    "Parcel",
    "ProcessGroupMemoryAllGather",
    "ProcessGroupMemoryReduceScatter",
    "PythonGroupTransport",
    "ReduceScatter",
    "SymmetricMemoryAllGather",
    "SymmetricMemoryReduceScatter",
    "Transport",
    "issue_all",
    "launch_all",
    "make_transport",
    "part_of",
    "record",
]


def make_transport(group: dist.ProcessGroup, device: torch.device, *, reduces: bool = True) -> Transport:
    """The transport for the back end that ``group`` uses on ``device``. Call it on all ranks of the group.

    Args:
        group: The ranks. A subclass of ``torch.distributed.ProcessGroup`` may be its own back end.
        device: Where the tensors are.
        reduces: Whether :meth:`Transport.reduce` will be used. On NCCL that makes a second communicator, once per
            group; a transport for all-reduces only can do without.

    Raises:
        RuntimeError: If the group has no back end for the device.
    """
    try:
        backend = group._get_backend(device).name().lower()
    except RuntimeError:
        if type(group) is dist.ProcessGroup:  # which has back ends, but none for this device
            raise
        return PythonGroupTransport(group)
    if backend == "nccl":
        return NcclTransport(group, _make_reduce_group(group) if reduces and group.size() > 1 else None)
    if backend == "gloo" and device.type == "cpu":
        return GlooTransport(group)
    return CollectiveTransport(group)  # also gloo's: it stages device memory in its collectives, not in send and recv


def _make_reduce_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The same ranks with another communicator; None, so that reductions share the group's, if these are not in order:
    a new group sorts its ranks, and they would get each other's pieces.
    """
    ranks = dist.get_process_group_ranks(group)
    return part_of(group, ranks, "reduce") if ranks == sorted(ranks) else None
