"""Collectives that users bring: custom collectives with memory of their own, and communication hooks.

The interfaces of custom collectives have the names and signatures of those in torch.distributed.fsdp, so that objects
written for one work with the other. Objects need not inherit from them: any callable object with ``allocate`` works.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from fullshard.comm.base import CommRequest, GradScaling, Kind, Operand, Transport, WrappingTransport, issue_all
from fullshard.comm.collective import CollectiveTransport, Reduction, nccl_reduction
from fullshard.memory import Work

__all__ = ["AllGather", "Comm", "CustomTransport", "HookedTransport", "ReduceScatter"]


class Comm(ABC):
    """Base class of custom collectives, which allocate their own memory.

    An object may also have a method ``release(memory)``. It is called, in the same order on all ranks, when the message
    in ``memory``, which ``allocate`` returned, is no longer needed.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message: temporary, pooled or persistent, but not in use by another message in flight.

        Args:
            size: Shape of the tensor to return.
            dtype: Dtype of the tensor.
            device: Device of the tensor.

        Returns:
            A tensor of that shape, dtype and device.
        """


class AllGather(Comm):
    """Base class of custom all-gathers of flat tensors, for ``FSDPModule.set_custom_all_gather``.

    Example:
        ```python
        import torch
        import torch.distributed as dist
        from torch import nn

        from fullshard import AllGather, fully_shard


        class PlainAllGather(AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


        model = fully_shard(nn.Linear(8, 4))
        model.set_custom_all_gather(PlainAllGather())
        model(torch.randn(2, 8)).sum().backward()
        ```
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

        Args:
            output_tensor: Flat tensor of ``world_size * input_tensor.numel()`` elements, from ``allocate``.
            input_tensor: This rank's flat tensor.
            group: The ranks.
            async_op: Return a work instead of waiting.

        Returns:
            The work to wait for; None if the result is ready (on accelerators, for the current stream).
        """


class ReduceScatter(Comm):
    """Base class of custom reduce-scatters of flat tensors, for ``FSDPModule.set_custom_reduce_scatter``."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` over all ranks with ``op`` and write this rank's part into ``output_tensor``.

        Args:
            output_tensor: Flat tensor of ``input_tensor.numel() / world_size`` elements.
            input_tensor: Flat tensor, from ``allocate``.
            group: The ranks.
            op: ``ReduceOp.SUM``, or ``ReduceOp.AVG`` with NCCL.
            async_op: Return a work instead of waiting.

        Returns:
            The work to wait for; None if the result is ready (on accelerators, for the current stream).
        """


class CustomTransport(WrappingTransport, CollectiveTransport):
    """A transport with some collectives replaced by custom ones.

    ``direct_bytes`` is larger than any size, so that everything a bucket sends is one packed operand in the memory that
    the custom object allocates. A launch of several requests calls the object once per operand. Other collectives are
    passed on to the base transport.

    A custom reduce-scatter is called with AVG if the backend is NCCL and AVG is all of the scaling; otherwise with SUM,
    with multiplications before and after.

    Args:
        base: The group's own transport.
        all_gather: Replaces all-gathers.
        reduce_scatter: Replaces reduce-scatters.

    Raises:
        TypeError: If an object is not callable or has no ``allocate``.
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
        """Return memory from the custom object; None for a collective that is not replaced.

        Args:
            kind: Collective that the memory is for.
            numel: Number of elements.
            dtype: Dtype of the tensor.
            device: Device of the tensor.

        Returns:
            A flat tensor, or None.

        Raises:
            ValueError: If the object returns a tensor of another size, dtype or device.
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
        """Call ``release`` of the custom object, if it has one.

        Args:
            kind: Collective that the memory was for.
            memory: Tensor that ``allocate`` returned.
        """
        comm = self.custom_all_gather if kind == "all_gather" else self.custom_reduce_scatter
        release = getattr(comm, "release", None)
        if release is not None:
            release(memory)

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        if self.custom_all_gather is None:
            return self.base._all_gather(requests)
        return CollectiveTransport._all_gather(self, requests)

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        if self.custom_reduce_scatter is None:
            return self.base._reduce_scatter(requests)
        return CollectiveTransport._reduce_scatter(self, requests)

    def _issue_gather(self, operand: Operand) -> Work | None:
        assert self.custom_all_gather is not None
        return self.custom_all_gather(
            output_tensor=operand.unsharded, input_tensor=operand.shard, group=self.group, async_op=True
        )

    def _issue_reduce_scatter(self, operand: Operand, reduction: Reduction) -> Work | None:
        assert self.custom_reduce_scatter is not None
        return self.custom_reduce_scatter(
            output_tensor=operand.shard,
            input_tensor=operand.unsharded,
            group=self.base.reduce_group,
            op=reduction.op.op,  # type: ignore[attr-defined]
            async_op=True,
        )

    def _reduction(self, dtype: torch.dtype, scaling: GradScaling) -> Reduction:
        if self.base.averages and scaling == GradScaling(after=self.world_size):
            return nccl_reduction(dtype, scaling, self.world_size)
        return super()._reduction(dtype, scaling)


class HookedTransport(WrappingTransport):
    """A transport whose reductions are done by a communication hook, as in torch.distributed.fsdp.

    The hook gets the first operand of every request, which has its gradients. It is called as ``hook(state, unsharded,
    shard)`` where gradients are sharded and must leave this rank's part of the result in ``shard``; in an all-reduce it
    is called as ``hook(state, tensor)`` and works in place. Both tensors are flat. The hook scales gradients itself,
    and may change ``unsharded``. It may also give its tensors new memory (``shard.data = ...``) of the same size and
    dtype: the values are copied back.

    The other operands of a request (presence numbers), and all-gathers, are passed on to the base transport.
    ``direct_bytes`` is larger than any size, so that gradients are one operand.

    A hook is done when it returns; on accelerators it may leave work on the current stream.

    Args:
        base: The group's own transport.
        state: First argument of the hook.
        hook: Function that reduces gradients; the same on all ranks.

    Raises:
        TypeError: If the hook is not callable.
    """

    direct_bytes: int = sys.maxsize
    hooked: bool = True

    state: object
    hook: Callable[..., Any]

    def __init__(self, base: Transport, state: object, hook: Callable[..., Any]) -> None:
        if not callable(hook):
            raise TypeError(
                "communication hook: expected a function hook(state, gradient, shard), or hook(state, gradient) "
                f"without a shard axis; found {type(hook).__name__}"
            )
        super().__init__(base)
        self.state, self.hook = state, hook

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self._reduce(requests, self.base._reduce_scatter, lambda operand: [operand.unsharded, operand.shard])

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        return self._reduce(requests, self.base._all_reduce, lambda operand: [operand.unsharded])

    def _reduce(
        self,
        requests: Sequence[CommRequest],
        launch: Callable[[Sequence[CommRequest]], Sequence[Work]],
        tensors_of: Callable[[Operand], list[torch.Tensor]],
    ) -> Sequence[Work]:
        """Send the other operands first, in one launch, so that they are on their way while the hooks run.

        Should a hook raise on this rank only, the other ranks still receive their messages.
        """
        others = [CommRequest(unit, operands[1:], scaling) for unit, operands, scaling in requests if len(operands) > 1]
        calls: list[Callable[[], Sequence[Work]]] = [partial(launch, others)] if others else []
        for unit, operands, _ in requests:
            if operands and operands[0].unsharded.numel():
                calls.append(partial(self._call, unit, tensors_of(operands[0])))
        return issue_all(calls)

    def _call(self, unit: str, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        """Call the hook; bring what it left in the last of ``tensors`` back into the memory of that tensor."""
        given = [tensor.detach() for tensor in tensors]  # objects of its own, which it may give new memory
        self.hook(self.state, *given)
        result, target = given[-1], tensors[-1]
        if result.dtype is not target.dtype or result.numel() != target.numel():
            name = getattr(self.hook, "__name__", type(self.hook).__name__)
            raise TypeError(
                f"communication hook {name}: expected a result of {target.numel()} elements of {target.dtype} for unit "
                f"{unit or '<root>'!r}, found {result.numel()} of {result.dtype}; a hook that compresses gradients "
                "must cast the result back. PyTorch's compression hooks do so with "
                f"LowPrecisionState(group, parameter_type={target.dtype})"
            )
        if result.data_ptr() != target.data_ptr():
            target.copy_(result.view(-1))
        return []
