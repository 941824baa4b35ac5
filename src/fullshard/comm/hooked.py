"""Reductions by a communication hook of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fullshard.comm.base import CommRequest, Operand, Transport, WrappingTransport, issue_all
from fullshard.memory import Work

__all__ = ["HookedTransport"]


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
        """The other operands first, in one launch, so that they are sent while the hooks run; then the hooks.

        Should a hook raise on this rank only, the others got all that they wait for from the launch.
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
