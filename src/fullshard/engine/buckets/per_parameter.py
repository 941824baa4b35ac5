"""The bucket of parameters that are cut one by one, as DTensors are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.base import Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import PerParameterAllGather
from fullshard.engine.buckets.base import BufferBucket
from fullshard.engine.buckets.message import lay_out
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.layout import PerParameterLayout, Slot
from fullshard.memory import Buffer, own_storage

__all__ = ["PerParameterBucket"]


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

    def _make_all_gather(
        self, layout: PerParameterLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> PerParameterAllGather:
        return PerParameterAllGather(layout, shard, unsharded, transport)

    def _plan_subgroup(self, unsharded: Buffer, transport: Transport) -> PerParameterAllGather:
        shapes = [parameter.shape for parameter in self.parameters]
        layout = lay_out(shapes, transport, unsharded.dtype.itemsize, within=self.layout)
        kept = Buffer(layout.shard_numel, unsharded.dtype, unsharded.device)
        shard = kept.tensor(0, (layout.shard_numel,), (1,))
        targets, sources = [], []
        for slot in layout.slots:
            own, rows = slot.parameter, slot.local_shape(transport.rank)
            start = slot.local_rows(transport.rank)[0] * (own.stride[own.cut] if rows else 0)
            targets.append(_shard_of(shard, slot, transport.rank))
            sources.append(unsharded.tensor(slot.unsharded_offset + start, rows, own.stride))
        kept.free()
        self._subgroup_shard, self._subgroup_copies = kept, (targets, sources)
        return PerParameterAllGather(layout, shard, unsharded, transport)


def _shard_of(buffer: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """Return the rows of one parameter that ``rank`` holds, as a view of a shard buffer."""
    return buffer.as_strided(slot.local_shape(rank), slot.local_stride(rank), slot.shard_offset)
