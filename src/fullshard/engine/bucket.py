"""Storage and communication of the parameters of a unit that share a device and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.reduction import GradientReducer, PendingReduction, assign_local_gradients
from fullshard.layout import PerParameterLayout, Route, Slot
from fullshard.memory import Buffer, Lane, Ticket, alias
from fullshard.transport import Move

__all__ = ["Bucket"]


class Bucket:
    """One shard buffer, one full buffer, and what moves between them.

    On a single rank the full parameters lie in the shard buffer itself: nothing is copied or freed.

    Args:
        parameters: In model order; all of one dtype and on one device.
        values: Their present values: full tensors, or this rank's rows of them.
        mesh: The ranks to shard over.
    """

    parameters: list[ShardedParameter]
    mesh: ShardMesh
    layout: PerParameterLayout
    shard_buffer: torch.Tensor  # (layout.shard_numel,), for the life of the bucket
    gathered: bool  # whether the full buffer is filled, or being filled
    _ready: bool  # whether the full parameters exist
    _full: Buffer | None  # made at the first gather; memory only while gathered
    _message: Buffer | None  # the packed pieces of all ranks; memory only while they travel
    _moves: list[Move]
    _unpack_to: list[torch.Tensor]
    _unpack_from: list[torch.Tensor]
    _ticket: Ticket | None  # of the gather in flight
    _reducers: dict[tuple[int, ...], GradientReducer]  # by the indices of the trainable parameters

    def __init__(self, parameters: Sequence[ShardedParameter], values: Sequence[torch.Tensor], mesh: ShardMesh) -> None:
        self.parameters, self.mesh = list(parameters), mesh
        dtype, device = values[0].dtype, values[0].device
        self.layout = PerParameterLayout.build(
            [p.shape for p in parameters],
            world_size=mesh.world_size,
            itemsize=dtype.itemsize,
            direct_bytes=mesh.direct_bytes,
        )
        self.shard_buffer = torch.zeros(
            self.layout.shard_numel, dtype=dtype, device="meta" if device.type == "meta" else mesh.device
        )
        self.gathered = self._ready = False
        self._full = self._message = self._ticket = None
        self._moves, self._unpack_to, self._unpack_from = [], [], []
        self._reducers = {}
        for parameter, slot, value in zip(self.parameters, self.layout.slots, values, strict=True):
            local = self.shard_buffer.as_strided(slot.local_shape(mesh.rank), slot.local_stride(), slot.shard_offset)
            local.copy_(_local_rows(value, slot, mesh.rank))
            parameter.place(mesh, slot, local)

    def take_over(self) -> None:
        """Write the values of adopted parameters into the shard buffer and put the parameters on it."""
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            sharded = parameter.sharded
            value = sharded._local_tensor if isinstance(sharded, DTensor) else sharded
            if value is not parameter.local:
                parameter.local.copy_(_local_rows(value, slot, self.mesh.rank))
                parameter.place(self.mesh, slot, parameter.local)

    @property
    def materialized(self) -> bool:
        """False while the parameters are on the meta device."""
        return self.shard_buffer.device.type != "meta"

    @property
    def full_bytes(self) -> int:
        """Bytes that the full buffer (with a message in flight) holds at the moment."""
        return sum(buffer.allocated_bytes for buffer in (self._full, self._message) if buffer is not None)

    def gather(self, lane: Lane, unit: str) -> None:
        """Start filling the full buffer; no-op if that was done."""
        if self.gathered:
            return
        self.gathered = True
        if not self._ready:
            with torch.inference_mode(False), torch.no_grad():
                self._make_full()
        transport = self.mesh.transport
        if transport is None or self._full is None or self._message is None:
            return
        self._full.allocate()
        self._message.allocate()
        self._ticket = lane.issue(partial(transport.gather, self._moves, unit), self._unpack)

    def finish_gather(self) -> None:
        """Make the computation see the full parameters."""
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait()
            assert self._message is not None
            self._message.free()

    def reshard(self) -> None:
        """Free the full buffer."""
        if not self.gathered:
            return
        self.finish_gather()
        self.gathered = False
        if self._full is not None:
            self._full.free()

    def forget_gather(self) -> None:
        """Free the full buffer after a failure, when what was in flight may never arrive."""
        try:
            self.finish_gather()
        except RuntimeError:  # the failure that is being recovered from, seen once more
            if self._message is not None:
                self._message.free()
        self.reshard()

    def reduce(self, lane: Lane, unit: str) -> PendingReduction | None:
        """Take the full gradients of the trainable parameters and start reducing them to sharded ones."""
        trainable = tuple(i for i, p in enumerate(self.parameters) if p.full.requires_grad)
        if not trainable:
            return None
        parameters = [self.parameters[i] for i in trainable]
        gradients = []
        for parameter in parameters:
            gradients.append(parameter.full.grad)
            parameter.full.grad = None
        if self.mesh.transport is None:
            assign_local_gradients(parameters, gradients)
            return None
        reducer = self._reducers.get(trainable)
        if reducer is None:
            reducer = self._reducers[trainable] = GradientReducer(parameters, self.shard_buffer, self.mesh)
        return reducer.start(gradients, lane, unit)

    def _make_full(self) -> None:
        """Create the full parameters, and, if anything travels, the moves that fill them."""
        self._ready = True
        if self.mesh.transport is None:
            for p, slot in zip(self.parameters, self.layout.slots, strict=True):
                self._set_full(p, alias(self.shard_buffer, slot.shard_offset, p.shape.shape, p.shape.stride))
            return
        dtype, device = self.shard_buffer.dtype, self.shard_buffer.device
        full = self._full = Buffer(self.layout.full_numel, dtype, device)
        message_numel, world_size = self.layout.message_numel, self.mesh.world_size
        message = self._message = Buffer(message_numel * world_size, dtype, device)
        for p, slot in zip(self.parameters, self.layout.slots, strict=True):
            self._set_full(p, full.tensor(slot.full_offset, p.shape.shape, p.shape.stride))
            if slot.route is Route.DIRECT:
                piece = alias(self.shard_buffer, slot.shard_offset, (slot.piece_numel,), (1,))
                self._moves.append(Move(piece, full.tensor(slot.full_offset, (slot.region_numel,), (1,))))
            elif slot.piece_numel:
                self._plan_unpack(slot, full, message)
        if message_numel:
            piece = alias(self.shard_buffer, self.layout.message_offset, (message_numel,), (1,))
            self._moves.append(Move(piece, message.tensor(0, (message_numel * world_size,), (1,))))

    def _set_full(self, parameter: ShardedParameter, tensor: torch.Tensor) -> None:
        parameter.full = nn.Parameter(tensor, requires_grad=parameter.sharded.requires_grad)
        parameter.full.__dict__.update(parameter.attributes)

    def _plan_unpack(self, slot: Slot, full: Buffer, message: Buffer) -> None:
        """Prepare the copies from the message to one full parameter: one, or one per rank if its rows interleave."""
        world_size, stride = self.mesh.world_size, self.layout.message_numel
        start = slot.shard_offset - self.layout.message_offset
        piece, own = slot.piece_numel, slot.parameter
        if slot.route is Route.REPLICATED:
            self._unpack_to.append(full.tensor(slot.full_offset, (piece,), (1,)))
            self._unpack_from.append(message.tensor(start, (piece,), (1,)))
        elif slot.row_major:
            self._unpack_to.append(full.tensor(slot.full_offset, (world_size, piece), (piece, 1)))
            self._unpack_from.append(message.tensor(start, (world_size, piece), (stride, 1)))
        else:
            for rank in range(world_size):
                rows = slot.local_shape(rank)
                offset = slot.full_offset + slot.local_rows(rank)[0] * own.stride[0]
                if rows[0]:
                    self._unpack_to.append(full.tensor(offset, rows, own.stride))
                    self._unpack_from.append(message.tensor(start + rank * stride, rows, slot.local_stride()))

    def _unpack(self) -> None:
        if self._unpack_to:
            torch._foreach_copy_(self._unpack_to, self._unpack_from)


def _local_rows(value: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's rows of ``value``, which may be the full tensor or those rows already."""
    shape = slot.local_shape(rank)
    if tuple(value.shape) == shape:
        return value
    start, stop = slot.local_rows(rank)
    return value[start:stop]
