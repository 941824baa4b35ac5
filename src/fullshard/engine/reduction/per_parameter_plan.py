"""The reduction of parameters that are cut one by one: large gradients are sent as they are, the others packed."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.comm import slices_of
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import Column, View, lay_out, message_columns, message_copies
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.plan import PackCopy, PackedRows, Packing, ReductionPlan
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot, direct_shards

__all__ = ["plan_per_parameter"]


def plan_per_parameter(parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage) -> ReductionPlan:
    """Plan the reduction of some parameters of a bucket. They are laid out anew, and behind them presence numbers."""
    dtype = storage.reduce_dtype
    shapes = [parameter.shape for parameter in parameters]
    communicates, in_place = mesh.world_size > 1 or mesh.replicas > 1, mesh.world_size == 1
    if communicates:
        shapes.append(ParameterShape("<presence>", (len(parameters),), (1,), replicated=True))
    layout = _lay_out(shapes, mesh, storage, min(dtype.itemsize, *(p.gradient_dtype.itemsize for p in parameters)))
    columns = message_columns(layout, mesh.transport, repeated=len(parameters) if communicates else None)
    rows = [_packed_rows(column, layout, mesh.world_size, presence=len(parameters)) for column in columns]
    by_rows = {each.gradient for each in rows}
    # Without a shard axis, direct gradients are tensors of shards themselves.
    start = layout.message_offset if in_place else 0
    direct: dict[int, Slot] = {}
    copies: list[PackCopy] = []
    views = []
    for index, slot in enumerate(layout.slots):
        if slot.route is Route.DIRECT:
            direct[index] = slot
        elif slot.shard_numel and index not in by_rows:
            pairs = message_copies(slot, layout, unpack=False)
            copies += [PackCopy(index, None if index == len(parameters) else source, to) for source, to in pairs]
        tensor, offset = 0, slot.shard_offset - start
        if slot.route is Route.DIRECT and in_place:
            tensor, offset = len(direct), 0
        views.append((tensor, View(offset, slot.local_shape(mesh.rank), slot.local_stride(mesh.rank))))
    numel = layout.message_numel
    return ReductionPlan(
        parameters=tuple(parameters),
        mesh=mesh,
        storage=storage,
        views=tuple(views[: len(parameters)]),
        presence=views[-1][1] if communicates else None,
        shards_numel=layout.shard_numel - start,
        slices=slices_of(layout, start, dtype.itemsize),
        direct=direct,
        packed=((layout.message_offset, numel),) if numel else (),
        packing=Packing(0 if in_place else numel * mesh.world_size, mesh.world_size, copies, rows=rows),
        # Nothing is packed between gradients, nor behind the last rows where ranks do not have equally many.
        zeroes_message=mesh.transport.reads_padding or mesh.replica_transport.reads_padding,
    )


def _lay_out(shapes: list[ParameterShape], mesh: ShardMesh, storage: Storage, itemsize: int) -> PerParameterLayout:
    """Lay out gradients for the first collective that they take part in, on whichever axis that is."""
    if mesh.world_size > 1:
        copied = storage.param_dtype is not storage.reduce_dtype
        return lay_out(shapes, mesh.transport, itemsize, "reduce_scatter", copied=copied)
    replicas = mesh.replica_transport
    smallest = replicas.smallest_direct("all_reduce", direct_shards(shapes, 1, itemsize), copied=False)
    return PerParameterLayout.build(tuple(shapes), world_size=1, itemsize=itemsize, direct_bytes=smallest)


def _packed_rows(column: Column, layout: PerParameterLayout, ranks: int, *, presence: int) -> PackedRows:
    if column.slot is None:
        return PackedRows(column.numel, None, (0, 0))
    slot = layout.slots[column.slot]
    shape = (ranks, column.numel) if column.slot == presence else (slot.rows, slot.row_numel)
    return PackedRows(column.numel, column.slot, shape)
