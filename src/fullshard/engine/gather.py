"""From shards to full buffers: how one buffer is filled from one group of ranks, planned once and run every step.

A gather is used in this order: ``allocate`` (memory, on the compute stream), ``copy_in`` and ``parcel`` (on the
lane: what this rank sends), the collective, ``copy_out`` (on the lane), ``arrived`` (after the wait).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from fullshard.layout import PerParameterLayout, Route, Slot
from fullshard.memory import Buffer, Event, Lane, Ticket, Work, alias
from fullshard.transport import Move, Parcel, Transport, launch_all

__all__ = ["BufferGather", "Gather", "issue_gathers"]


class Gather(Protocol):
    """One buffer that can be filled."""

    transport: Transport | None  # None: nothing travels, values are only copied

    def allocate(self) -> None:
        """Give memory to what is filled; on the compute stream."""

    def copy_in(self) -> None:
        """Prepare what this rank sends; on the lane."""

    def parcel(self, unit: str) -> Parcel:
        """What travels."""

    def copy_out(self) -> None:
        """Put what has arrived in its place; on the lane."""

    def arrived(self) -> None:
        """Free what was needed on the way; on the compute stream, which has waited."""

    def abandon(self) -> None:
        """The same where nothing has arrived, because it failed."""


def issue_gathers(gathers: Sequence[tuple[str, Gather]], lane: Lane, after: Event | None = None) -> Ticket:
    """Start filling several buffers, with the names of their units, in one launch per transport."""

    def allocate() -> None:
        for _, gather in gathers:
            gather.allocate()

    def launch() -> list[Work]:
        for _, gather in gathers:
            gather.copy_in()
        return launch_all(((gather.transport, gather.parcel(unit)) for unit, gather in gathers), Transport.gather)

    def finish() -> None:
        for _, gather in gathers:
            gather.copy_out()

    return lane.issue(launch, finish, allocate=allocate, after=after)


class _View(NamedTuple):
    """A tensor on a flat buffer, ``offset`` elements from its beginning."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class BufferGather:
    """Fills a full buffer from flat shard buffers.

    Args:
        layout: Over the ranks of ``transport``.
        source: This rank's shard: ``(layout.shard_numel,)``.
        full: The buffer to fill. If its dtype or device is not the source's, the shard is copied to a *wire*
            buffer first, in one kernel.
        transport: None on a single rank.
    """

    layout: PerParameterLayout
    transport: Transport | None
    source: torch.Tensor
    full: Buffer
    _wire: Buffer | None  # the shard as it travels; memory only while it does
    _message: Buffer | None  # the packed pieces of all ranks; memory only while they travel
    _foreign: torch.Tensor | None  # the same in the transport's own memory
    _moves: list[Move]  # of the direct parameters, and last of the packed ones
    _sent: torch.Tensor  # the shard, or the wire buffer
    _targets: list[torch.Tensor]  # in the full buffer, of what is copied there
    _views: list[_View]  # where it is copied from, on the message or (nothing travels) on the source
    _sources: list[torch.Tensor]  # these views on our own buffers

    def __init__(
        self, layout: PerParameterLayout, source: torch.Tensor, full: Buffer, transport: Transport | None
    ) -> None:
        self.layout, self.source, self.full, self.transport = layout, source, full, transport
        self._wire = self._message = self._foreign = None
        self._moves, self._targets, self._views = [], [], []
        self._sent = source
        if transport is None:
            for slot in layout.slots:
                own = slot.parameter
                self._targets.append(full.tensor(slot.full_offset, own.shape, own.stride))
                self._views.append(_View(slot.shard_offset, own.shape, own.stride))
            self._sources = [view.on(source) for view in self._views]
            return
        if source.dtype is not full.dtype or source.device != full.device:
            self._wire = Buffer(layout.shard_numel, full.dtype, full.device)
            self._sent = self._wire.tensor(0, (layout.shard_numel,), (1,))
        for slot in layout.slots:
            if slot.route is Route.DIRECT:
                piece = alias(self._sent, slot.shard_offset, (slot.piece_numel,), (1,))
                self._moves.append(Move(piece, full.tensor(slot.full_offset, (slot.region_numel,), (1,))))
            elif slot.piece_numel:
                self._plan_copy_out(slot)
        self._sources = []
        if layout.message_numel:
            self._message = Buffer(layout.message_numel * layout.world_size, full.dtype, full.device)
            arrival = self._message.tensor(0, (self._message.numel,), (1,))
            piece = alias(self._sent, layout.message_offset, (layout.message_numel,), (1,))
            self._moves.append(Move(piece, arrival))
            self._sources = [view.on(arrival) for view in self._views]
        self.arrived()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes held beside the full buffer at the moment."""
        return sum(buffer.allocated_bytes for buffer in (self._wire, self._message) if buffer is not None)

    def allocate(self) -> None:
        """Give memory to everything that is filled."""
        self.full.allocate()
        if self._wire is not None:
            self._wire.allocate()
        if self._message is not None:
            assert self.transport is not None
            self._foreign = self.transport.allocate("gather", self._message.numel, self.full.dtype, self.full.device)
            if self._foreign is None:
                self._message.allocate()

    def copy_in(self) -> None:
        """Bring the shard into the dtype and onto the device in which it travels."""
        if self._wire is None:
            return
        shard = self.source
        if shard.device != self._sent.device and shard.dtype is not self._sent.dtype:
            shard = shard.to(self._sent.device, non_blocking=True)  # a copy that also casts would cast on the host
        self._sent.copy_(shard, non_blocking=True)

    def parcel(self, unit: str) -> Parcel:
        """What travels."""
        if self._foreign is None:
            return Parcel(unit, self._moves)
        return Parcel(unit, [*self._moves[:-1], Move(self._moves[-1].piece, self._foreign)])

    def copy_out(self) -> None:
        """Put what came packed, or never travelled, into the full parameters."""
        if not self._targets:
            return
        sources = self._sources
        if self._foreign is not None:
            foreign = self._foreign
            sources = [view.on(foreign) for view in self._views]
        elif self.transport is None and self.source.device != self.full.device:
            on_device = self.source.to(self.full.device, non_blocking=True)
            sources = [view.on(on_device) for view in self._views]
        torch._foreach_copy_(self._targets, sources)

    def arrived(self) -> None:
        """Free what was needed on the way."""
        if self._foreign is not None and self.transport is not None:
            self.transport.release("gather", self._foreign)
        self._foreign = None
        for buffer in (self._wire, self._message):
            if buffer is not None:
                buffer.free()

    abandon = arrived

    def _plan_copy_out(self, slot: Slot) -> None:
        """The copies from the message to one full parameter: one, or another one for a last piece that is smaller."""
        world_size, stride = self.layout.world_size, self.layout.message_numel
        start, piece = slot.shard_offset - self.layout.message_offset, slot.piece_numel
        own = slot.parameter

        def add(offset: int, target: tuple[tuple[int, ...], tuple[int, ...]], view: _View) -> None:
            self._targets.append(self.full.tensor(slot.full_offset + offset, *target))
            self._views.append(view)

        if slot.route is Route.REPLICATED:
            add(0, ((piece,), (1,)), _View(start, (piece,), (1,)))
        elif slot.row_major:
            add(0, ((world_size, piece), (piece, 1)), _View(start, (world_size, piece), (stride, 1)))
        else:
            whole, rest = divmod(slot.rows, slot.chunk_rows)
            step = slot.chunk_rows * own.stride[own.cut]  # from the rows of one rank to those of the next
            if whole:
                rows = (whole, *slot.local_shape(0))
                add(0, (rows, (step, *own.stride)), _View(start, rows, (stride, *slot.local_stride(0))))
            if rest:
                rows = slot.local_shape(whole)
                source = _View(start + whole * stride, rows, slot.local_stride(whole))
                add(whole * step, (rows, own.stride), source)
