"""The reduction of parameters that are cut into equal slices: one operand for all gradients of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fullshard.comm import Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import Column, MessageCopy
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.parameters.tensor_shards import View
from fullshard.engine.reduction.plan import Packing, ReductionPlan
from fullshard.layout import FlatLayout
from fullshard.layout.per_parameter import LAYOUTS_KEPT

__all__ = ["plan_slices"]


def plan_slices(
    parameters: Sequence[ShardedParameter],
    mesh: ShardMesh,
    storage: Storage,
    layout: FlatLayout,
) -> ReductionPlan:
    """Plan the reduction of all parameters of a bucket; presence numbers are an operand of their own behind them.

    Args:
        parameters: All parameters of the bucket.
        mesh: Its ranks.
        storage: Its dtypes and devices.
        layout: Where its parameters lie.
    """
    ranks, numel = mesh.world_size, layout.slice_numel
    communicates = ranks > 1 or mesh.replicas > 1
    count = len(parameters) if communicates else 0
    shards = layout.shards(mesh.rank)
    locals_ = [(shard.offset, parameter.local) for shard, parameter in zip(shards, parameters, strict=True)]
    return ReductionPlan(
        parameters=tuple(parameters),
        mesh=mesh,
        storage=storage,
        views=tuple((0, View(at, tuple(local.shape), tuple(local.stride()))) for at, local in locals_),
        presence=View(numel, (count,), (1,)) if communicates else None,
        shards_numel=numel + count,
        slices=(Slice(0, numel, layout.unsharded_numel * storage.reduce_dtype.itemsize),),
        direct={},
        packed=tuple(part for part in ((0, numel), (numel, count)) if part[1]),
        packing=_packing(layout, communicates=communicates, by_columns=ranks > 1 and mesh.transport.copies_columns),
        together=parameters[0].optimized is not parameters[0].sharded,
    )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _packing(layout: FlatLayout, *, communicates: bool, by_columns: bool) -> Packing:
    """Pack gradients in the order of memory, zeros between them, and behind them all ranks' presence numbers."""
    ranks, sent, count = layout.world_size, layout.unsharded_numel, len(layout.slots) if communicates else 0
    spans = [(slot.unsharded_offset, slot.parameter.numel, index) for index, slot in enumerate(layout.slots)]
    columns, copies, gaps, end = [], [], [], 0
    for offset, numel, index in [*sorted(spans), (sent, ranks * count, len(spans))]:
        if offset > end:
            columns.append(Column(offset - end, None, (1, offset - end)))
            gaps.append(View(end, (offset - end,), (1,)))
        if numel:
            columns.append(Column(numel, index, (1, numel)))
            copies.append(MessageCopy(index, View(0, (numel,), (1,)), View(offset, (numel,), (1,))))
        end = offset + numel
    numel = 0 if ranks == 1 else end
    return Packing(numel, 1, columns=columns) if by_columns else Packing(numel, 1, copies, gaps)
