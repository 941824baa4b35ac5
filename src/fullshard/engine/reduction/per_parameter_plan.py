"""The reduction of parameters that are cut one by one: large gradients are sent as they are, the others packed."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.comm import slices_of
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.message import lay_out, map_message
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.parameters.tensor_shards import View
from fullshard.engine.reduction.plan import Packing, ReductionPlan
from fullshard.layout import ParameterShape, Route, Slot

__all__ = ["plan_per_parameter"]


def plan_per_parameter(parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage) -> ReductionPlan:
    """Plan the reduction of some parameters of a bucket. They are laid out anew, and behind them presence numbers."""
    dtype = storage.reduce_dtype
    shapes = [parameter.shape for parameter in parameters]
    communicates, in_place = mesh.world_size > 1 or mesh.replicas > 1, mesh.world_size == 1
    if communicates:
        shapes.append(ParameterShape("<presence>", (len(parameters),), (1,), replicated=True))
    layout = lay_out(
        shapes,
        mesh.replica_transport if in_place else mesh.transport,
        min(dtype.itemsize, *(p.gradient_dtype.itemsize for p in parameters)),
        "all_reduce" if in_place else "reduce_scatter",
        copied=not in_place and storage.param_dtype is not dtype,
        ranks=mesh.world_size,
    )
    repeated = len(parameters) if communicates else None
    columns, copies = map_message(layout, mesh.transport, unpack=False, repeated=repeated)
    # Without a shard axis, direct gradients are tensors of shards themselves.
    start = layout.message_offset if in_place else 0
    direct: dict[int, Slot] = {}
    views = []
    for index, slot in enumerate(layout.slots):
        tensor, offset = 0, slot.shard_offset - start
        if slot.route is Route.DIRECT:
            direct[index] = slot
            if in_place:
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
        packing=Packing(0 if in_place else numel * mesh.world_size, mesh.world_size, copies, columns=columns),
        # Nothing is packed between gradients, nor behind the last rows where ranks do not have equally many.
        zeroes_message=mesh.transport.reads_padding or mesh.replica_transport.reads_padding,
    )
