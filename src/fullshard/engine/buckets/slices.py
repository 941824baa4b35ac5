"""Buckets that are cut into equal slices, one for each rank, wherever in a parameter a slice may end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from fullshard.comm import Slice, Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.all_gather import issue_all_gathers
from fullshard.engine.buckets.base import BufferBucket
from fullshard.engine.buckets.message import Column, MessageCopy
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.parameters.tensor_shards import View
from fullshard.engine.reduction.plan import Packing, ReductionPlan
from fullshard.layout import FlatLayout
from fullshard.layout.per_parameter import LAYOUTS_KEPT
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
        cut = [parameter.slot for parameter in parameters if parameter.slot is not None]
        if len(cut) == len(parameters):  # by the layout of an earlier bucket, as far as its parameters are here
            self.layout = FlatLayout(tuple(cut), mesh.world_size, cut[0].slice_numel)
        else:
            self.layout = parameters[0].lay_out(parameters, mesh.world_size, alignment)
        self.shard_buffer = self._new_shard_buffer(self.layout.slice_numel, values[0])
        shards, together = self.layout.shards(mesh.rank), object()
        for parameter, slot, shard, value in zip(parameters, self.layout.slots, shards, values, strict=True):
            parameter.shard, parameter.slot = shard, slot
            if parameter.cut_together is None:
                parameter.cut_together = together
            local = parameter.shard_on(self.shard_buffer)
            if shard.numel:
                local.copy_(parameter.local_part(value))
            parameter.place(local)

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

    def _subgroup_layout(self, transport: Transport) -> FlatLayout:
        return FlatLayout((), transport.world_size, self.layout.unsharded_numel // transport.world_size)

    def _subgroup_parts(
        self, layout: FlatLayout, shard: torch.Tensor, unsharded: Buffer, rank: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [shard], [unsharded.tensor(rank * shard.numel(), tuple(shard.shape), (1,))]

    # ---------------------------------------------------------------- reduce

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        return tuple(range(len(self.parameters))) if trainable else ()

    def _make_plan(self, parameters: list[ShardedParameter]) -> ReductionPlan:
        """Plan the reduction of all parameters; presence numbers are an operand of their own behind them."""
        mesh, storage, layout = self.mesh, self.storage, self.layout
        ranks, numel = mesh.world_size, layout.slice_numel
        communicates = ranks > 1 or mesh.replicas > 1
        count = len(parameters) if communicates else 0
        shards = layout.shards(mesh.rank)
        locals_ = [(shard.offset, parameter.local) for shard, parameter in zip(shards, parameters, strict=True)]
        return ReductionPlan(
            parameters=tuple(parameters),
            mesh=mesh,
            storage=storage,
            views=tuple((0, View(at, tuple(local.shape), tuple(local.stride()))) for at, local in locals_),
            presence=View(numel, (count,), (1,)) if communicates else None,
            shards_numel=numel + count,
            slices=(Slice(0, numel, layout.unsharded_numel * storage.reduce_dtype.itemsize),),
            direct={},
            packed=tuple(part for part in ((0, numel), (numel, count)) if part[1]),
            packing=_packing(layout, communicates=communicates, by_columns=ranks > 1 and mesh.transport.copies_columns),
            together=parameters[0].optimized is not parameters[0].sharded,
        )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _packing(layout: FlatLayout, *, communicates: bool, by_columns: bool) -> Packing:
    """Pack gradients in the order of memory, zeros between them, and behind them all ranks' presence numbers."""
    ranks, sent, count = layout.world_size, layout.unsharded_numel, len(layout.slots) if communicates else 0
    spans = [(slot.unsharded_offset, slot.parameter.numel, index) for index, slot in enumerate(layout.slots)]
    columns, copies, gaps, end = [], [], [], 0
    for offset, numel, index in [*sorted(spans), (sent, ranks * count, len(spans))]:
        if offset > end:
            columns.append(Column(offset - end, None, (1, offset - end)))
            gaps.append(View(end, (offset - end,), (1,)))
        if numel:
            columns.append(Column(numel, index, (1, numel)))
            copies.append(MessageCopy(index, View(0, (numel,), (1,)), View(offset, (numel,), (1,))))
        end = offset + numel
    numel = 0 if ranks == 1 else end
    return Packing(numel, 1, columns=columns) if by_columns else Packing(numel, 1, copies, gaps)
