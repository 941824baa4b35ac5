"""Reductions that users do themselves, with a communication hook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from fullshard.memory import Work
from fullshard.transport.base import Parcel, Transport, issue_all

__all__ = ["HookedTransport"]


class HookedTransport(Transport):
    """A transport whose reductions are done by the user's hook, as those of torch.distributed.fsdp are.

    The hook gets the first move of every parcel: its gradients. It is called ``hook(state, region, piece)`` where
    gradients are sharded, and has to leave this rank's part of the result in ``piece``; in an all-reduce it is called
    ``hook(state, tensor)`` and works in place. Both are flat. It divides by itself, and may change ``region``. It may
    also give its tensors new memory (``piece.data = ...``) of the same size and dtype: the values are copied back.

    The other moves of a parcel (the engine's own numbers) go to the transport underneath, with the parcel's
    division, as do gathers. ``direct_bytes`` is beyond any size, so that gradients are one move.

    A hook is done when it returns; on accelerators it may leave work behind on the current stream.

    Args:
        base: The group's own transport.
        state: The hook's first argument.
        hook: See above. Has to be the same on all ranks.

    Raises:
        TypeError: The hook is not callable.
    """

    direct_bytes: int = sys.maxsize
    hooked: bool = True

    base: Transport
    state: object
    hook: Callable[..., Any]

    def __init__(self, base: Transport, state: object, hook: Callable[..., Any]) -> None:
        if not callable(hook):
            raise TypeError(
                "a communication hook has to be callable as hook(state, gradient, piece), or as hook(state, gradient) "
                f"without a shard axis; got {type(hook).__name__}"
            )
        super().__init__(base.group)
        self.base, self.state, self.hook = base, state, hook
        self.tiny_bytes = base.tiny_bytes

    def allocate(
        self, kind: Literal["gather", "reduce"], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """As the transport underneath does, for gathers. The hook's are in the engine's memory."""
        return self.base.allocate(kind, numel, dtype, device) if kind == "gather" else None

    def release(self, kind: Literal["gather", "reduce"], memory: torch.Tensor) -> None:
        """As the transport underneath does."""
        self.base.release(kind, memory)

    def separate_reduce_group(self, enable: bool) -> None:
        """As the transport underneath does."""
        self.base.separate_reduce_group(enable)
        self.reduce_group = self.base.reduce_group

    def _gather(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        return self.base._gather(parcels)

    def _reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        def call(parcel: Parcel) -> Sequence[Work]:
            move = parcel.moves[0]
            self._call(parcel.unit, [move.region, move.piece])
            return []

        return issue_all(_in_order(parcels, self.base._reduce, call))

    def _all_reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        def call(parcel: Parcel) -> Sequence[Work]:
            self._call(parcel.unit, [parcel.moves[0].region])
            return []

        return issue_all(_in_order(parcels, self.base._all_reduce, call))

    def _call(self, unit: str, tensors: Sequence[torch.Tensor]) -> None:
        """Call the hook; bring what it left in the last of ``tensors`` back into the memory of that tensor."""
        given = [tensor.detach() for tensor in tensors]  # objects of its own, which it may give new memory
        self.hook(self.state, *given)
        result, target = given[-1], tensors[-1]
        if result.dtype is not target.dtype or result.numel() != target.numel():
            name = getattr(self.hook, "__name__", type(self.hook).__name__)
            raise TypeError(
                f"the communication hook {name} left {result.numel()} elements of {result.dtype} for unit {unit!r}, "
                f"expected {target.numel()} of {target.dtype}; a hook that compresses has to cast back, torch's own "
                f"with LowPrecisionState(group, parameter_type={target.dtype})"
            )
        if result.data_ptr() != target.data_ptr():
            target.copy_(result.view(-1))


def _in_order(
    parcels: Sequence[Parcel],
    launch: Callable[[Sequence[Parcel]], Sequence[Work]],
    call: Callable[[Parcel], Sequence[Work]],
) -> Iterator[Callable[[], Sequence[Work]]]:
    """The other moves first, in one launch, so that they travel while the hooks run; then the hooks.

    Should a hook raise on this rank only, the others got all that they wait for from the launch.
    """
    others = [Parcel(unit, moves[1:], division) for unit, moves, division in parcels if len(moves) > 1]
    if others:
        yield partial(launch, others)
    for parcel in parcels:
        if parcel.moves and parcel.moves[0].region.numel():
            yield partial(call, parcel)
