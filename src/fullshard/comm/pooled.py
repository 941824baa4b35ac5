"""Collectives whose messages lie in memory that the network reaches without a copy.

Two kinds: what a process group's back end allocates itself (NCCL registers it), and symmetric memory, which is at the
same place on all ranks. Both are used through :class:`~fullshard.comm.custom.CustomTransport`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from fullshard.comm.collective import all_gather_base, reduce_scatter_base
from fullshard.comm.custom import AllGather, ReduceScatter

__all__ = [
    "ProcessGroupMemory",
    "ProcessGroupMemoryAllGather",
    "ProcessGroupMemoryReduceScatter",
    "SymmetricMemory",
    "SymmetricMemoryAllGather",
    "SymmetricMemoryReduceScatter",
]


class ProcessGroupMemory:
    """Allocates from the memory pool of a process group, and as usual where its back end has none.

    Args:
        group: Whose back end is asked; the group that the collective will run on.
    """

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a message from the pool of the back end."""
        backend = self.group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(tuple(size), dtype=dtype, device=device)
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(tuple(size))


class ProcessGroupMemoryAllGather(ProcessGroupMemory, AllGather):
    """The process group's own all-gather, in its own memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather with the group's back end."""
        return _started(all_gather_base(group, output_tensor, input_tensor, async_op=async_op), async_op)


class ProcessGroupMemoryReduceScatter(ProcessGroupMemory, ReduceScatter):
    """The process group's own reduce-scatter, in its own memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter with the group's back end."""
        return _started(reduce_scatter_base(group, output_tensor, input_tensor, op, async_op=async_op), async_op)


class SymmetricMemory:
    """Allocates memory that all ranks of a group know of each other.

    Making ranks know each other's memory is a collective and slow, so what was made is kept for the life of this
    object and used again for messages of the same size and dtype, once it was released. Releases come from the
    engine at the same places on all ranks, so all of them reuse, or make, memory at the same time; when a rank's
    last reference to a tensor goes would not do.

    Args:
        group: The ranks. Constructing this is a collective over them.
        backend: Only "NCCL".

    Raises:
        ValueError: Another back end was asked for, or the group is not NCCL's on a CUDA device.
    """

    group: dist.ProcessGroup
    _free: dict[tuple[int, torch.dtype], list[torch.Tensor]]  # flat, released; by size and dtype

    def __init__(self, group: dist.ProcessGroup, backend: str = "NCCL") -> None:
        if backend != "NCCL":
            raise ValueError(f'symmetric memory: expected backend="NCCL", found {backend!r}')
        found = _cuda_backend(group)
        if found != "nccl":
            raise ValueError(
                "symmetric memory: expected a CUDA device and a process group with the NCCL backend, found "
                + ("no CUDA device" if found is None else found)
            )
        self.group, self._free = group, {}
        import torch.distributed._symmetric_memory as symmetric  # half a second; hardly anyone needs it

        symmetric.set_backend("NCCL")
        # Without a communicator there is nothing to register memory with, and NCCL makes it at the first collective.
        dist.barrier(group=group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a message that all ranks know of. A collective unless memory is used again."""
        numel = math.prod(size)
        free = self._free.get((numel, dtype))
        memory = free.pop() if free else self._make(numel, dtype, device)
        return memory.view(tuple(size))

    def release(self, memory: torch.Tensor) -> None:
        """Use ``memory``, which :meth:`allocate` returned, for other messages."""
        self._free.setdefault((memory.numel(), memory.dtype), []).append(memory.view(-1))

    def _make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric

        tensor: torch.Tensor = symmetric.empty((numel,), dtype=dtype, device=device)
        symmetric.rendezvous(tensor, self.group.group_name)
        return tensor


class SymmetricMemoryAllGather(SymmetricMemory, AllGather):
    """NCCL's all-gather in symmetric memory, in place: NCCL then picks a copy engine or a symmetric kernel."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather from, and into, symmetric memory."""
        own = output_tensor.narrow(0, group.rank() * input_tensor.numel(), input_tensor.numel())
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)  # both ends have to be symmetric
        return _started(all_gather_base(group, output_tensor, own, async_op=async_op), async_op)


class SymmetricMemoryReduceScatter(SymmetricMemory, ReduceScatter):
    """NCCL's reduce-scatter in symmetric memory, which it is good at for sums only."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter in symmetric memory. Always done for the current stream: returns None."""
        # Both ends have to be symmetric, and the output is a gradient that outlives the message.
        output = self.allocate(output_tensor.shape, dtype=output_tensor.dtype, device=output_tensor.device)
        reduce_scatter_base(group, output, input_tensor, op, async_op=False).wait()
        output_tensor.copy_(output)
        self.release(output)
        return None


def _started(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _cuda_backend(group: dist.ProcessGroup) -> str | None:
    """Return the backend that ``group`` uses for CUDA tensors, in lower case; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    try:
        return group._get_backend(torch.device("cuda")).name().lower()
    except RuntimeError:  # the group has none for CUDA
        return "a process group for CPU tensors only"
