"""The reduction of flattened parameters: one operand for all gradients of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.comm import Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import View
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.plan import PackCopy, PackedShards, ReductionMessage, ReductionPlan
from fullshard.layout import FlatLayout

__all__ = ["plan_flat"]


def plan_flat(
    parameters: Sequence[ShardedParameter],
    mesh: ShardMesh,
    storage: Storage,
    layout: FlatLayout,
    handle: FlatParamHandle | None,
) -> ReductionPlan:
    """Plan the reduction of all parameters of a bucket; presence numbers are an operand of their own behind them."""
    ranks, numel, sent = mesh.world_size, layout.slice_numel, layout.unsharded_numel
    communicates = ranks > 1 or mesh.replicas > 1
    count = len(parameters) if communicates else 0
    views, copies, gaps, end = [], [], [], 0
    for index, (parameter, slot) in enumerate(zip(parameters, layout.slots, strict=True)):
        offset, local = slot.shard(mesh.rank).offset, parameter.local
        views.append((0, View(offset, tuple(local.shape), local.stride())))
        start, size = slot.unsharded_offset, (slot.parameter.numel,)
        copies.append(PackCopy(index, View(0, size, (1,)), View(start, size, (1,))))
        gaps.append(View(end, (start - end,), (1,)))
        end = start + slot.parameter.numel
    gaps.append(View(end, (sent - end,), (1,)))
    if communicates:
        copies.append(PackCopy(count, View(0, (ranks, count), (0, 1)), View(sent, (ranks, count), (count, 1))))
    slices = (Slice(0, numel, sent * storage.reduce_dtype.itemsize),)
    packed = (PackedShards(0, numel, slices), PackedShards(numel, count, ()))
    return ReductionPlan(
        parameters=tuple(parameters),
        mesh=mesh,
        storage=storage,
        views=tuple(views),
        presence=View(numel, (count,), (1,)) if communicates else None,
        shards_numel=numel + count,
        slices=slices,
        direct={},
        packed=tuple(part for part in packed if part.numel),
        message=ReductionMessage(
            0 if ranks == 1 else (numel + count) * ranks,
            storage.reduce_dtype,
            mesh.device,
            copies,
            gaps=[gap for gap in gaps if gap.shape != (0,)],
        ),
        dtensors=False,
        handle=handle,
    )
