"""Transports carry out the all-gathers and reductions of a bucket on a given backend and mesh axis.

- ``base.py``         the interface: operands, requests, scaling; recording of collectives; a single rank
- ``gloo.py``, ``collective.py``  gloo, and all other backends: NCCL, groups written in Python
- ``group_costs.py``  which shards NCCL sends packed
- ``custom.py``       custom collectives and communication hooks of users
- ``pooled.py``       custom collectives in memory of NCCL's
- ``quantized/``      quantized communication, for slow networks
- ``mesh.py``         the axes of a mesh with their transports; ``groups.py``  subgroups of a process group
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.base import (
    Collective,
    CommRequest,
    GradScaling,
    Operand,
    SingleRankTransport,
    Slice,
    Transport,
    launch_all,
    record,
    slices_of,
)
from fullshard.comm.collective import CollectiveTransport, NcclTransport, PythonGroupTransport
from fullshard.comm.custom import AllGather, Comm, CustomTransport, HookedTransport, ReduceScatter
from fullshard.comm.gloo import GlooTransport
from fullshard.comm.groups import part_of
from fullshard.comm.pooled import (
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
    "CommRequest",
    "CustomTransport",
    "GlooTransport",
    "GradScaling",
    "HookedTransport",
    "NcclTransport",
    "Operand",
    "ProcessGroupMemoryAllGather",
    "ProcessGroupMemoryReduceScatter",
    "PythonGroupTransport",
    "ReduceScatter",
    "SingleRankTransport",
    "Slice",
    "SymmetricMemoryAllGather",
    "SymmetricMemoryReduceScatter",
    "Transport",
    "launch_all",
    "make_transport",
    "part_of",
    "record",
    "slices_of",
]


def make_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Create the transport for the backend that ``group`` uses on ``device``. Call it on all ranks of the group.

    Args:
        group: The ranks. A subclass of ``torch.distributed.ProcessGroup`` may be its own backend.
        device: Device of the tensors.

    Returns:
        A transport for the group's backend; ``SingleRankTransport`` for a group of one rank.

    Raises:
        RuntimeError: If the group has no backend for the device.

    Example:
        ```python
        import torch
        import torch.distributed as dist

        from fullshard.comm import CommRequest, Operand, make_transport

        accelerator = torch.accelerator.current_accelerator()
        device = torch.device("cpu") if accelerator is None else accelerator
        transport = make_transport(dist.group.WORLD, device)
        shard = torch.full((2,), float(dist.get_rank()), device=device)
        unsharded = torch.empty(2 * dist.get_world_size(), device=device)
        for work in transport.all_gather([CommRequest("example", [Operand(shard, unsharded)])]):
            work.wait()
        ```
    """
    if group.size() == 1:
        return SingleRankTransport()
    try:
        backend = group._get_backend(device).name().lower()
    except RuntimeError:
        if type(group) is dist.ProcessGroup:  # which has backends, but none for this device
            raise
        return PythonGroupTransport(group)
    if backend == "nccl":
        return NcclTransport(group)
    if backend == "gloo" and device.type in ("cpu", "meta"):
        return GlooTransport(group)
    return CollectiveTransport(group)  # also gloo's: it stages device memory in its collectives, not in send and recv
