"""From shards to unsharded parameters: all-gathers into one buffer, planned once and issued every step.

An all-gather is used in this order: ``allocate`` (memory, on the compute stream), ``copy_in`` and ``request`` (on the
communication stream: what this rank sends), the collective, ``copy_out`` (on the communication stream), ``arrived``
(on the compute stream, after the wait).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm import CommRequest, Operand, Transport, launch_all, slices_of
from fullshard.engine.buckets.message import Unpacking
from fullshard.layout import PerParameterLayout
from fullshard.memory import Buffer, CommStream, Event, PendingWork, Work, alias

__all__ = ["BucketAllGather", "FlatAllGather", "PerParameterAllGather", "issue_all_gathers"]


class BucketAllGather:
    """One unsharded buffer that an all-gather fills."""

    transport: Transport

    def allocate(self) -> None:
        """Give memory to the unsharded buffer; on the compute stream."""
        raise NotImplementedError

    def copy_in(self) -> None:
        """Prepare what this rank sends; on the communication stream."""

    def request(self, unit: str) -> CommRequest:
        """The operands of the all-gather."""
        raise NotImplementedError

    def copy_out(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Put what has arrived in its place; on the communication stream.

        Args:
            targets: To be extended by tensors to copy to, all at once.
            sources: To be extended by what is copied there.
        """

    def arrived(self) -> None:
        """Free the messages; on the compute stream, which has waited."""

    def abandon(self) -> None:
        """Free the messages after a failure, when nothing has arrived."""


def issue_all_gathers(
    all_gathers: Sequence[tuple[str, BucketAllGather]], comm_stream: CommStream, after: Event | None = None
) -> PendingWork:
    """Start filling several buffers, with the names of their units, in one launch per transport."""

    def allocate() -> None:
        for _, each in all_gathers:
            each.allocate()

    def launch() -> list[Work]:
        for _, each in all_gathers:
            each.copy_in()
        return launch_all(((each.transport, each.request(unit)) for unit, each in all_gathers), Transport.all_gather)

    def finish() -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for _, each in all_gathers:
            each.copy_out(targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)

    return comm_stream.issue(launch, finish, allocate=allocate, after=after)


def _copy_shard(shard: torch.Tensor, target: torch.Tensor) -> None:
    """Bring a shard into the dtype and onto the device in which it is sent."""
    if shard.device != target.device and shard.dtype is not target.dtype:
        shard = shard.to(target.device, non_blocking=True)  # a copy that also casts would cast on the host
    target.copy_(shard, non_blocking=True)


class PerParameterAllGather(BucketAllGather):
    """Fills an unsharded buffer from shards that are cut parameter by parameter.

    Large parameters are operands of their own, from the shard straight into the unsharded parameter. The others are
    packed into one message, and copied out of it. A buffer that is filled by such copies only is allocated and filled
    on the compute stream when the computation waits for it, so that a prefetched unit has no memory but its message;
    others are filled on the communication stream.

    If the dtype of the unsharded buffer is not the shard's and the transport does not cast, this rank's part of the
    unsharded parameters and of the message is written first, and sent from there. If the shard is on another device, it
    is first copied, as a whole, to an *all-gather input*.
    """

    layout: PerParameterLayout  # over the ranks of the transport
    shard: torch.Tensor  # this rank's: ``(layout.shard_numel,)``
    unsharded: Buffer  # to be filled
    _input: Buffer | None  # the shard, on the device on which it is sent; memory only while it is
    _sent: torch.Tensor  # all of that
    _message: Buffer | None  # the packed shards of all ranks; memory only while they are in flight
    _own_message: torch.Tensor  # flat, on that
    _transport_memory: torch.Tensor | None  # the same in the transport's own memory
    _operands: list[Operand]  # of the parameters in place, and last of the packed ones
    _cast: tuple[list[torch.Tensor], list[torch.Tensor]]  # into what is sent in place, and from the shard
    _unpacking: Unpacking | None  # of the message; None: nothing is packed
    _sources: list[torch.Tensor]  # of the unpacking, on our own message
    _all_packed: bool  # the unsharded buffer is allocated and filled when the message has arrived

    def __init__(
        self, layout: PerParameterLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> None:
        self.layout, self.shard, self.unsharded, self.transport = layout, shard, unsharded, transport
        self._input = self._message = self._transport_memory = self._unpacking = None
        self._operands, self._cast, self._sources, sent = [], ([], []), [], shard
        if shard.device != unsharded.device:
            sent_dtype = shard.dtype if transport.casts else unsharded.dtype
            self._input = Buffer(layout.shard_numel, sent_dtype, unsharded.device)
            sent = self._sent = self._input.tensor(0, (layout.shard_numel,), (1,))
        casts = sent.dtype is not unsharded.dtype and not transport.casts
        for slot in layout.slots:
            if slot.in_place:
                own = alias(sent, slot.shard_offset, (slot.shard_numel,), (1,))
                region = unsharded.tensor(slot.unsharded_offset, (slot.unsharded_numel,), (1,))
                if casts:
                    own = self._cast_in_place(own, region)
                self._operands.append(Operand.of_parameter(own, region))
        self._all_packed = bool(layout.message_numel) and not self._operands
        if layout.message_numel and layout.world_size > 1:
            self._pack(alias(sent, layout.message_offset, (layout.message_numel,), (1,)), casts=casts)
        self.abandon()

    def _cast_in_place(self, shard: torch.Tensor, unsharded: torch.Tensor) -> torch.Tensor:
        """Have ``copy_in`` write ``shard`` to this rank's part of ``unsharded``, which is returned."""
        own = alias(unsharded, self.transport.rank * shard.numel(), (shard.numel(),), (1,))
        self._cast[0].append(own)
        self._cast[1].append(shard)
        return own

    def _pack(self, shard: torch.Tensor, *, casts: bool) -> None:
        """Plan the message of ``shard``, the packed part of what this rank sends."""
        layout, unsharded = self.layout, self.unsharded
        self._unpacking = Unpacking(layout, unsharded, self.transport)
        self._message = Buffer(layout.message_numel * layout.world_size, unsharded.dtype, unsharded.device)
        self._own_message = self._message.tensor(0, (self._message.numel,), (1,))
        self._sources = self._unpacking.sources(self._own_message)
        own = self._cast_in_place(shard, self._own_message) if casts else shard
        slices = slices_of(layout, layout.message_offset, unsharded.dtype.itemsize)
        self._operands.append(Operand(own, self._own_message, slices))

    def allocate(self) -> None:
        """Give memory to the unsharded buffer and to the messages."""
        if not self._all_packed:
            self.unsharded.allocate()
        if self._input is not None:
            self._input.allocate()
        if self._unpacking is None or self._message is None:
            return
        self._unpacking.allocate()
        dtype, device = self.unsharded.dtype, self.unsharded.device
        self._transport_memory = self.transport.allocate("all_gather", self._message.numel, dtype, device)
        if self._transport_memory is None:
            self._message.allocate()

    def copy_in(self) -> None:
        """Bring this rank's shard onto the device, and into the dtype, in which it is sent."""
        if self._input is not None:
            _copy_shard(self.shard, self._sent)
        targets, sources = self._cast
        if not targets:
            return
        if self._transport_memory is not None:
            targets = [*targets[:-1], self._own_section(self._transport_memory)]
        torch._foreach_copy_(targets, sources)

    def _own_section(self, message: torch.Tensor) -> torch.Tensor:
        numel = self.layout.message_numel
        return message.narrow(0, self.transport.rank * numel, numel)

    def request(self, unit: str) -> CommRequest:
        """The operands of the all-gather."""
        if self._transport_memory is None:
            return CommRequest(unit, self._operands)
        *in_place, packed = self._operands
        own = self._own_section(self._transport_memory) if self._cast[0] else packed.shard
        return CommRequest(unit, [*in_place, Operand(own, self._transport_memory, packed.slices)])

    def copy_out(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy packed parameters from the message to the unsharded buffer, beside those that are in place."""
        if not self._all_packed:
            self._unpack(targets, sources)

    def _unpack(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if self._unpacking is None:
            return
        foreign = self._transport_memory
        self._unpacking.copy_columns(self._own_message if foreign is None else foreign)
        targets += self._unpacking.targets
        sources += self._sources if foreign is None else self._unpacking.sources(foreign)

    def arrived(self) -> None:
        """Copy parameters out of the message if all are packed, and free the messages."""
        if self._all_packed:
            self.unsharded.allocate()
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            self._unpack(targets, sources)
            if targets:
                torch._foreach_copy_(targets, sources)
        self.abandon()

    def abandon(self) -> None:
        """Free the messages."""
        if self._transport_memory is not None:
            self.transport.release("all_gather", self._transport_memory)
        self._transport_memory = None
        for buffer in (self._input, self._message, self._unpacking):
            if buffer is not None:
                buffer.free()


class FlatAllGather(BucketAllGather):
    """Fills an unsharded buffer from one slice of ``numel`` elements per rank, in place.

    If its dtype or device is not the shard's, the shard is copied to its place there first, and sent from it.
    """

    unsharded: Buffer
    _shard: torch.Tensor  # this rank's slice
    _own: torch.Tensor | None  # this rank's part of the unsharded buffer, where it is not sent from the shard
    _operands: list[Operand]

    def __init__(self, numel: int, shard: torch.Tensor, unsharded: Buffer, transport: Transport) -> None:
        self.transport, self.unsharded, self._shard, self._own = transport, unsharded, shard, None
        if shard.dtype is not unsharded.dtype or shard.device != unsharded.device:
            self._own = unsharded.tensor(transport.rank * numel, (numel,), (1,))
        sent = alias(shard, 0, (numel,), (1,)) if self._own is None else self._own
        whole = unsharded.tensor(0, (numel * transport.world_size,), (1,))
        self._operands = [Operand.of_parameter(sent, whole)] if numel else []

    def allocate(self) -> None:
        """Give memory to the unsharded buffer."""
        self.unsharded.allocate()

    def copy_in(self) -> None:
        """Convert the shard to its place in the unsharded buffer, if dtype or device differ."""
        if self._own is not None:
            _copy_shard(self._shard, self._own)

    def request(self, unit: str) -> CommRequest:
        """The operands of the all-gather."""
        return CommRequest(unit, self._operands)
