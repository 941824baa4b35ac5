"""The bucket of flattened parameters: they lie one after another and are cut into equal slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from fullshard.comm.base import Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import BucketAllGather, FlatAllGather, issue_all_gathers
from fullshard.engine.buckets.base import BufferBucket
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle, FlatShardedParameter, shard_view
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.reduction.flat_plan import plan_flat
from fullshard.engine.reduction.plan import ReductionPlan
from fullshard.layout import FlatLayout
from fullshard.memory import Buffer, make_comm_stream

__all__ = ["FlatBucket"]


class FlatBucket(BufferBucket):
    """One slice of the flattened parameters per rank, and one collective each way."""

    layout: FlatLayout
    flat_parameters: list[FlatShardedParameter]  # the parameters, by their type

    def __init__(self, parameters: Sequence[FlatShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        super().__init__(parameters, mesh, storage)
        self.flat_parameters = cast("list[FlatShardedParameter]", self.parameters)
        values = [value_of(parameter.sharded) for parameter in parameters]
        self.layout = self._make_layout(min(values[0].dtype.itemsize, storage.param_dtype.itemsize))
        self.shard_buffer = self._new_shard_buffer(self.layout.slice_numel, values[0])
        shards, together, whole = self.layout.shards(mesh.rank), object(), mesh.world_size == 1
        for parameter, slot, shard, value in zip(parameters, self.layout.slots, shards, values, strict=True):
            if parameter.shard is None:
                parameter.sharded.grad = None  # from before: this rank's own, of the whole parameter
            parameter.shard, parameter.slot = shard, slot
            if parameter.original_layout is None:
                parameter.original_layout, parameter.cut_together = self.layout, together
            parameter.local = local = shard_view(self.shard_buffer, shard, parameter, whole=whole)
            if shard.numel:
                local.copy_(parameter.local_part(value))
            parameter.place(local)
            if storage.keep_reduced:
                parameter.gradient_dtype = storage.reduce_dtype
                _set_gradient_dtype(parameter.sharded, storage.reduce_dtype)

    def _make_layout(self, itemsize: int) -> FlatLayout:
        """The layout by which the parameters were cut, as far as they are here; a new one for whole parameters."""
        slots = [p.slot for p in self.flat_parameters if p.slot is not None]
        cut = self.flat_parameters[0].original_layout
        if cut is not None and len(slots) == len(self.flat_parameters):
            return FlatLayout(tuple(slots), cut.world_size, cut.slice_numel)
        shapes = [parameter.shape for parameter in self.parameters]
        # Aligned as vectorized kernels want it.
        return FlatLayout.build(shapes, world_size=self.mesh.world_size, alignment=max(4, 16 // itemsize))

    def show(self, handle: FlatParamHandle) -> None:
        """Make the flat parameter of ``handle`` the one that users see."""
        self.handle = handle
        for parameter in self.flat_parameters:
            parameter.handle = handle
        layout, last = self.layout, self.layout.slots[-1]
        end = last.unsharded_offset + last.parameter.numel
        # DTensors are cut as torch.chunk cuts: only where that gives our slices can the padding be left out.
        handle.numel = end if -(-end // layout.world_size) == layout.slice_numel else layout.unsharded_numel
        if self.storage.keep_reduced:
            _set_gradient_dtype(handle.flat, self.storage.reduce_dtype)

    def write_back(self) -> None:
        """Copy the values of replaced parameters into the slice, and register the shards again."""
        for parameter in self.flat_parameters:
            if not parameter.is_in_place():
                parameter.local.copy_(parameter.local_part(value_of(parameter.sharded)))
                parameter.place(parameter.local)
        if self.handle is not None:
            self.handle.point_at(self.shard_buffer)

    def restore(self) -> None:
        """Make the parameters whole: a slice cuts them at places that depend on what else lies in the bucket."""
        copies = self.copies()
        issue_all_gathers([("", copies.all_gather)], make_comm_stream(self.mesh.device)).wait()
        for parameter, value in zip(self.flat_parameters, copies.values, strict=True):
            parameter.sharded.requires_grad_(parameter.requires_grad)
            parameter.shard = parameter.slot = parameter.original_layout = parameter.handle = None
            parameter.cut_together = None
            device = parameter.local.device
            parameter.place(value.clone() if device == value.device else value.to(device))
        copies.buffer.free()

    def _copies_of(
        self, parameters: Sequence[ShardedParameter], dtype: torch.dtype, all_gather: Callable[[BucketAllGather], None]
    ) -> list[torch.Tensor]:
        """All of the bucket by an all-gather; a part of it by broadcasts of the ranks on whose slices it lies."""
        if len(parameters) == len(self.parameters):
            copies = self._copies(self.layout, self.shard_buffer, dtype)
            all_gather(copies.all_gather)
            return copies.values
        wanted = {id(parameter) for parameter in parameters}
        slots = [s for p, s in zip(self.parameters, self.layout.slots, strict=True) if id(p) in wanted]
        begin, end = slots[0].unsharded_offset, slots[-1].unsharded_offset + slots[-1].parameter.numel
        buffer = Buffer(end - begin, dtype, self.mesh.device)
        assert self.mesh.shard is not None
        group, numel, works = self.mesh.shard.get_group(), self.layout.slice_numel, []
        for rank in range(begin // numel, -(-end // numel)):
            first, last = max(begin, rank * numel), min(end, (rank + 1) * numel)
            if first == last:
                continue
            part = buffer.tensor(first - begin, (last - first,), (1,))
            if rank == self.mesh.rank:
                part.copy_(self.shard_buffer[first - rank * numel : last - rank * numel])
            works.append(dist.broadcast(part, group=group, group_src=rank, async_op=True))
        for work in works:
            work.wait()
        return [buffer.tensor(s.unsharded_offset - begin, s.parameter.shape, s.parameter.stride) for s in slots]

    def _gradient_shards(self) -> torch.Tensor:
        if self.handle is not None and self.handle.flat.grad is not None:
            return self.handle.flat.grad
        slice_ = torch.zeros_like(self.shard_buffer, dtype=self.flat_parameters[0].gradient_dtype)
        for parameter in self.flat_parameters:
            if parameter.sharded.grad is not None and parameter.shard is not None:
                target = slice_.narrow(0, parameter.shard.offset, parameter.shard.numel)
                target.as_strided(parameter.local.shape, parameter.local.stride()).copy_(parameter.sharded.grad)
        return slice_

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts of unsharded ``values``, as they lie in its slice."""
        return [p.local_part(value) for p, value in zip(self.flat_parameters, values, strict=True)]

    def quantized_together(self, index: int) -> tuple[int, str]:
        """Elements of the whole bucket, which is sent as one."""
        return self.layout.unsharded_numel, "its whole unit: "

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        return tuple(range(len(self.parameters))) if trainable else ()

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        return plan_flat(parameters, self.mesh, self.storage, self.layout, self.handle)

    def _make_all_gather(
        self, layout: FlatLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> FlatAllGather:
        return FlatAllGather(layout, shard, unsharded, transport)


def _set_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Have gradients of this dtype, also one that is there (and that a move has cast)."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
