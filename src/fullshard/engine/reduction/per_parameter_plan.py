"""The reduction of parameters that are cut one by one: large gradients are sent as they are, the others packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fullshard.comm import Operand, slices_of
from fullshard.comm.mesh import ShardMesh
from fullshard.engine.buckets.storage import Storage
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.plan import Gradients, ReductionPlan, ShardView
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot
from fullshard.memory import Buffer

__all__ = ["PerParameterReductionPlan"]


class _PackCopy(NamedTuple):
    """One copy from a gradient (seen with ``shape`` and ``stride`` from ``offset``) into the message."""

    gradient: int  # index of the parameter
    target: torch.Tensor  # in our own message
    start: int  # of the target in the message
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class PerParameterReductionPlan(ReductionPlan):
    """The reduction of parameters that are cut one by one.

    Args:
        layout: Of the parameters, and behind them the presence numbers.
        copies: Pack gradients into the message.
    """

    layout: PerParameterLayout
    copies: tuple[_PackCopy, ...]

    @classmethod
    def build(
        cls, parameters: Sequence[ShardedParameter], mesh: ShardMesh, storage: Storage
    ) -> PerParameterReductionPlan:
        """Plan the reduction of some parameters of a bucket."""
        dtype = storage.reduce_dtype
        sharded_dtype = dtype if storage.keep_reduced else parameters[0].local.dtype
        shapes = [parameter.shape for parameter in parameters]
        communicates = mesh.world_size > 1 or mesh.replicas > 1
        if communicates:
            shapes.append(ParameterShape("<presence>", (len(parameters),), (1,), replicated=True))
        layout = PerParameterLayout.build(
            shapes,
            world_size=mesh.world_size,
            itemsize=min(dtype.itemsize, sharded_dtype.itemsize),
            direct_bytes=max(mesh.transport.direct_bytes, mesh.replica_transport.direct_bytes),
        )
        message = Buffer(layout.message_numel * mesh.world_size, dtype, mesh.device)
        # Without a shard axis, direct gradients are tensors of shards themselves.
        in_place = mesh.world_size == 1
        start = layout.message_offset if in_place else 0
        direct: dict[int, Slot] = {}
        copies: list[_PackCopy] = []
        views = []
        for index, slot in enumerate(layout.slots):
            if slot.route is Route.DIRECT:
                direct[index] = slot
            elif slot.shard_numel:
                copies += _pack_copies(index, slot, layout, message)
            alone = slot.route is Route.DIRECT and in_place
            where = (len(direct), 0) if alone else (0, slot.shard_offset - start)
            views.append(ShardView(*where, slot.local_shape(mesh.rank), slot.local_stride(mesh.rank)))
        plan = cls(
            parameters=tuple(parameters),
            mesh=mesh,
            storage=storage,
            views=tuple(views[: len(parameters)]),
            presence=views[-1] if communicates else None,
            shards_numel=layout.shard_numel - start,
            slices=slices_of(layout, start, dtype.itemsize),
            direct=direct,
            message=message,
            message_tensor=message.tensor(0, (message.numel,), (1,)),
            layout=layout,
            copies=tuple(copies),
        )
        message.free()
        return plan

    def packed_operands(self, shards: torch.Tensor, message: torch.Tensor) -> list[Operand]:
        """One operand: the message, into the packed part of the shards."""
        start, numel = self.layout.message_offset, self.layout.message_numel
        slices = slices_of(self.layout, start, self.dtype.itemsize)
        return [Operand(shards.narrow(0, start, numel), message, slices)]

    @property
    def zeroes_message(self) -> bool:
        """True if a transport quantizes the padding in the message together with gradients.

        Nothing is written between gradients, nor behind the last rows where ranks do not have equally many. What is
        there also gets into the shards that are reduced over replicas.
        """
        return self.mesh.transport.reads_padding or self.mesh.replica_transport.reads_padding

    def pack(self, inputs: Gradients, target: torch.Tensor) -> None:
        """Copy small gradients, zeros for missing ones, and presence numbers into the message."""
        targets, sources = [], []
        for copy in self.copies:
            place = copy.target
            if target is not self.message_tensor:
                place = target.as_strided(place.shape, place.stride(), target.storage_offset() + copy.start)
            gradient = inputs[copy.gradient]
            if gradient is None:
                place.zero_()
            else:
                targets.append(place)
                offset = gradient.storage_offset() + copy.offset
                sources.append(gradient.as_strided(copy.shape, copy.stride, offset))
        if targets:
            torch._foreach_copy_(targets, sources)


def _pack_copies(index: int, slot: Slot, layout: PerParameterLayout, message: Buffer) -> Iterator[_PackCopy]:
    """The copies from one gradient to the message: at most two."""
    world_size, section = layout.world_size, layout.message_numel
    start, numel, shape = slot.shard_offset - layout.message_offset, slot.shard_numel, slot.parameter

    def copy(
        rank: int, target: tuple[int, ...], strides: tuple[int, ...], offset: int, source: tuple[int, ...]
    ) -> _PackCopy:
        position = start + rank * section
        return _PackCopy(index, message.tensor(position, target, strides), position, offset, target, source)

    if slot.route is Route.REPLICATED:
        yield copy(0, (world_size, numel), (section, 1), 0, (0, 1))
    elif slot.row_major:
        whole, rest = divmod(shape.numel, numel)
        if whole:
            yield copy(0, (whole, numel), (section, 1), 0, (numel, 1))
        if rest:
            yield copy(whole, (rest,), (1,), whole * numel, (1,))
    else:
        whole, rest = divmod(slot.rows, slot.chunk_rows)
        step = slot.chunk_rows * shape.stride[shape.cut]  # from the rows of one rank to those of the next
        if whole:
            rows = (whole, *slot.local_shape(0))
            yield copy(0, rows, (section, *slot.local_stride(0)), 0, (step, *shape.stride))
        if rest:
            yield copy(whole, slot.local_shape(whole), slot.local_stride(whole), whole * step, shape.stride)
