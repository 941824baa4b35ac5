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
from fullshard.layout import FlatLayout, PerParameterLayout
from fullshard.memory import Buffer, CommStream, Event, PendingWork, Work, alias

__all__ = ["BucketAllGather", "ShardAllGather", "issue_all_gathers"]


class BucketAllGather:
    """One unsharded buffer that an all-gather fills."""

    transport: Transport

    def allocate(self) -> None:
        """Give memory to the unsharded buffer; on the compute stream."""
        raise NotImplementedError

    def copy_in(self) -> None:
        """Prepare what this rank sends; on the communication stream."""

    def request(self, unit: str) -> CommRequest:
        """Return the operands of the all-gather."""
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


class ShardAllGather(BucketAllGather):
    """Fills an unsharded buffer from the shard buffers of all ranks.

    What lies in one block is an operand of its own, from the shard straight into the unsharded buffer: large parameters
    that are cut one by one, or the slice of parameters that are cut together. Other parameters are packed into one
    message, and copied out of it. A buffer that is filled by such copies only is allocated and filled on the compute
    stream when the computation waits for it, so that a prefetched unit has no memory but its message; others are filled
    on the communication stream.

    If the unsharded buffer has another device than the shard, or another dtype and the transport does not cast, this
    rank's part of the unsharded buffer and of the message is written first, and sent from there.
    """

    layout: PerParameterLayout | FlatLayout  # over the ranks of the transport
    unsharded: Buffer  # to be filled
    _message: Buffer | None  # the packed shards of all ranks; memory only while they are in flight
    _own_message: torch.Tensor  # flat, on that
    _transport_memory: torch.Tensor | None  # the same in the transport's own memory
    _operands: list[Operand]  # of what is in place, and last of the packed parameters
    _converted: tuple[list[torch.Tensor], list[torch.Tensor]]  # into what is sent, and from the shard
    _moves: bool  # the shard is on another device
    _unpacking: Unpacking | None  # of the message; None: nothing is packed
    _sources: list[torch.Tensor]  # of the unpacking, on our own message
    _all_packed: bool  # the unsharded buffer is allocated and filled when the message has arrived

    def __init__(
        self, layout: PerParameterLayout | FlatLayout, shard: torch.Tensor, unsharded: Buffer, transport: Transport
    ) -> None:
        self.layout, self.unsharded, self.transport = layout, unsharded, transport
        self._message = self._transport_memory = self._unpacking = None
        self._operands, self._converted, self._sources = [], ([], []), []
        self._moves = shard.device != unsharded.device
        converts = self._moves or (shard.dtype is not unsharded.dtype and not transport.casts)
        for shard_offset, numel, unsharded_offset in layout.in_place:
            own = alias(shard, shard_offset, (numel,), (1,))
            region = unsharded.tensor(unsharded_offset, (numel * layout.world_size,), (1,))
            if converts:
                own = self._convert_in_place(own, region)
            self._operands.append(Operand.of_parameter(own, region))
        self._all_packed = bool(layout.message_numel) and not self._operands
        if isinstance(layout, PerParameterLayout) and layout.message_numel and layout.world_size > 1:
            self._pack(layout, alias(shard, layout.message_offset, (layout.message_numel,), (1,)), converts=converts)
        self.abandon()

    def _convert_in_place(self, shard: torch.Tensor, unsharded: torch.Tensor) -> torch.Tensor:
        """Have ``copy_in`` write ``shard`` to this rank's part of ``unsharded``, which is returned."""
        own = alias(unsharded, self.transport.rank * shard.numel(), (shard.numel(),), (1,))
        self._converted[0].append(own)
        self._converted[1].append(shard)
        return own

    def _pack(self, layout: PerParameterLayout, shard: torch.Tensor, *, converts: bool) -> None:
        """Plan the message of ``shard``, the packed part of what this rank sends."""
        unsharded = self.unsharded
        self._unpacking = Unpacking(layout, unsharded, self.transport)
        self._message = Buffer(layout.message_numel * layout.world_size, unsharded.dtype, unsharded.device)
        self._own_message = self._message.tensor(0, (self._message.numel,), (1,))
        self._sources = self._unpacking.sources(self._own_message)
        own = self._convert_in_place(shard, self._own_message) if converts else shard
        slices = slices_of(layout, layout.message_offset, unsharded.dtype.itemsize)
        self._operands.append(Operand(own, self._own_message, slices))

    def allocate(self) -> None:
        """Give memory to the unsharded buffer and to the messages."""
        if not self._all_packed:
            self.unsharded.allocate()
        if self._unpacking is None or self._message is None:
            return
        self._unpacking.allocate()
        dtype, device = self.unsharded.dtype, self.unsharded.device
        self._transport_memory = self.transport.allocate("all_gather", self._message.numel, dtype, device)
        if self._transport_memory is None:
            self._message.allocate()

    def copy_in(self) -> None:
        """Bring this rank's shard onto the device, and into the dtype, in which it is sent."""
        targets, sources = self._converted
        if targets and self._transport_memory is not None:
            targets = [*targets[:-1], self._own_section(self._transport_memory)]
        if not self._moves and targets:
            torch._foreach_copy_(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            if source.dtype is not target.dtype:
                source = source.to(target.device, non_blocking=True)  # a copy that also casts would cast on the host
            target.copy_(source, non_blocking=True)

    def _own_section(self, message: torch.Tensor) -> torch.Tensor:
        numel = self.layout.message_numel
        return message.narrow(0, self.transport.rank * numel, numel)

    def request(self, unit: str) -> CommRequest:
        """Return the operands of the all-gather."""
        if self._transport_memory is None:
            return CommRequest(unit, self._operands)
        *in_place, packed = self._operands
        own = self._own_section(self._transport_memory) if self._converted[0] else packed.shard
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
        for buffer in (self._message, self._unpacking):
            if buffer is not None:
                buffer.free()
