"""The bucket of parameters that are cut one by one, as DTensors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fullshard.comm.base import Kind
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import BucketAllGather, PerParameterAllGather
from fullshard.engine.buckets.base import BufferBucket, UnshardedCopies
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.layout import PerParameterLayout, Route, Slot
from fullshard.memory import Buffer, own_storage

__all__ = ["PerParameterBucket"]


class PerParameterBucket(BufferBucket):
    """A shard buffer in which the shards of all parameters lie one after another.

    Args:
        parameters: In model order; all of one dtype and on one device.
        values: Their present values: whole tensors, or this rank's rows of them.
        mesh: The ranks to shard over.
        storage: Dtypes and devices of shards, unsharded parameters and gradients.
    """

    layout: PerParameterLayout
    _all_gather: PerParameterAllGather | None
    _subgroup_all_gather: PerParameterAllGather | None  # fills the unsharded buffer from a subgroup
    _subgroup_shard: Buffer | None  # what this rank keeps for it

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        values: Sequence[torch.Tensor],
        mesh: ShardMesh,
        storage: Storage,
    ) -> None:
        super().__init__(parameters, mesh, storage)
        self._subgroup_all_gather = self._subgroup_shard = None
        self._place(values)

    def _place(self, values: Sequence[torch.Tensor]) -> None:
        """Lay out a shard buffer and put the parameters on it."""
        mesh = self.mesh
        self.layout = PerParameterLayout.build(
            [p.shape for p in self.parameters],
            world_size=mesh.world_size,
            itemsize=min(values[0].dtype.itemsize, self.storage.param_dtype.itemsize),
            direct_bytes=mesh.transport.direct_bytes,
        )
        self.shard_buffer = self._new_shard_buffer(self.layout.shard_numel, values[0])
        for parameter, slot, value in zip(self.parameters, self.layout.slots, values, strict=True):
            local = own_storage(_shard_of(self.shard_buffer, slot, mesh.rank))
            local.copy_(_local_rows(value, slot, mesh.rank))
            parameter.place(local)

    def _move_shards(self) -> None:
        self._place([parameter.local for parameter in self.parameters])

    def write_back(self) -> None:
        """Copy the values of replaced parameters into the shard buffer, and register the shards again."""
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            value = value_of(parameter.sharded)
            if value is not parameter.local:
                parameter.local.copy_(_local_rows(value, slot, self.mesh.rank))
                parameter.place(parameter.local)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the unsharded buffer and the messages of its all-gathers hold at the moment."""
        all_gathers = (self._all_gather, self._subgroup_all_gather)
        return super().allocated_bytes + sum(each.in_flight_bytes for each in all_gathers if each is not None)

    def copies(self, gradients: bool = False) -> UnshardedCopies:
        """Copies of the unsharded parameters, or of their gradients, in the dtype of the shards."""
        shard = self.shard_buffer
        if gradients:
            shard = torch.zeros_like(shard)
            for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
                if parameter.sharded.grad is not None:
                    _shard_of(shard, slot, self.mesh.rank).copy_(value_of(parameter.sharded.grad))
        return self._copies(self.layout, shard)

    def _copies(self, layout: PerParameterLayout, shard: torch.Tensor) -> UnshardedCopies:
        buffer = Buffer(layout.unsharded_numel, shard.dtype, self.mesh.device)
        values = [buffer.tensor(s.unsharded_offset, s.parameter.shape, s.parameter.stride) for s in layout.slots]
        return UnshardedCopies(PerParameterAllGather(layout, shard, buffer, self.mesh.exact_transport), values, buffer)

    def _copies_of(
        self, parameters: Sequence[ShardedParameter], dtype: torch.dtype, all_gather: Callable[[BucketAllGather], None]
    ) -> list[torch.Tensor]:
        mesh = self.mesh
        layout = PerParameterLayout.build(
            [parameter.shape for parameter in parameters],
            world_size=mesh.world_size,
            itemsize=dtype.itemsize,
            direct_bytes=mesh.exact_transport.direct_bytes,
        )
        shard = torch.empty(layout.shard_numel, dtype=dtype, device=mesh.device)
        for parameter, slot in zip(parameters, layout.slots, strict=True):
            _shard_of(shard, slot, mesh.rank).copy_(parameter.local)
        copies = self._copies(layout, shard)
        all_gather(copies.all_gather)
        return copies.values

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of unsharded ``values``."""
        return [_local_rows(v, slot, self.mesh.rank) for v, slot in zip(values, self.layout.slots, strict=True)]

    def never_quantized(self, index: int, kind: Kind) -> str:
        """Replicated parameters are not quantized, nor gradients of frozen ones."""
        reason = super().never_quantized(index, kind)
        return reason or ("on every rank anyway" if self.layout.slots[index].route is Route.REPLICATED else "")

    def _offset_on_one_rank(self, index: int) -> int:
        return self.layout.slots[index].shard_offset

    def _make_all_gather(self, unsharded: Buffer) -> PerParameterAllGather:
        return PerParameterAllGather(self.layout, self.shard_buffer, unsharded, self.mesh.transport)

    # ---------------------------------------------------------------- reshard to a subgroup

    def _all_gathers(self, from_subgroup: bool) -> list[BucketAllGather]:
        all_gathers = super()._all_gathers(from_subgroup)
        kept = self._subgroup_shard is not None and self._subgroup_shard.allocated_bytes > 0
        return [self._subgroup_all_gather] if from_subgroup and kept and self._subgroup_all_gather else all_gathers

    def reshard_to_subgroup(self, size: int) -> None:
        """Keep this rank's rows of the unsharded parameters over ``size`` consecutive ranks, to unshard from next."""
        if self._unsharded is None or self.mesh.world_size == 1:
            return
        if self._subgroup_all_gather is None or self._subgroup_all_gather.layout.world_size != size:
            self._plan_subgroup(size, self._unsharded)
        all_gather, shard, unsharded = self._subgroup_all_gather, self._subgroup_shard, self._unsharded
        assert all_gather is not None and shard is not None
        shard.allocate()
        rank = self.mesh.subgroup(size).rank
        targets, sources = [], []
        for slot in all_gather.layout.slots:
            own, rows = slot.parameter, slot.local_shape(rank)
            start = slot.local_rows(rank)[0] * (own.stride[own.cut] if rows else 0)
            targets.append(_shard_of(all_gather.shard, slot, rank))
            sources.append(unsharded.tensor(slot.unsharded_offset + start, rows, own.stride))
        torch._foreach_copy_(targets, sources)

    def free_subgroup_shard(self) -> None:
        """Free the rows that :meth:`reshard_to_subgroup` kept."""
        if self._subgroup_shard is not None:
            self._subgroup_shard.free()

    def _plan_subgroup(self, size: int, unsharded: Buffer) -> None:
        transport = self.mesh.subgroup(size)
        layout = PerParameterLayout.build(
            [p.shape for p in self.parameters],
            world_size=size,
            itemsize=unsharded.dtype.itemsize,
            direct_bytes=transport.direct_bytes,
            within=self.layout,
        )
        self._subgroup_shard = Buffer(layout.shard_numel, unsharded.dtype, unsharded.device)
        shard = self._subgroup_shard.tensor(0, (layout.shard_numel,), (1,))
        self._subgroup_all_gather = PerParameterAllGather(layout, shard, unsharded, transport)
        self._subgroup_shard.free()


def _shard_of(buffer: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """The rows of one parameter that ``rank`` holds, on a shard buffer."""
    return buffer.as_strided(slot.local_shape(rank), slot.local_stride(rank), slot.shard_offset)


def _local_rows(value: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """The rows of ``value`` that ``rank`` holds; ``value`` may be the whole tensor or those rows already."""
    shape = slot.local_shape(rank)
    if tuple(value.shape) == shape:
        return value
    start, stop = slot.local_rows(rank)
    return value.narrow(slot.parameter.cut, start, stop - start)
