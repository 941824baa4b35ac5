"""The bucket of parameters that are cut one by one, as DTensors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fullshard.comm.base import Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import BucketAllGather, PerParameterAllGather
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
    _all_gather: PerParameterAllGather | None
    _subgroup_all_gather: PerParameterAllGather | None
    _subgroup_copies: tuple[list[torch.Tensor], list[torch.Tensor]]  # into that, from the unsharded buffer

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

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the unsharded buffer and the messages of its all-gathers hold at the moment."""
        all_gathers = (self._all_gather, self._subgroup_all_gather)
        return super().allocated_bytes + sum(each.in_flight_bytes for each in all_gathers if each is not None)

    def _shard_on(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        return _shard_of(buffer, self.layout.slots[index], self.mesh.rank)

    def _copies_of(
        self, parameters: Sequence[ShardedParameter], dtype: torch.dtype, all_gather: Callable[[BucketAllGather], None]
    ) -> list[torch.Tensor]:
        mesh = self.mesh
        layout = lay_out([parameter.shape for parameter in parameters], mesh.exact_transport, dtype.itemsize)
        shard = torch.empty(layout.shard_numel, dtype=dtype, device=mesh.device)
        for parameter, slot in zip(parameters, layout.slots, strict=True):
            _shard_of(shard, slot, mesh.rank).copy_(parameter.local)
        copies = self._copies(layout, shard, dtype)
        all_gather(copies.all_gather)
        return copies.values

    def _make_all_gather(
        self, layout: PerParameterLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> PerParameterAllGather:
        return PerParameterAllGather(layout, shard, unsharded, transport)

    # ---------------------------------------------------------------- reshard to a subgroup

    def reshard_to_subgroup(self, size: int) -> None:
        """Keep this rank's rows of the unsharded parameters over ``size`` consecutive ranks, to unshard from next."""
        if self._unsharded is None or not self.is_unsharded or self.mesh.world_size == 1:
            return
        if self._subgroup_all_gather is None or self._subgroup_all_gather.layout.world_size != size:
            self._plan_subgroup(size, self._unsharded)
        assert self._subgroup_shard is not None
        self._subgroup_shard.allocate()
        torch._foreach_copy_(*self._subgroup_copies)

    def _plan_subgroup(self, size: int, unsharded: Buffer) -> None:
        transport = self.mesh.subgroup(size)
        shapes = [p.shape for p in self.parameters]
        layout = lay_out(shapes, transport, unsharded.dtype.itemsize, within=self.layout)
        kept = Buffer(layout.shard_numel, unsharded.dtype, unsharded.device)
        shard = kept.tensor(0, (layout.shard_numel,), (1,))
        all_gather = PerParameterAllGather(layout, shard, unsharded, transport)
        targets, sources = [], []
        for slot in layout.slots:
            own, rows = slot.parameter, slot.local_shape(transport.rank)
            start = slot.local_rows(transport.rank)[0] * (own.stride[own.cut] if rows else 0)
            targets.append(_shard_of(shard, slot, transport.rank))
            sources.append(unsharded.tensor(slot.unsharded_offset + start, rows, own.stride))
        kept.free()
        self._subgroup_shard, self._subgroup_all_gather, self._subgroup_copies = kept, all_gather, (targets, sources)


def _shard_of(buffer: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """The rows of one parameter that ``rank`` holds, on a shard buffer."""
    return buffer.as_strided(slot.local_shape(rank), slot.local_stride(rank), slot.shard_offset)
