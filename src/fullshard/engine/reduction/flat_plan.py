"""The reduction of flattened parameters: one message, and one operand for all gradients of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fullshard.comm import Operand, Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle
from fullshard.engine.parameters.sharded import ShardedParameter, accumulate_gradient
from fullshard.engine.reduction.plan import Gradients, ReductionPlan, ShardView
from fullshard.layout import FlatLayout
from fullshard.memory import Buffer

__all__ = ["FlatReductionPlan"]


class _Places(NamedTuple):
    """Where things lie in a message: gradients and presence numbers in order, and gaps that belong to neither."""

    gradients: list[torch.Tensor]
    gaps: list[torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatReductionPlan(ReductionPlan):
    """The reduction of all parameters of a flat bucket; presence numbers are an operand of their own behind them.

    Args:
        layout: Of the bucket.
        handle: Of the visible flat parameter, if there is one.
        places: In the plan's own message.
    """

    layout: FlatLayout
    handle: FlatParamHandle | None
    places: _Places

    @classmethod
    def build(
        cls,
        parameters: Sequence[ShardedParameter],
        mesh: ShardMesh,
        storage: Storage,
        layout: FlatLayout,
        handle: FlatParamHandle | None,
    ) -> FlatReductionPlan:
        """Plan the reduction of all parameters of a bucket."""
        communicates = mesh.world_size > 1 or mesh.replicas > 1
        count, numel = len(parameters) if communicates else 0, layout.slice_numel
        views = []
        for parameter, slot in zip(parameters, layout.slots, strict=True):
            offset = slot.shard(mesh.rank).offset
            views.append(ShardView(0, offset, tuple(parameter.local.shape), parameter.local.stride()))
        size = 0 if mesh.world_size == 1 else (numel + count) * mesh.world_size
        message = Buffer(size, storage.reduce_dtype, mesh.device)
        message_tensor = message.tensor(0, (size,), (1,))
        plan = cls(
            parameters=tuple(parameters),
            mesh=mesh,
            storage=storage,
            views=tuple(views),
            presence=ShardView(0, numel, (count,), (1,)) if communicates else None,
            shards_numel=numel + count,
            slices=(Slice(0, numel, layout.unsharded_numel * storage.reduce_dtype.itemsize),),
            direct={},
            message=message,
            message_tensor=message_tensor,
            layout=layout,
            handle=handle,
            places=_places(message_tensor, layout, count) if size else _Places([], []),
        )
        message.free()
        return plan

    def packed_operands(self, shards: torch.Tensor, message: torch.Tensor) -> list[Operand]:
        """Two operands: all gradients, and the presence numbers."""
        sent, numel = self.layout.unsharded_numel, self.layout.slice_numel
        operands = [
            Operand(shards.narrow(0, 0, numel), message.narrow(0, 0, sent), self.slices),
            Operand(
                shards.narrow(0, numel, self.shards_numel - numel), message.narrow(0, sent, message.numel() - sent)
            ),
        ]
        return [operand for operand in operands if operand.shard.numel()]

    def all_reduce_operands(self, shards: Sequence[torch.Tensor]) -> list[Operand]:
        """One operand for gradients and presence numbers; two for a communication hook, which gets gradients only."""
        if not self.mesh.replica_transport.hooked:
            return super().all_reduce_operands(shards)
        numel = self.layout.slice_numel
        parts = [shards[0].narrow(0, 0, numel), shards[0].narrow(0, numel, self.shards_numel - numel)]
        return [Operand(part, part) for part in parts if part.numel()]

    def pack(self, inputs: Gradients, target: torch.Tensor) -> None:
        """Copy gradients, zeros for missing ones and for gaps, and presence numbers into the message."""
        count = 0 if self.presence is None else len(self.parameters)
        places, gaps = self.places if target is self.message_tensor else _places(target, self.layout, count)
        missing = [place for place, gradient in zip(places, inputs, strict=True) if gradient is None]
        targets = [place for place, gradient in zip(places, inputs, strict=True) if gradient is not None]
        sources = [
            g.as_strided((g.numel(),), (1,)) if i < len(self.parameters) else g.expand_as(places[i])
            for i, g in enumerate(inputs)
            if g is not None
        ]
        if gaps or missing:
            torch._foreach_zero_([*gaps, *missing])
        if targets:  # on one rank there may be neither gradients nor presence numbers
            torch._foreach_copy_(targets, sources)

    def arriving(self, shards: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """None: 1-D parts of parameters are no DTensors, for which gradients in flight stand."""

    def accumulate(self, shards: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """Set (or add to) the sharded gradients, or that of the visible flat parameter."""
        if self.handle is None:
            super().accumulate(shards, present)
        elif any(present):
            accumulate_gradient(self.handle.flat, shards[0].narrow(0, 0, self.layout.slice_numel))


def _places(message: torch.Tensor, layout: FlatLayout, presences: int) -> _Places:
    """Where gradients, presence numbers and gaps lie in ``message``."""
    sent = layout.unsharded_numel
    places, gaps, end = [], [], 0
    for slot in layout.slots:
        start, numel = slot.unsharded_offset, slot.parameter.numel
        places.append(message.narrow(0, start, numel))
        if start > end:
            gaps.append(message.narrow(0, end, start - end))
        end = max(end, start + numel)
    if sent > end:
        gaps.append(message.narrow(0, end, sent - end))
    if presences:
        places.append(message.narrow(0, sent, message.numel() - sent).view(-1, presences))
    return _Places(places, gaps)
