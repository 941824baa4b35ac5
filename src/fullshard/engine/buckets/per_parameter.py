"""The bucket of parameters that are cut one by one, as DTensors are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm import Transport, slices_of
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.base import BufferBucket
from fullshard.engine.buckets.message import lay_out, map_message
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.parameters.tensor_shards import View
from fullshard.engine.reduction.plan import Packing, ReductionPlan
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot
from fullshard.memory import Buffer, own_storage

__all__ = ["PerParameterBucket", "plan_per_parameter"]


class PerParameterBucket(BufferBucket):
    """A shard buffer in which the shards of all parameters lie one after another.

    It is made with their present values: whole tensors, or this rank's rows of them.
    """

    layout: PerParameterLayout

    def __init__(
        self, parameters: Sequence[ShardedParameter], values: Sequence[torch.Tensor], mesh: ShardMesh, storage: Storage
    ) -> None:
        super().__init__(parameters, mesh, storage)
        self._place(values)

    def _place(self, values: Sequence[torch.Tensor]) -> None:
        """Lay out a shard buffer and put the parameters on it."""
        mesh = self.mesh
        itemsize = min(values[0].dtype.itemsize, self.storage.param_dtype.itemsize)
        self.layout = lay_out([p.shape for p in self.parameters], mesh.transport, itemsize)
        self.shard_buffer = self._new_shard_buffer(self.layout.shard_numel, values[0])
        for parameter, slot, value in zip(self.parameters, self.layout.slots, values, strict=True):
            local = own_storage(_shard_of(self.shard_buffer, slot, mesh.rank))
            local.copy_(parameter.local_part(value))
            parameter.place(local)

    def _move_shards(self) -> None:
        self._place([parameter.local for parameter in self.parameters])

    def _where(self, index: int) -> str:
        return f"{super()._where(index)}, {self.layout.slots[index].route.value}"

    def _shard_on(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        return _shard_of(buffer, self.layout.slots[index], self.mesh.rank)

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        return plan_per_parameter(parameters, self.mesh, self.storage)

    def _subgroup_layout(self, transport: Transport) -> PerParameterLayout:
        shapes = [parameter.shape for parameter in self.parameters]
        return lay_out(shapes, transport, self.storage.param_dtype.itemsize, within=self.layout)

    def _subgroup_parts(
        self, layout: PerParameterLayout, shard: torch.Tensor, unsharded: Buffer, rank: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets, sources = [], []
        for slot in layout.slots:
            own, rows = slot.parameter, slot.local_shape(rank)
            start = slot.local_rows(rank)[0] * (own.stride[own.cut] if rows else 0)
            targets.append(_shard_of(shard, slot, rank))
            sources.append(unsharded.tensor(slot.unsharded_offset + start, rows, own.stride))
        return targets, sources


def _shard_of(buffer: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """Return the rows of one parameter that ``rank`` holds, as a view of a shard buffer."""
    return buffer.as_strided(slot.local_shape(rank), slot.local_stride(rank), slot.shard_offset)


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
