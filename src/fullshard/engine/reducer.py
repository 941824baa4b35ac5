"""How the gradients of some parameters travel: planned once, used every step.

[Note: Gradients that are missing on some ranks]
Which collectives run must not depend on whether this rank's gradient is None. So all trainable parameters of a
bucket take part in every reduction, missing gradients as zeros, and every rank sends along one number per
parameter: 1 if it had a gradient, else 0. Their mean rides in the packed message. Only a rank that had none
itself looks at it: if nobody had one, ``.grad`` stays None as in an unsharded run, otherwise it is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.placement import dtensor
from fullshard.engine.storage import Storage
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot
from fullshard.layout.per_parameter import contiguous_stride
from fullshard.memory import Buffer, empty
from fullshard.transport import Move

if TYPE_CHECKING:
    from fullshard.engine.reduction import PendingReduction

__all__ = ["GradientReducer", "Gradients", "PerParameterReducer", "RowsView"]

Gradients = list["torch.Tensor | None"]


class _PackCopy(NamedTuple):
    """One copy from a gradient (seen with ``shape`` and ``stride`` from ``offset``) into the message."""

    gradient: int  # index of the parameter
    target: torch.Tensor  # in our own message
    start: int  # of the target in the message
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class RowsView(NamedTuple):
    """This rank's rows of one parameter: in which of the tensors of rows, and where in it."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows on these tensors of rows."""
        return tensors[self.tensor].as_strided(self.shape, self.stride, self.offset)


# Nearly always it is one or two: all gradients, or all but frozen and unused ones.
MAX_PRESENCES_KEPT = 8


class GradientReducer:
    """Reduces the gradients of one set of parameters of a bucket. Planned once, used every step.

    Args:
        parameters: Of the bucket, in model order.
        mesh: The ranks to reduce over.
        storage: Of the bucket.
    """

    parameters: list[ShardedParameter]
    mesh: ShardMesh
    dtype: torch.dtype  # in which gradients travel and are summed
    landing_dtype: torch.dtype  # in which they end
    lands_on_host: bool  # whether they end in CPU memory, away from where they were computed
    message: Buffer  # what is packed; no memory without a shard axis, where gradients are packed into the rows
    message_tensor: torch.Tensor  # all of it
    owing: bool  # whether the last reduction begun was not to go over the replicate axis
    partial: PendingReduction | None  # one that has come to that point
    views: list[RowsView]  # of the parameters, and behind them the presence numbers
    direct: dict[int, Slot]  # the parameters that travel on their own, by index
    rows_numel: int  # elements of the first tensor of rows
    _one: torch.Tensor  # where, and in the dtype in which, gradients are reduced
    _presences: dict[tuple[bool, ...], torch.Tensor]  # those sent of late: making one copies it to the device

    def __init__(self, parameters: list[ShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        self.parameters, self.mesh, self.dtype = parameters, mesh, storage.reduce_dtype
        self.landing_dtype = storage.reduce_dtype if storage.keep_reduced else parameters[0].local.dtype
        offloads = storage.offload_gradients and mesh.device.type != "cpu"
        self.lands_on_host = offloads or parameters[0].local.device != mesh.device
        self.owing, self.partial = False, None
        self.views, self.direct = [], {}
        self._one = torch.ones((), dtype=self.dtype, device=mesh.device)
        self._presences = {}

    def pack(self, inputs: Gradients, target: torch.Tensor) -> None:
        """Copy what does not travel on its own into ``target``: the message, or without a shard axis the rows."""
        raise NotImplementedError

    def packed_moves(self, rows: torch.Tensor, message: torch.Tensor) -> list[Move]:
        """How the message becomes this rank's rows."""
        raise NotImplementedError

    def replica_moves(self, rows: Sequence[torch.Tensor]) -> list[Move]:
        """How rows are reduced over the replicate axis."""
        return [Move(tensor, tensor) for tensor in rows if tensor.numel()]

    def accumulate(self, landed: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """Set (or add to) the sharded gradients, and run the hooks that users put on parameters."""
        for index, parameter in enumerate(self.parameters):
            if present[index]:
                parameter.accumulate(self.views[index].on(landed))

    def arriving(
        self, landed: Sequence[torch.Tensor], present: Sequence[bool]
    ) -> list[tuple[ShardedParameter, torch.Tensor]] | None:
        """The gradients that :meth:`accumulate` will set where there are none; None if that is not its way."""
        named = zip(self.parameters, present, strict=True)
        return [(p, dtensor(self.views[i].on(landed), p.spec)) for i, (p, is_there) in enumerate(named) if is_there]

    @property
    def travels(self) -> bool:
        """Whether there is anybody to reduce with."""
        return self.mesh.transport is not None or self.mesh.replica_transport is not None

    def partial_rows(self) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Parameters with gradients that are still to be reduced over the replicate axis, and this rank's rows."""
        return [] if self.partial is None else self.partial.partial_rows()

    @property
    def presence_offset(self) -> int:
        """Where in the first tensor of rows the presence numbers begin, which come last in it."""
        return self.views[-1].offset if self.travels else self.rows_numel

    def drop_partial(self) -> None:
        """Forget what is still to be reduced over the replicate axis."""
        self.owing, self.partial = False, None

    def inputs(self, gradients: Gradients, *, writable: bool) -> Gradients:
        """Gradients (full, one per parameter, None where there are none) as they are sent, and the presence numbers.

        Those that travel on their own become flat regions of padded pieces. ``gradients`` is emptied, so that each is
        freed as soon as it is cast.

        Args:
            gradients: Only read, see [Note: Who owns a gradient].
            writable: Whether regions will be written to, and so have to lie in memory of their own.
        """
        presence = [self._presence(gradients)] if self.travels else []
        inputs: Gradients = []
        for index, parameter in enumerate(self.parameters):
            gradient, gradients[index] = gradients[index], None
            slot = self.direct.get(index)
            if slot is not None and (gradient is None or slot.padded or writable):
                gradient = self._own_region(gradient, parameter.shape, slot)
            elif gradient is not None:
                dtype = gradient.dtype if slot is None else self.dtype  # packing casts
                gradient = _conform(gradient, parameter.shape, dtype)
                if slot is not None:
                    gradient = gradient.as_strided((slot.region_numel,), (1,))
            inputs.append(gradient)
        return [*inputs, *presence]

    def _own_region(self, gradient: torch.Tensor | None, shape: ParameterShape, slot: Slot) -> torch.Tensor:
        if gradient is None or slot.padded:
            region = self._one.new_zeros(slot.region_numel)
        else:
            region = self.new_empty(slot.region_numel)
        if gradient is not None:
            region.as_strided(shape.shape, shape.stride).copy_(_dense(gradient))
        return region

    def _presence(self, gradients: Gradients) -> torch.Tensor:
        """See [Note: Gradients that are missing on some ranks]."""
        present = tuple(gradient is not None for gradient in gradients)
        found = self._presences.get(present)
        if found is None:
            if len(self._presences) >= MAX_PRESENCES_KEPT:
                self._presences.clear()
            found = self._presences[present] = self._one.new_tensor(present)
        return found

    def new_empty(self, numel: int) -> torch.Tensor:
        """A flat tensor where gradients are computed."""
        return empty(numel, self.dtype, self.mesh.device)


class PerParameterReducer(GradientReducer):
    """For rows of each parameter: large ones travel on their own, the others packed."""

    layout: PerParameterLayout  # of the parameters, and behind them the presence numbers
    _copies: list[_PackCopy]

    def __init__(self, parameters: list[ShardedParameter], mesh: ShardMesh, storage: Storage) -> None:
        super().__init__(parameters, mesh, storage)
        count = len(parameters)
        shapes = [p.shape for p in parameters]
        if self.travels:
            shapes.append(ParameterShape("<presence>", (count,), (1,), replicated=True))
        transport = mesh.transport or mesh.replica_transport
        self.layout = PerParameterLayout.build(
            shapes,
            world_size=mesh.world_size,
            itemsize=min(self.dtype.itemsize, self.landing_dtype.itemsize),
            direct_bytes=transport.direct_bytes if transport is not None else 0,
        )
        self.message = Buffer(self.layout.message_numel * mesh.world_size, self.dtype, mesh.device)
        self.message_tensor = self.message.tensor(0, (self.message.numel,), (1,))
        self._copies = []
        # Without a shard axis, direct gradients are tensors of rows themselves.
        start = 0 if mesh.transport is not None else self.layout.message_offset
        self.rows_numel = self.layout.shard_numel - start
        for index, slot in enumerate(self.layout.slots):
            if slot.route is Route.DIRECT:
                self.direct[index] = slot
            elif slot.piece_numel:
                self._plan_pack(index, slot)
            own = slot.route is Route.DIRECT and mesh.transport is None
            where = (len(self.direct), 0) if own else (0, slot.shard_offset - start)
            self.views.append(RowsView(*where, slot.local_shape(mesh.rank), slot.local_stride(mesh.rank)))
        self.message.free()

    def packed_moves(self, rows: torch.Tensor, message: torch.Tensor) -> list[Move]:
        """See :class:`GradientReducer`."""
        return [Move(rows.narrow(0, self.layout.message_offset, self.layout.message_numel), message)]

    def pack(self, inputs: Gradients, target: torch.Tensor) -> None:
        """See :class:`GradientReducer`."""
        targets, sources = [], []
        for copy in self._copies:
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

    def _plan_pack(self, index: int, slot: Slot) -> None:
        """Prepare the copies from one gradient to the message: at most two."""
        world_size, section = self.mesh.world_size, self.layout.message_numel
        start, piece, shape = slot.shard_offset - self.layout.message_offset, slot.piece_numel, slot.parameter

        def add(
            rank: int, target: tuple[int, ...], strides: tuple[int, ...], offset: int, source: tuple[int, ...]
        ) -> None:
            position = start + rank * section
            view = self.message.tensor(position, target, strides)
            self._copies.append(_PackCopy(index, view, position, offset, target, source))

        if slot.route is Route.REPLICATED:
            add(0, (world_size, piece), (section, 1), 0, (0, 1))
        elif slot.row_major:
            whole, rest = divmod(shape.numel, piece)
            if whole:
                add(0, (whole, piece), (section, 1), 0, (piece, 1))
            if rest:
                add(whole, (rest,), (1,), whole * piece, (1,))
        else:
            whole, rest = divmod(slot.rows, slot.chunk_rows)
            step = slot.chunk_rows * shape.stride[shape.cut]  # from the rows of one rank to those of the next
            if whole:
                rows = (whole, *slot.local_shape(0))
                add(0, rows, (section, *slot.local_stride(0)), 0, (step, *shape.stride))
            if rest:
                add(whole, slot.local_shape(whole), slot.local_stride(whole), whole * step, shape.stride)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _conform(gradient: torch.Tensor, shape: ParameterShape, dtype: torch.dtype) -> torch.Tensor:
    """``gradient`` with the parameter's dtype and strides; itself if it has them, as nearly always."""
    gradient = _dense(gradient)
    if gradient.is_complex():
        gradient = gradient.resolve_conj()  # autograd conjugates lazily, which flat views do not see
    if gradient.dtype is dtype and gradient.stride() == shape.stride:
        return gradient
    if gradient.dtype is dtype and gradient.is_contiguous() and shape.stride == contiguous_stride(shape.shape):
        return gradient
    conforming = torch.empty_strided(shape.shape, shape.stride, dtype=dtype, device=gradient.device)
    return conforming.copy_(gradient)
