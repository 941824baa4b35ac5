"""The bucket of ragged parameters: slices end between rows, or wherever the parameters may be cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import FlatAllGather
from fullshard.engine.buckets.slices import SliceBucket
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.ragged import RaggedParameter
from fullshard.engine.parameters.sharded import value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.layout import FlatLayout, FlatShard, ragged_layout
from fullshard.memory import Buffer, own_storage

__all__ = ["RaggedBucket"]


class RaggedBucket(SliceBucket):
    """Parameters as ``RaggedDTensor``s on one slice per rank."""

    ragged_parameters: list[RaggedParameter]  # the parameters, by their type

    def __init__(self, parameters: Sequence[RaggedParameter], mesh: ShardMesh, storage: Storage) -> None:
        self.ragged_parameters = list(parameters)
        super().__init__(parameters, mesh, storage)

    def _make_layout(self, itemsize: int) -> FlatLayout:
        shapes = [parameter.shape for parameter in self.ragged_parameters]
        return ragged_layout(
            shapes,
            [parameter.granularity for parameter in self.ragged_parameters],
            world_size=self.mesh.world_size,
            alignment=max(4, 16 // itemsize),  # as vectorized kernels want it
            first_rank=self.ragged_parameters[0].first_rank,
        )

    def _view(self, buffer: torch.Tensor, parameter: SliceParameter, shard: FlatShard) -> torch.Tensor:
        assert isinstance(parameter, RaggedParameter)
        placement, rank = parameter.ragged_placement(), self.mesh.rank
        shape, stride = placement.local_shape(rank), placement.local_stride(rank)
        if not shard.numel:  # memory of its own: a view at the end of the buffer has none, and cannot be saved
            return torch.empty_strided(shape, stride, dtype=buffer.dtype, device=buffer.device)
        return own_storage(buffer.as_strided(shape, stride, shard.offset))

    def write_back(self) -> None:
        """Copy the values of replaced parameters into the slice, and register the shards again."""
        for parameter in self.ragged_parameters:
            value = value_of(parameter.sharded)
            if value is not parameter.local:
                parameter.local.copy_(parameter.local_part(value))
                parameter.place(parameter.local)

    def _gradient_shards(self) -> torch.Tensor:
        shard = torch.zeros_like(self.shard_buffer, dtype=self._gradient_dtype)
        for parameter in self.ragged_parameters:
            if parameter.sharded.grad is not None and parameter.shard is not None:
                self._view(shard, parameter, parameter.shard).copy_(value_of(parameter.sharded.grad))
        return shard

    # ---------------------------------------------------------------- reshard to a subgroup

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the unsharded buffer, and the slice kept for a subgroup, hold at the moment."""
        return super().allocated_bytes + (0 if self._subgroup_shard is None else self._subgroup_shard.allocated_bytes)

    def reshard_to_subgroup(self, size: int) -> None:
        """Keep this rank's slice of the unsharded buffer over ``size`` consecutive ranks, to unshard from next."""
        unsharded = self._unsharded
        if unsharded is None or not self.is_unsharded or self.mesh.world_size == 1:
            return
        transport, numel = self.mesh.subgroup(size), self.layout.unsharded_numel // size
        if self._subgroup_all_gather is None or self._subgroup_all_gather.transport is not transport:
            shard = Buffer(numel, unsharded.dtype, unsharded.device)
            own = shard.tensor(0, (numel,), (1,))
            self._subgroup_all_gather = FlatAllGather(numel, own, unsharded, transport)
            self._subgroup_shard = shard
        assert self._subgroup_shard is not None
        self._subgroup_shard.allocate()
        kept = self._subgroup_shard.tensor(0, (numel,), (1,))
        kept.copy_(unsharded.tensor(transport.rank * numel, (numel,), (1,)))
