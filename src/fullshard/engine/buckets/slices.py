"""Buckets that are cut into equal slices, one for each rank, wherever in a parameter a slice may end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.base import Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import FlatAllGather, issue_all_gathers
from fullshard.engine.buckets.base import BufferBucket
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.reduction.plan import ReductionPlan
from fullshard.engine.reduction.slice_plan import plan_slices
from fullshard.layout import FlatLayout
from fullshard.memory import Buffer, make_comm_stream

__all__ = ["SliceBucket"]


class SliceBucket(BufferBucket):
    """One slice of the parameters of the bucket per rank, and one collective each way.

    How parameters are laid out, and which view of the slice is the shard of one, is for their class to say.
    """

    layout: FlatLayout
    slice_parameters: Sequence[SliceParameter]  # the parameters, by their type

    def __init__(self, parameters: Sequence[SliceParameter], mesh: ShardMesh, storage: Storage) -> None:
        super().__init__(parameters, mesh, storage)
        self.slice_parameters = parameters
        values = [value_of(parameter.sharded) for parameter in parameters]
        itemsize = min(values[0].dtype.itemsize, storage.param_dtype.itemsize)
        alignment = max(4, 16 // itemsize)  # as vectorized kernels want it
        self.layout = self._cut_before() or parameters[0].lay_out(parameters, mesh.world_size, alignment)
        self.shard_buffer = self._new_shard_buffer(self.layout.slice_numel, values[0])
        shards, together = self.layout.shards(mesh.rank), object()
        for parameter, slot, shard, value in zip(parameters, self.layout.slots, shards, values, strict=True):
            parameter.shard, parameter.slot = shard, slot
            if parameter.original_layout is None:
                parameter.original_layout, parameter.cut_together = self.layout, together
            local = parameter.shard_on(self.shard_buffer)
            if shard.numel:
                local.copy_(parameter.local_part(value))
            parameter.place(local)

    def _cut_before(self) -> FlatLayout | None:
        """The layout by which the parameters were cut, as far as they are here; None if they are whole."""
        slots = [p.slot for p in self.slice_parameters if p.slot is not None]
        cut = self.slice_parameters[0].original_layout
        if cut is None or len(slots) != len(self.slice_parameters):
            return None
        return FlatLayout(tuple(slots), cut.world_size, cut.slice_numel)

    def _shard_on(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        return self.slice_parameters[index].shard_on(buffer)

    def _where(self, index: int) -> str:
        first, of_rank = self.layout.slots[index].unsharded_offset, self.layout.slice_numel
        return f"from element {first} of all, in slices of {of_rank} elements"

    def restore(self) -> None:
        """Make the parameters whole: a slice cuts them at places that depend on what else lies in the bucket."""
        copies = self.copies()
        issue_all_gathers([("", copies.all_gather)], make_comm_stream(self.mesh.device)).wait()
        for parameter, value in zip(self.slice_parameters, copies.values, strict=True):
            device = parameter.local.device
            parameter.forget_layout(value.clone() if device == value.device else value.to(device))
        copies.buffer.free()

    def _plan_subgroup(self, unsharded: Buffer, transport: Transport) -> FlatAllGather:
        numel = self.layout.unsharded_numel // transport.world_size
        kept = Buffer(numel, unsharded.dtype, unsharded.device)
        shard = kept.tensor(0, (numel,), (1,))
        kept.free()
        source = unsharded.tensor(transport.rank * numel, (numel,), (1,))
        self._subgroup_shard, self._subgroup_copies = kept, ([shard], [source])
        return FlatAllGather(numel, shard, unsharded, transport)

    # ---------------------------------------------------------------- reduce

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        return self._all if trainable else ()

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(len(self.parameters)))

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        return plan_slices(parameters, self.mesh, self.storage, self.layout)

    def _make_all_gather(
        self, layout: FlatLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> FlatAllGather:
        return FlatAllGather(layout.slice_numel, shard, unsharded, transport)
