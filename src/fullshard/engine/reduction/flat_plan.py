"""The reduction of flattened parameters: one operand for all gradients of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fullshard.comm import Slice
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import View
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.plan import PackCopy, PackedShards, ReductionMessage, ReductionPlan
from fullshard.layout import FlatLayout
from fullshard.layout.per_parameter import LAYOUTS_KEPT

__all__ = ["plan_flat"]


class _Places(NamedTuple):
    """Where gradients lie: the same for all buckets of one layout."""

    views: tuple[tuple[int, View], ...]
    copies: tuple[PackCopy, ...]
    gaps: tuple[View, ...]


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
    places = _places(layout, mesh.rank, communicates)
    slices = (Slice(0, numel, sent * storage.reduce_dtype.itemsize),)
    packed = (PackedShards(0, numel, slices), PackedShards(numel, count, ()))
    return ReductionPlan(
        parameters=tuple(parameters),
        mesh=mesh,
        storage=storage,
        views=places.views,
        presence=View(numel, (count,), (1,)) if communicates else None,
        shards_numel=numel + count,
        slices=slices,
        direct={},
        packed=tuple(part for part in packed if part.numel),
        message=ReductionMessage(
            0 if ranks == 1 else (numel + count) * ranks,
            storage.reduce_dtype,
            mesh.device,
            places.copies,
            gaps=places.gaps,
        ),
        dtensors=False,
        handle=handle,
    )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _places(layout: FlatLayout, rank: int, communicates: bool) -> _Places:
    ranks, sent, count = layout.world_size, layout.unsharded_numel, len(layout.slots)
    views, copies, gaps, end = [], [], [], 0
    for index, (slot, shard) in enumerate(zip(layout.slots, layout.shards(rank), strict=True)):
        own, start = slot.parameter, slot.unsharded_offset
        shape, stride = (own.shape, own.stride) if ranks == 1 else ((shard.numel,), (1,))
        views.append((0, View(shard.offset, shape, stride)))
        copies.append(PackCopy(index, View(0, (own.numel,), (1,)), View(start, (own.numel,), (1,))))
        gaps.append(View(end, (start - end,), (1,)))
        end = start + own.numel
    gaps.append(View(end, (sent - end,), (1,)))
    if communicates:
        copies.append(PackCopy(count, None, View(sent, (ranks, count), (count, 1))))
    return _Places(tuple(views), tuple(copies), tuple(gap for gap in gaps if gap.shape != (0,)))
