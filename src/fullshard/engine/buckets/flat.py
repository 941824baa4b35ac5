"""The bucket of flattened parameters: they lie one after another, and their shards are 1-D."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.slices import SliceBucket
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.flat import FlatParamHandle, FlatShardedParameter, shard_view
from fullshard.engine.parameters.sharded import value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.layout import FlatLayout, FlatShard

__all__ = ["FlatBucket"]


class FlatBucket(SliceBucket):
    """Flattened parameters: the shards are 1-D."""

    flat_parameters: list[FlatShardedParameter]  # the parameters, by their type

    def __init__(self, parameters: Sequence[FlatShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        self.flat_parameters = list(parameters)
        super().__init__(parameters, mesh, storage)
        if storage.keep_reduced:
            for parameter in self.flat_parameters:
                _set_gradient_dtype(parameter.sharded, storage.reduce_dtype)

    def _before_placing(self, parameter: SliceParameter) -> None:
        if parameter.shard is None:
            parameter.sharded.grad = None  # from before: this rank's own, of the whole parameter

    def _view(self, buffer: torch.Tensor, parameter: SliceParameter, shard: FlatShard) -> torch.Tensor:
        return shard_view(buffer, shard, parameter, whole=self.mesh.world_size == 1)

    def _make_layout(self, itemsize: int) -> FlatLayout:
        shapes = [parameter.shape for parameter in self.parameters]
        # Aligned as vectorized kernels want it.
        return FlatLayout.build(shapes, world_size=self.mesh.world_size, alignment=max(4, 16 // itemsize))

    def show(self, handle: FlatParamHandle) -> None:
        """Make the flat parameter of ``handle`` the one that users see."""
        self.handle = handle
        for parameter in self.flat_parameters:
            parameter.handle = handle
            if parameter.shard is not None and parameter.shard.numel:  # on the storage that users may free and refill
                start = parameter.shard.offset
                local = parameter.local
                parameter.place(self.shard_buffer.as_strided(local.shape, local.stride(), start))
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

    def _gradient_shards(self) -> torch.Tensor:
        if self.handle is not None and self.handle.flat.grad is not None:
            return self.handle.flat.grad
        slice_ = torch.zeros_like(self.shard_buffer, dtype=self._gradient_dtype)
        for parameter in self.flat_parameters:
            if parameter.sharded.grad is not None and parameter.shard is not None:
                target = slice_.narrow(0, parameter.shard.offset, parameter.shard.numel)
                target.as_strided(parameter.local.shape, parameter.local.stride()).copy_(parameter.sharded.grad)
        return slice_


def _set_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Have gradients of this dtype, also one that is there (and that a move has cast)."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
