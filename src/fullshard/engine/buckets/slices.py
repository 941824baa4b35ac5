"""Buckets that are cut into equal slices, one for each rank, wherever in a parameter a slice may end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm.base import Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import BucketAllGather, FlatAllGather, issue_all_gathers
from fullshard.engine.buckets.base import BufferBucket
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.linear_weight import is_linear_weight, write_in_place
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.reduction.plan import ReductionPlan
from fullshard.engine.reduction.slice_plan import plan_slices
from fullshard.layout import FlatLayout, FlatShard
from fullshard.memory import Buffer, make_comm_stream

__all__ = ["SliceBucket"]


class SliceBucket(BufferBucket):
    """One slice of the parameters of the bucket per rank, and one collective each way."""

    layout: FlatLayout
    slice_parameters: Sequence[SliceParameter]  # the parameters, by their type
    _writes_in_place: bool  # gradients, see [Note: Gradients written in place]

    def __init__(self, parameters: Sequence[SliceParameter], mesh: ShardMesh, storage: Storage) -> None:
        super().__init__(parameters, mesh, storage)
        self.slice_parameters, self._writes_in_place = parameters, False
        values = [value_of(parameter.sharded) for parameter in parameters]
        self.layout = self._cut_before() or self._make_layout(
            min(values[0].dtype.itemsize, storage.param_dtype.itemsize)
        )
        self.shard_buffer = self._new_shard_buffer(self.layout.slice_numel, values[0])
        shards, together = self.layout.shards(mesh.rank), object()
        for parameter, slot, shard, value in zip(parameters, self.layout.slots, shards, values, strict=True):
            self._before_placing(parameter)
            parameter.shard, parameter.slot = shard, slot
            if parameter.original_layout is None:
                parameter.original_layout, parameter.cut_together = self.layout, together
            parameter.local = local = self._view(self.shard_buffer, parameter, shard)
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

    def _make_layout(self, itemsize: int) -> FlatLayout:
        """Lay out whole parameters, in buffers of at least ``itemsize`` bytes for each element."""
        raise NotImplementedError

    def _before_placing(self, parameter: SliceParameter) -> None:
        """Prepare a parameter that is about to be put on a new shard buffer."""

    def _view(self, buffer: torch.Tensor, parameter: SliceParameter, shard: FlatShard) -> torch.Tensor:
        """The view of ``buffer`` that is the shard of one parameter."""
        raise NotImplementedError

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

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts of unsharded ``values``, as they lie in its slice."""
        return [p.local_part(value) for p, value in zip(self.slice_parameters, values, strict=True)]

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
        begin = min(slot.unsharded_offset for slot in slots)
        end = max(slot.unsharded_offset + slot.parameter.numel for slot in slots)
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

    # ---------------------------------------------------------------- [Note: Gradients written in place]

    @property
    def never_in_place(self) -> str:
        """Why gradients cannot be written in place; empty if they can."""
        computed, reduced = self.storage.param_dtype, self.storage.reduce_dtype
        return "" if computed is reduced else f"it computes gradients in {computed} and reduces them in {reduced}"

    def write_gradients_in_place(self, enabled: bool) -> None:
        """Have backward write weight gradients of Linear layers where they are sent, if possible, or no longer."""
        enabled = enabled and not self.never_in_place
        if enabled is not self._writes_in_place:
            self._writes_in_place, self._plans = enabled, {}
            if self._made:
                self._mark_linear_weights()

    def _make_unsharded(self) -> None:
        super()._make_unsharded()
        self._mark_linear_weights()

    def _mark_linear_weights(self) -> None:
        if self.mesh.world_size == 1:
            return
        for index, parameter in enumerate(self.parameters):
            if is_linear_weight(parameter):
                place = partial(_place_in, weakref.ref(self), index) if self._writes_in_place else None
                write_in_place(parameter, place)

    def take_gradients(self, enabled: bool) -> None:
        """At the beginning of a backward: the message takes gradients; or none."""
        if self._writes_in_place:
            enabled = enabled and not self.mesh.transport.provides_memory("reduce_scatter")
            self._plan_of(self._all).message.take_gradients(enabled)

    def place_of_gradient(self, index: int) -> torch.Tensor | None:
        """Memory for the gradient of a parameter in the message; None if it takes none at the moment."""
        plan = self._plans.get(self._all)
        return None if plan is None else plan.message.place_of(index, self.parameters[index].shape)

    # ---------------------------------------------------------------- reduce

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        return self._all if trainable else ()

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(len(self.parameters)))

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        takes = self._writes_in_place
        return plan_slices(parameters, self.mesh, self.storage, self.layout, self.handle, takes_gradients=takes)

    def _make_all_gather(
        self, layout: FlatLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> FlatAllGather:
        return FlatAllGather(layout.slice_numel, shard, unsharded, transport)


def _place_in(bucket: weakref.ref[SliceBucket], index: int) -> torch.Tensor | None:
    """Memory for a gradient in the message of ``bucket``, to which unsharded parameters must not hold on."""
    found = bucket()
    return None if found is None else found.place_of_gradient(index)
