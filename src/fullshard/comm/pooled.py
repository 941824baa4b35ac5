"""Collectives in memory that the network can access without a copy.

There are two kinds: memory that a process group's backend allocates (NCCL registers it), and symmetric memory, which
all ranks can access. ``CustomTransport`` uses both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from fullshard.comm.collective import all_gather_single, reduce_scatter_single
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
    """Allocates from the memory pool of a process group; ordinary memory if its backend has none.

    Args:
        group: Group that the collective will run on.
    """

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message, from the pool of the backend if it has one.

        Args:
            size: Shape of the tensor to return.
            dtype: Dtype of the tensor.
            device: Device of the tensor.

        Returns:
            A tensor of that shape, dtype and device.
        """
        backend = self.group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(tuple(size), dtype=dtype, device=device)
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(tuple(size))


class ProcessGroupMemoryAllGather(ProcessGroupMemory, AllGather):
    """The process group's all-gather, in memory that its backend allocates."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather with the group's backend; arguments as for ``AllGather``."""
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ProcessGroupMemoryReduceScatter(ProcessGroupMemory, ReduceScatter):
    """The process group's reduce-scatter, in memory that its backend allocates."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter with the group's backend; arguments as for ``ReduceScatter``."""
        return reduce_scatter_single(output_tensor, input_tensor, op, group=group, async_op=async_op)


class SymmetricMemory:
    """Allocates symmetric memory, which all ranks of a group can access.

    To make memory known to all ranks is a collective and slow, so memory is kept for the life of this object and reused
    for messages of the same size and dtype after it was released. The engine releases memory at the same places on all
    ranks, so all ranks reuse or create memory at the same time. (The lifetimes of tensors would not do: they may differ
    between ranks.)

    Args:
        group: The ranks. Constructing this object is a collective over them.
        backend: Only ``"NCCL"``.

    Raises:
        ValueError: If ``backend`` is not ``"NCCL"``, or if the group does not use NCCL on a CUDA device.
    """

    group: dist.ProcessGroup
    _free: dict[tuple[int, torch.dtype], list[torch.Tensor]]  # flat, released; by size and dtype

    def __init__(self, group: dist.ProcessGroup, backend: str = "NCCL") -> None:
        if backend != "NCCL":
            raise ValueError(f'symmetric memory: expected backend="NCCL", found {backend!r}')
        backends = dist.get_backend_config(group)
        if not torch.cuda.is_available() or "cuda:nccl" not in backends:
            raise ValueError(
                "symmetric memory: expected a CUDA device and a process group with the NCCL backend, found "
                + (backends if torch.cuda.is_available() else "no CUDA device")
            )
        self.group, self._free = group, {}
        import torch.distributed._symmetric_memory as symmetric  # half a second; hardly anyone needs it

        symmetric.set_backend("NCCL")
        # Without a communicator there is nothing to register memory with, and NCCL makes it at the first collective.
        dist.barrier(group=group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return symmetric memory for a message. A collective unless memory is reused.

        Args:
            size: Shape of the tensor to return.
            dtype: Dtype of the tensor.
            device: Device of the tensor.

        Returns:
            A tensor of that shape, dtype and device.
        """
        numel = math.prod(size)
        free = self._free.get((numel, dtype))
        memory = free.pop() if free else self._make(numel, dtype, device)
        return memory.view(tuple(size))

    def release(self, memory: torch.Tensor) -> None:
        """Make ``memory`` available for other messages.

        Args:
            memory: Tensor that ``allocate`` returned.
        """
        self._free.setdefault((memory.numel(), memory.dtype), []).append(memory.view(-1))

    def _make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric

        tensor: torch.Tensor = symmetric.empty((numel,), dtype=dtype, device=device)
        symmetric.rendezvous(tensor, self.group.group_name)
        return tensor


class SymmetricMemoryAllGather(SymmetricMemory, AllGather):
    """NCCL's all-gather in symmetric memory, in place: NCCL then uses a copy engine or a symmetric kernel."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather from and into symmetric memory; arguments as for ``AllGather``."""
        own = output_tensor.narrow(0, group.rank() * input_tensor.numel(), input_tensor.numel())
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)  # both ends have to be symmetric
        return all_gather_single(output_tensor, own, group=group, async_op=async_op)


class SymmetricMemoryReduceScatter(SymmetricMemory, ReduceScatter):
    """NCCL's reduce-scatter in symmetric memory; its symmetric kernels support sums only."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter in symmetric memory; arguments as for ``ReduceScatter``.

        Returns:
            None, because the result is always ready for the current stream.
        """
        # Both ends have to be symmetric, and the output is a gradient that outlives the message.
        output = self.allocate(output_tensor.shape, dtype=output_tensor.dtype, device=output_tensor.device)
        reduce_scatter_single(output, input_tensor, op, group=group)
        output_tensor.copy_(output)
        self.release(output)
        return None
