"""Collectives and memory that users bring: the interfaces, and the transport that uses them.

The interfaces have the names and signatures of those in torch.distributed.fsdp, so that objects written for one serve
the other. None has to be inherited from: whatever is callable and can allocate will do.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from fullshard.comm.base import CommRequest, GradScaling, Kind, Operand, Transport, WrappingTransport, issue_all
from fullshard.comm.collective import Scaled
from fullshard.memory import Work

__all__ = ["AllGather", "Comm", "CustomTransport", "ReduceScatter"]


class Comm(ABC):
    """A collective with memory of its own choice.

    An object that wants its memory back has a method ``release(memory)`` besides. It is called, in the same order on
    all ranks, when the message in ``memory``, which ``allocate`` returned, is over.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a message: temporary, pooled or persistent, but not in use by another message in flight.

        Args:
            size: Shape of the tensor to return.
            dtype: Its element type.
            device: Where it has to be.
        """


class AllGather(Comm):
    """An all-gather of flat tensors."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

        Returns:
            The work to wait for; None if the result is there (on accelerators: for the current stream).
        """


class ReduceScatter(Comm):
    """A reduce-scatter of flat tensors."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` over all ranks with ``op``, and put this rank's part into ``output_tensor``.

        Returns:
            The work to wait for; None if the result is there (on accelerators: for the current stream).
        """


class CustomTransport(WrappingTransport):
    """A transport with some collectives replaced by the user's.

    ``direct_bytes`` is beyond any size, so that whatever a bucket sends is one packed operand in the memory that the
    user's object allocates. A launch of several requests calls the object once per operand. What is not replaced is
    left to the transport underneath.

    A reduce-scatter is asked for AVG where the group is NCCL's and that is all of the scaling; else for SUM, with
    multiplications ahead and afterwards.

    Args:
        base: The group's own transport.
        all_gather: Replaces all-gathers.
        reduce_scatter: Replaces reduce-scatters.

    Raises:
        TypeError: An object is not callable or has no ``allocate``.
    """

    direct_bytes: int = sys.maxsize

    custom_all_gather: AllGather | None
    custom_reduce_scatter: ReduceScatter | None

    def __init__(
        self,
        base: Transport,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ) -> None:
        super().__init__(base)
        for role, comm in (("all-gather", all_gather), ("reduce-scatter", reduce_scatter)):
            if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
                raise TypeError(
                    f"custom {role}: expected a callable object with a method allocate(size, *, dtype, device), as in "
                    f"fullshard.Comm; found {type(comm).__name__}"
                )
        self.custom_all_gather, self.custom_reduce_scatter = all_gather, reduce_scatter

    def allocate(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Memory from the user's object; None for a collective that is not replaced.

        Raises:
            ValueError: It returned a tensor of another size, dtype or device.
        """
        comm = self.custom_all_gather if kind == "all_gather" else self.custom_reduce_scatter
        if comm is None:
            return None
        memory = comm.allocate((numel,), dtype=dtype, device=device)
        if memory.numel() != numel or memory.dtype is not dtype or memory.device.type != device.type:
            raise ValueError(
                f"{type(comm).__name__}.allocate: expected {numel} elements of {dtype} on {device}, "
                f"found {memory.numel()} of {memory.dtype} on {memory.device}"
            )
        return memory.view(-1)

    def release(self, kind: Kind, memory: torch.Tensor) -> None:
        """Tell the user's object, if it wants to know."""
        comm = self.custom_all_gather if kind == "all_gather" else self.custom_reduce_scatter
        release = getattr(comm, "release", None)
        if release is not None:
            release(memory)

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        all_gather = self.custom_all_gather
        if all_gather is None:
            return self.base._all_gather(requests)

        def issue(operand: Operand) -> Sequence[Work]:
            work = all_gather(
                output_tensor=operand.unsharded, input_tensor=operand.shard, group=self.group, async_op=True
            )
            return [] if work is None else [work]

        return issue_all(partial(issue, operand) for request in requests for operand in request.operands)

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        reduce_scatter = self.custom_reduce_scatter
        if reduce_scatter is None:
            return self.base._reduce_scatter(requests)

        return issue_all(
            partial(self._issue, reduce_scatter, operand, request.scaling)
            for request in requests
            for operand in request.operands
        )

    def _issue(self, reduce_scatter: ReduceScatter, operand: Operand, scaling: GradScaling) -> Sequence[Work]:
        averages = self.base.averages and scaling.native and scaling.before == 1 and scaling.after == self.world_size
        if scaling.before != 1:
            operand.unsharded.mul_(1 / scaling.before)
        work = reduce_scatter(
            output_tensor=operand.shard,
            input_tensor=operand.unsharded,
            group=self.base.reduce_group,
            op=ReduceOp.AVG if averages else ReduceOp.SUM,
            async_op=True,
        )
        if work is not None and (averages or scaling.after == 1):
            return [work]
        if work is not None:
            return [Scaled(work, [(operand.shard, 1 / scaling.after)])]
        if not averages and scaling.after != 1:
            operand.shard.mul_(1 / scaling.after)
        return []
