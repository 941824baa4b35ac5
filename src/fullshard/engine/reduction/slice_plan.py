"""The reduction of parameters that are cut into equal slices: one operand for all gradients of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch.distributed.tensor import DTensor

from fullshard.comm import Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import View
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.plan import PackCopy, PackedRows, Packing, ReductionPlan
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
    together = ranks > 1 and mesh.transport.copies_columns
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
        packing=_rows(layout) if together else _copies(layout, communicates),
        dtensors=isinstance(parameters[0].sharded, DTensor),
        together=parameters[0].optimized is not parameters[0].sharded,
    )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _rows(layout: FlatLayout) -> Packing:
    """Pack gradients in the order of memory, each as one row, zeros between them, and all ranks' presence numbers."""
    rows, end = [], 0
    for index, slot in sorted(enumerate(layout.slots), key=lambda each: each[1].unsharded_offset):
        numel, gap = slot.parameter.numel, slot.unsharded_offset - end
        if numel:
            rows += [PackedRows(gap, None, (1, gap))] if gap else []
            rows.append(PackedRows(numel, index, (1, numel)))
            end = slot.unsharded_offset + numel
    gap, numbers = layout.unsharded_numel - end, layout.world_size * len(layout.slots)
    rows += [PackedRows(gap, None, (1, gap))] if gap else []
    rows.append(PackedRows(numbers, len(layout.slots), (1, numbers)))
    return Packing(layout.unsharded_numel + numbers, 1, rows=rows)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _copies(layout: FlatLayout, communicates: bool) -> Packing:
    """Pack gradients, and all ranks' presence numbers, by copies."""
    ranks, sent, count = layout.world_size, layout.unsharded_numel, len(layout.slots) if communicates else 0
    gaps, end = [], 0
    for slot in layout.in_memory_order:
        gaps.append(View(end, (slot.unsharded_offset - end,), (1,)))
        end = slot.unsharded_offset + slot.parameter.numel
    gaps.append(View(end, (sent - end,), (1,)))
    copies = []
    for index, slot in enumerate(layout.slots):
        numel = slot.parameter.numel
        copies.append(PackCopy(index, View(0, (numel,), (1,)), View(slot.unsharded_offset, (numel,), (1,))))
    if count:
        copies.append(PackCopy(count, None, View(sent, (ranks, count), (count, 1))))
    return Packing(0 if ranks == 1 else sent + count * ranks, 1, copies, [gap for gap in gaps if gap.shape != (0,)])
