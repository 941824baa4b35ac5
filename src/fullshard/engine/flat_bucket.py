"""A bucket whose parameters lie one after another and are cut into equal slices: one collective each way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.engine.bucket import Bucket, BufferCopies
from fullshard.engine.flat_parameter import FlatHome, FlatPiece, placed
from fullshard.engine.gather import Gather, issue_gathers
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter, accumulate_gradient, value_of
from fullshard.engine.reducer import GradientReducer, Gradients, RowsView
from fullshard.engine.storage import Storage
from fullshard.layout import FlatLayout
from fullshard.memory import Buffer, alias, host_buffer, make_lane
from fullshard.transport import Move, Parcel, Transport

__all__ = ["FlatBucket", "FlatGather", "FlatReducer"]


class FlatGather:
    """Fills a full buffer from one slice per rank, in place. See :class:`~fullshard.engine.gather.Gather`.

    Args:
        layout: Over the ranks of ``mesh``.
        source: This rank's slice: ``(layout.slice_numel,)``.
        full: The buffer to fill. If its dtype or device is not the source's, the slice is copied to its place there
            first, and travels from it.
        mesh: The ranks.
    """

    transport: Transport | None
    full: Buffer
    _source: torch.Tensor
    _own: torch.Tensor | None  # this rank's part of the full buffer, where the slice does not travel itself
    _moves: list[Move]

    def __init__(self, layout: FlatLayout, source: torch.Tensor, full: Buffer, mesh: ShardMesh) -> None:
        self.transport, self.full, self._source, self._own = mesh.transport, full, source, None
        numel = layout.slice_numel
        converts = source.dtype is not full.dtype or source.device != full.device
        if converts or self.transport is None:
            self._own = full.tensor(mesh.rank * numel, (numel,), (1,))
        piece = alias(source, 0, (numel,), (1,)) if self._own is None else self._own
        self._moves = [Move(piece, full.tensor(0, (layout.full_numel,), (1,)))] if numel else []

    def allocate(self) -> None:
        """Give memory to the full buffer."""
        self.full.allocate()

    def copy_in(self) -> None:
        """Bring the slice into the dtype and onto the device in which it travels."""
        if self._own is None:
            return
        shard = self._source
        if shard.device != self._own.device and shard.dtype is not self._own.dtype:
            shard = shard.to(self._own.device, non_blocking=True)  # a copy that also casts would cast on the host
        self._own.copy_(shard, non_blocking=True)

    def parcel(self, unit: str) -> Parcel:
        """What travels."""
        return Parcel(unit, self._moves)

    def copy_out(self) -> None:
        """Nothing: it has arrived in place."""

    def arrived(self) -> None:
        """Nothing: there is no other memory."""

    abandon = arrived


class FlatReducer(GradientReducer):
    """Reduces all gradients of a bucket as one message; behind them, in a move of their own, the presence numbers.

    Args:
        parameters: All of the bucket.
        mesh: The ranks to reduce over.
        storage: Of the bucket.
        layout: Of the bucket.
        home: The visible flat parameter, if there is one.
    """

    _layout: FlatLayout
    _home: FlatHome | None
    _gaps: list[tuple[int, int]]  # offset and size of what belongs to no parameter
    _places: tuple[list[torch.Tensor], list[torch.Tensor]]  # of gradients, presence; of gaps: in our own message

    def __init__(
        self,
        parameters: list[ShardedParameter],
        mesh: ShardMesh,
        storage: Storage,
        layout: FlatLayout,
        home: FlatHome | None,
    ) -> None:
        super().__init__(parameters, mesh, storage)
        self._layout, self._home = layout, home
        count, numel = len(parameters) if self.travels else 0, layout.slice_numel
        self.rows_numel = numel + count
        for parameter, slot in zip(parameters, layout.slots, strict=True):
            piece = slot.piece(mesh.rank)
            self.views.append(RowsView(0, piece.offset, tuple(parameter.local.shape), parameter.local.stride()))
        if self.travels:
            self.views.append(RowsView(0, numel, (count,), (1,)))
        self._gaps, end = [], 0
        for start, size in [*((s.full_offset, s.parameter.numel) for s in layout.slots), (layout.full_numel, 0)]:
            if start > end:
                self._gaps.append((end, start - end))
            end = max(end, start + size)
        self.message = Buffer(
            (numel + count) * mesh.world_size if mesh.transport is not None else 0, self.dtype, mesh.device
        )
        self.message_tensor = self.message.tensor(0, (self.message.numel,), (1,))
        self._places = self._places_in(self.message_tensor) if self.message.numel else ([], [])
        self.message.free()

    def packed_moves(self, rows: torch.Tensor, message: torch.Tensor) -> list[Move]:
        """See :class:`GradientReducer`."""
        sent, numel = self._layout.full_numel, self._layout.slice_numel
        moves = [
            Move(rows.narrow(0, 0, numel), message.narrow(0, 0, sent)),
            Move(rows.narrow(0, numel, self.rows_numel - numel), message.narrow(0, sent, message.numel() - sent)),
        ]
        return [move for move in moves if move.piece.numel()]

    def replica_moves(self, rows: Sequence[torch.Tensor]) -> list[Move]:
        """See :class:`GradientReducer`."""
        transport, numel = self.mesh.replica_transport, self._layout.slice_numel
        if transport is None or not transport.hooked:
            return super().replica_moves(rows)
        return super().replica_moves([rows[0].narrow(0, 0, numel), rows[0].narrow(0, numel, self.rows_numel - numel)])

    def pack(self, inputs: Gradients, target: torch.Tensor) -> None:
        """See :class:`GradientReducer`."""
        places, gaps = self._places if target is self.message_tensor else self._places_in(target)
        missing = [place for place, gradient in zip(places, inputs, strict=True) if gradient is None]
        targets = [place for place, gradient in zip(places, inputs, strict=True) if gradient is not None]
        sources = [
            g.as_strided((g.numel(),), (1,)) if i < len(self.parameters) else g.expand_as(places[i])
            for i, g in enumerate(inputs)
            if g is not None
        ]
        if gaps or missing:
            torch._foreach_zero_([*gaps, *missing])
        if targets:  # on one rank no presence numbers travel
            torch._foreach_copy_(targets, sources)

    def _places_in(self, target: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        places = [target.narrow(0, s.full_offset, s.parameter.numel) for s in self._layout.slots]
        if self.travels:
            places.append(target.narrow(0, self._layout.full_numel, target.numel() - self._layout.full_numel))
            places[-1] = places[-1].view(-1, len(self.parameters))
        return places, [target.narrow(0, offset, size) for offset, size in self._gaps]

    def arriving(self, landed: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """See :class:`GradientReducer`."""

    def accumulate(self, landed: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """See :class:`GradientReducer`."""
        if self._home is None:
            super().accumulate(landed, present)
        elif any(present):
            accumulate_gradient(self._home.flat, landed[0].narrow(0, 0, self._layout.slice_numel))


class FlatBucket(Bucket):
    """See the module docstring.

    Where nothing is cut and no dtype or device differs, the full parameters lie in the slice itself: nothing is copied
    or freed.

    Args:
        pieces: Of its parameters, in model order; all of one dtype and on one device.
        mesh: The ranks to shard over.
        storage: See there.
    """

    layout: FlatLayout
    shard_buffer: torch.Tensor  # (layout.slice_numel,), for the life of the bucket
    home: FlatHome | None
    pieces: list[FlatPiece]  # the parameters, by their type
    _full: Buffer | None  # made at the first gather; memory only while gathered
    _gather: FlatGather | None  # fills it; None: it is the slice
    _ready: bool  # whether the full parameters exist

    def __init__(self, pieces: Sequence[FlatPiece], mesh: ShardMesh, storage: Storage) -> None:
        super().__init__(pieces, mesh, storage)
        self.pieces, self.home = list(pieces), None
        self._full = self._gather = None
        self._ready = False
        values = [value_of(piece.sharded) for piece in pieces]
        self.layout = self._cut(min(values[0].dtype.itemsize, storage.full_dtype.itemsize))
        numel, dtype, device = self.layout.slice_numel, values[0].dtype, mesh.device
        if values[0].device.type == "meta":
            device = values[0].device
        if storage.offload and device.type != "meta":
            self.shard_buffer = host_buffer(numel, dtype, pin=storage.pin_memory).zero_()
        else:
            self.shard_buffer = torch.zeros(numel, dtype=dtype, device=device)
        for piece, slot, value in zip(pieces, self.layout.slots, values, strict=True):
            if piece.piece is None:
                piece.sharded.grad = None  # from before: this rank's own, of the whole parameter
            piece.piece, piece.slot, piece.cut = slot.piece(mesh.rank), slot, piece.cut or self.layout
            local = placed(self.shard_buffer, piece.piece, piece, whole=mesh.world_size == 1)
            piece.local = local
            local.copy_(piece.part_like_local(value))
            piece.place(local)
            if storage.keep_reduced:
                piece.gradient_dtype = storage.reduce_dtype
                _set_gradient_dtype(piece.sharded, storage.reduce_dtype)

    def _cut(self, itemsize: int) -> FlatLayout:
        """The layout by which the pieces were cut, as far as they are here; a new one for whole parameters."""
        slots, cut = [piece.slot for piece in self.pieces if piece.slot is not None], self.pieces[0].cut
        if cut is not None and len(slots) == len(self.pieces):
            return FlatLayout(tuple(slots), cut.world_size, cut.slice_numel)
        shapes = [piece.shape for piece in self.pieces]
        # Aligned as vectorised kernels want it.
        return FlatLayout.build(shapes, world_size=self.mesh.world_size, alignment=max(4, 16 // itemsize))

    def show(self, home: FlatHome) -> None:
        """Have the flat parameter of ``home`` be what users see."""
        self.home = home
        for piece in self.pieces:
            piece.home = home
        if self.storage.keep_reduced:
            _set_gradient_dtype(home.flat, self.storage.reduce_dtype)

    def reroute(self, mesh: ShardMesh) -> None:
        """See :class:`Bucket`."""
        self.mesh, self._reducers = mesh, {}
        if self._full is not None:
            self._full.allocate()  # the plan takes tensors on it
            self._gather = FlatGather(self.layout, self.shard_buffer, self._full, mesh)
            self._full.free()

    def take_over(self) -> None:
        """See :class:`Bucket`: into the slice."""
        for piece in self.pieces:
            if not piece.is_home():
                piece.local.copy_(piece.part_like_local(value_of(piece.sharded)))
                piece.place(piece.local)
        if self.home is not None:
            self.home.settle()

    def restore(self) -> None:
        """See :class:`Bucket`: a slice cuts parameters at places that depend on their neighbours."""
        copies = self.copies()
        issue_gathers([("", copies.gather)], make_lane(self.mesh.device)).wait()
        for piece, value in zip(self.pieces, copies.values, strict=True):
            piece.sharded.requires_grad_(piece.requires_grad)
            piece.piece = piece.slot = piece.cut = piece.home = None
            piece.place(value.clone() if piece.local.device == value.device else value.to(piece.local.device))
        copies.buffer.free()

    @property
    def materialized(self) -> bool:
        """See :class:`Bucket`."""
        return self.shard_buffer.device.type != "meta"

    @property
    def full_bytes(self) -> int:
        """See :class:`Bucket`."""
        return 0 if self._full is None else self._full.allocated_bytes

    @property
    def full_size(self) -> int:
        """See :class:`Bucket`."""
        return self.layout.full_numel * self.storage.full_dtype.itemsize

    def keep_near(self, size: int) -> None:
        """See :class:`Bucket`. The wrapper has no such setting."""

    def copies(self, gradients: bool = False) -> BufferCopies:
        """See :class:`Bucket`."""
        source = self._slice_of_gradients() if gradients else self.shard_buffer
        buffer = Buffer(self.layout.full_numel, source.dtype, self.mesh.device)
        values = [buffer.tensor(s.full_offset, s.parameter.shape, s.parameter.stride) for s in self.layout.slots]
        return BufferCopies(FlatGather(self.layout, source, buffer, self.mesh.exactly()), values, buffer)

    def _slice_of_gradients(self) -> torch.Tensor:
        if self.home is not None and self.home.flat.grad is not None:
            return self.home.flat.grad
        source = torch.zeros_like(self.shard_buffer, dtype=self.pieces[0].gradient_dtype)
        for piece in self.pieces:
            if piece.sharded.grad is not None and piece.piece is not None:
                _, numel, offset = piece.piece
                target = source.narrow(0, offset, numel)
                target.as_strided(piece.local.shape, piece.local.stride()).copy_(piece.sharded.grad)
        return source

    def parts(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :class:`Bucket`."""
        return [piece.part_like_local(value) for piece, value in zip(self.pieces, values, strict=True)]

    def _reduced_together(self, trainable: set[int]) -> tuple[int, ...]:
        return tuple(range(len(self.parameters))) if trainable else ()

    def _reducer(self, parameters: list[ShardedParameter]) -> GradientReducer:
        return FlatReducer(parameters, self.mesh, self.storage, self.layout, self.home)

    def _gathers(self, near: bool) -> list[Gather]:
        if not self._ready:
            with torch.inference_mode(False), torch.no_grad():
                self._make_full()
        return [] if self._gather is None else [self._gather]

    def _make_full(self) -> None:
        self._ready = True
        dtype, shard = self.storage.full_dtype, self.shard_buffer
        if self.mesh.transport is None and shard.dtype is dtype and shard.device == self.mesh.device:
            for p, s in zip(self.parameters, self.layout.slots, strict=True):
                p.set_full(alias(shard, s.full_offset, p.shape.shape, p.shape.stride), self.storage.reduce_dtype)
            return
        self._full = Buffer(self.layout.full_numel, dtype, self.mesh.device)
        for p, s in zip(self.parameters, self.layout.slots, strict=True):
            full = self._full.tensor(s.full_offset, p.shape.shape, p.shape.stride)
            p.set_full(full, self.storage.reduce_dtype)
        self._gather = FlatGather(self.layout, shard, self._full, self.mesh)
        self._full.free()  # its first memory is of the compute stream, whatever a gather allocates on

    def _free(self) -> None:
        if self._full is not None:
            self._full.free()


def _set_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Have gradients of this dtype, also one that is there (and that a move has cast)."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
