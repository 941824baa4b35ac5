"""The packed message of a bucket: which parameters, or gradients, lie in it, where, and how they are copied out.

[Note: Packed copies]
The message has a *section* per rank, with the shards of all packed parameters side by side. Read as a matrix with a row
per rank, a parameter whose shards are blocks of memory is some *columns* of it. Between the message and the parameters,
source and target of a copy differ in strides, so that foreach kernels take one kernel per parameter. On GPUs torch has
one kernel for all columns, in either direction: ``split_with_sizes_copy`` and ``_chunk_cat``. They take all columns of
the matrix: what lies between shards goes to, or comes from, a little memory for padding. On CPU these functions are
loops over copies, and slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fullshard.comm.base import Kind, Transport
from fullshard.engine.parameters.tensor_shards import View
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot, direct_shards
from fullshard.memory import Buffer

__all__ = ["Column", "MessageCopy", "Unpacking", "lay_out", "map_message"]


class Column(NamedTuple):
    """Neighboring columns of the message, see [Note: Packed copies]."""

    numel: int  # in every rank's section
    slot: int | None  # index of the parameter that they hold; None: padding, or what is not in whole blocks
    rows: tuple[int, int]  # of the parameter: size of the cut dim, and elements of a row


class MessageCopy(NamedTuple):
    """One copy between a parameter, or its gradient, and the message."""

    slot: int  # index of the parameter
    parameter: View
    message: View


def lay_out(
    shapes: list[ParameterShape],
    transport: Transport,
    itemsize: int,
    kind: Kind = "all_gather",
    *,
    copied: bool = False,
    ranks: int | None = None,
    within: PerParameterLayout | None = None,
) -> PerParameterLayout:
    """Lay out parameters for the collectives of ``transport``, which says which shards are sent packed.

    Args:
        shapes: Of the parameters.
        transport: Of the collectives.
        itemsize: Bytes per element of the smallest dtype in which a buffer of the layout is held.
        kind: Of the collectives.
        copied: What is sent is copied in any case, because its dtype is not the one in which it is sent.
        ranks: That the parameters are cut over. None: those of ``transport``.
        within: As for ``PerParameterLayout.build``.
    """
    ranks = transport.world_size if ranks is None else ranks
    smallest = transport.smallest_direct(kind, direct_shards(shapes, ranks, itemsize), copied=copied)
    return PerParameterLayout.build(
        tuple(shapes), world_size=ranks, itemsize=itemsize, direct_bytes=smallest, within=within
    )


def map_message(
    layout: PerParameterLayout, transport: Transport, *, unpack: bool, repeated: int | None = None
) -> tuple[list[Column], list[MessageCopy]]:
    """Return all columns of the message, in order, and the copies of what is not copied by columns.

    There are no columns if much of the message does not lie in whole blocks, or if copies of single parameters are as
    fast where the transport runs.

    Args:
        layout: With the message.
        transport: That sends the message.
        unpack: From the message to unsharded parameters, which have room for padding. If not: from gradients, which
            have none, to the message, where every rank's part has all of a replicated parameter.
        repeated: Index of a replicated parameter that is given as one row per rank.
    """
    packed = [
        (s.shard_offset, i, s) for i, s in enumerate(layout.slots) if s.shard_numel and s.route is not Route.DIRECT
    ]
    columns, end = [], layout.message_offset
    for offset, index, slot in sorted(packed) if transport.copies_columns and layout.world_size > 1 else ():
        if offset > end:
            columns.append(Column(offset - end, None, (0, 0)))
        rows = (layout.world_size, slot.shard_numel) if index == repeated else (slot.rows, slot.row_numel)
        blocks = slot.row_major and (slot.route is not Route.REPLICATED or index == repeated)
        columns.append(Column(slot.shard_numel, index if blocks else None, rows))
        end = offset + slot.shard_numel
    rest = layout.message_offset + layout.message_numel - end
    if columns and rest:
        columns.append(Column(rest, None, (0, 0)))
    if 8 * sum(column.numel for column in columns if column.slot is None) > layout.message_numel:
        columns = []
    by_column = {column.slot for column in columns}
    others = ((index, slot) for _, index, slot in packed if index not in by_column)
    return columns, [copy for index, slot in others for copy in _copies_of(index, slot, layout, unpack=unpack)]


def _copies_of(index: int, slot: Slot, layout: PerParameterLayout, *, unpack: bool) -> Iterator[MessageCopy]:
    """Yield the copies between one parameter and the message of all ranks: one, or two if the last shard is smaller."""
    world_size, section = layout.world_size, layout.message_numel  # the message has a section per rank
    start, numel, own = slot.shard_offset - layout.message_offset, slot.shard_numel, slot.parameter
    if slot.route is Route.REPLICATED and unpack:
        yield MessageCopy(index, View(0, (numel,), (1,)), View(start, (numel,), (1,)))
    elif slot.route is Route.REPLICATED:
        yield MessageCopy(index, View(0, (world_size, numel), (0, 1)), View(start, (world_size, numel), (section, 1)))
    elif slot.row_major:
        whole, rest = (world_size, 0) if unpack else divmod(own.numel, numel)
        if whole:
            yield MessageCopy(index, View(0, (whole, numel), (numel, 1)), View(start, (whole, numel), (section, 1)))
        if rest:
            yield MessageCopy(index, View(whole * numel, (rest,), (1,)), View(start + whole * section, (rest,), (1,)))
    else:
        whole, rest = divmod(slot.rows, slot.chunk_rows)
        step = slot.chunk_rows * own.stride[own.cut]  # from the rows of one rank to those of the next
        if whole:
            rows = (whole, *slot.local_shape(0))
            message = View(start, rows, (section, *slot.local_stride(0)))
            yield MessageCopy(index, View(0, rows, (step, *own.stride)), message)
        if rest:
            rows, place = slot.local_shape(whole), start + whole * section
            yield MessageCopy(index, View(whole * step, rows, own.stride), View(place, rows, slot.local_stride(whole)))


class Unpacking:
    """The copies of packed parameters from a message into the unsharded buffer, see [Note: Packed copies].

    Args:
        layout: With the message.
        unsharded: The buffer to copy to.
        transport: That sends the message.
    """

    _world_size: int
    _sizes: list[int]  # of the columns; empty: no parameter is copied by columns
    _columns: list[torch.Tensor]  # where they are copied to
    _padding: Buffer | None  # where those without a parameter are copied to; memory only while they are
    targets: list[torch.Tensor]  # in the unsharded buffer, of what is copied one by one
    _views: list[View]  # where it is copied from, on the message

    def __init__(self, layout: PerParameterLayout, unsharded: Buffer, transport: Transport) -> None:
        columns, copies = map_message(layout, transport, unpack=True)
        self._world_size, self._padding = layout.world_size, None
        self._sizes = [column.numel for column in columns]
        self._columns = self._column_targets(columns, layout, unsharded)
        self._views = [copy.message for copy in copies]
        self.targets = [
            unsharded.tensor(layout.slots[index].unsharded_offset + own.offset, own.shape, own.stride)
            for index, own, _ in copies
        ]

    def _column_targets(
        self, columns: list[Column], layout: PerParameterLayout, unsharded: Buffer
    ) -> list[torch.Tensor]:
        ranks, targets, end = self._world_size, [], 0
        padding = sum(column.numel for column in columns if column.slot is None) * ranks
        self._padding = Buffer(padding, unsharded.dtype, unsharded.device) if padding else None
        for numel, index, _ in columns:
            buffer, offset = unsharded, end
            if index is None:
                assert self._padding is not None
                buffer, end = self._padding, end + numel * ranks
            else:
                offset = layout.slots[index].unsharded_offset
            targets.append(buffer.tensor(offset, (ranks, numel), (numel, 1)))
        return targets

    def allocate(self) -> None:
        """Give memory to the padding."""
        if self._padding is not None:
            self._padding.allocate()

    def free(self) -> None:
        """Free the memory of the padding."""
        if self._padding is not None:
            self._padding.free()

    def sources(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of ``message`` from which parameters are copied one by one, to ``targets``."""
        return [view.on(message) for view in self._views]

    def copy_columns(self, message: torch.Tensor) -> None:
        """Copy what is copied by columns out of ``message``, the flat message of all ranks."""
        if self._sizes:
            torch.split_with_sizes_copy(message.view(self._world_size, -1), self._sizes, dim=1, out=self._columns)
