"""From full gradients to sharded gradients.

[Note: Gradients that are missing on some ranks]
Which collectives run must not depend on whether this rank's gradient is None. So all trainable parameters of a
bucket take part in every reduction, missing gradients as zeros, and every rank sends along one number per
parameter: 1 if it had a gradient, else 0. Their mean rides in the packed message. Only a rank that had none
itself looks at it: if nobody had one, ``.grad`` stays None as in an unsharded run, otherwise it is the mean.

[Note: Stages of a reduction]
A reduction goes through up to three stages: a reduce-scatter over the shard axis, an all-reduce of this rank's rows
over the replicate axis, and landing: into the parameters' own dtype, in CPU memory if they are offloaded, added to
what is in ``.grad``. On an axis of size 1 the stage is skipped, and without a shard axis the "rows" are the full
gradients themselves. Memory for all of it is allocated on the compute stream when the reduction starts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fullshard.engine.mesh import ShardMesh
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.placement import dtensor
from fullshard.layout import ParameterShape, PerParameterLayout, Route, Slot
from fullshard.layout.per_parameter import contiguous_stride
from fullshard.memory import Buffer, Lane, Stream, Ticket, Work, host_buffer, run_on
from fullshard.transport import Division, Move, Parcel, Transport

__all__ = ["GradientReducer", "PendingReduction", "ReductionTerms", "issue_reductions", "issue_second_stage"]

Gradients = list["torch.Tensor | None"]


class ReductionTerms(NamedTuple):
    """How a bucket's gradients are reduced, as the user has set it. Equal on all ranks.

    Args:
        scatter: How sums over the shard axis are divided.
        replicas: How sums over the replicate axis are divided.
        all_reduce: Whether to reduce over the replicate axis now; if not, this rank's rows are kept for later.
        zeros_for_missing: Parameters without a gradient on any rank get one of zeros instead of None.
        hook: Called with each flat tensor of reduced rows, before they land.
        hook_stream: Where the hook runs; None: where the collectives do.
        pin_memory: Whether rows that land in CPU memory do so in page-locked memory.
    """

    scatter: Division
    replicas: Division
    all_reduce: bool = True
    zeros_for_missing: bool = False
    hook: Callable[[torch.Tensor], object] | None = None
    hook_stream: Stream | None = None
    pin_memory: bool = False


class _PackCopy(NamedTuple):
    """One copy from a gradient (seen with ``shape`` and ``stride`` from ``offset``) into the message."""

    gradient: int  # index of the parameter
    target: torch.Tensor  # in our own message
    start: int  # of the target in the message
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _RowsView(NamedTuple):
    """This rank's rows of one parameter: in which of the tensors of rows, and where in it."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.tensor].as_strided(self.shape, self.stride, self.offset)


class GradientReducer:
    """Reduces the gradients of one set of parameters of a bucket. Planned once, used every step.

    Args:
        parameters: The trainable ones of the bucket, in model order.
        mesh: The ranks to reduce over.
        dtype: In which gradients travel and are summed.
        shard_dtype: In which they land.
    """

    parameters: list[ShardedParameter]
    mesh: ShardMesh
    layout: PerParameterLayout  # of the parameters, and behind them the presence numbers
    message: Buffer
    message_tensor: torch.Tensor  # all of it
    dtype: torch.dtype
    shard_dtype: torch.dtype
    partial: PendingReduction | None  # whose rows are still to be reduced over the replicate axis
    views: list[_RowsView]  # of the parameters, and behind them the presence numbers
    direct: list[tuple[int, Slot]]  # the parameters that travel on their own, with their indices
    rows_numel: int  # elements of the first tensor of rows
    _copies: list[_PackCopy]
    _all_present: torch.Tensor

    def __init__(
        self, parameters: list[ShardedParameter], mesh: ShardMesh, dtype: torch.dtype, shard_dtype: torch.dtype
    ) -> None:
        self.parameters, self.mesh, self.dtype, self.shard_dtype = parameters, mesh, dtype, shard_dtype
        self.partial = None
        count = len(parameters)
        shapes = [p.shape for p in parameters]
        if self._travels:
            shapes.append(ParameterShape("<presence>", (count,), (1,), replicated=True))
        transport = mesh.transport or mesh.replica_transport
        self.layout = PerParameterLayout.build(
            shapes,
            world_size=mesh.world_size,
            itemsize=min(dtype.itemsize, shard_dtype.itemsize),
            direct_bytes=transport.direct_bytes if transport is not None else 0,
        )
        self.message = Buffer(self.layout.message_numel * mesh.world_size, dtype, mesh.device)
        self.message_tensor = self.message.tensor(0, (self.message.numel,), (1,))
        self._all_present = torch.ones(count, dtype=dtype, device=mesh.device)
        self._copies = []
        # Without a shard axis, direct gradients are tensors of rows themselves.
        start = 0 if mesh.transport is not None else self.layout.message_offset
        self.rows_numel = self.layout.shard_numel - start
        self.views, self.direct = [], []
        for index, slot in enumerate(self.layout.slots):
            if slot.route is Route.DIRECT:
                self.direct.append((index, slot))
            elif slot.piece_numel:
                self._plan_pack(index, slot)
            own = slot.route is Route.DIRECT and mesh.transport is None
            where = (len(self.direct), 0) if own else (0, slot.shard_offset - start)
            self.views.append(_RowsView(*where, slot.local_shape(mesh.rank), slot.local_stride(mesh.rank)))
        self.message.free()

    @property
    def _travels(self) -> bool:
        return self.mesh.transport is not None or self.mesh.replica_transport is not None

    def partial_rows(self) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """Parameters with gradients that are still to be reduced over the replicate axis, and this rank's rows."""
        return [] if self.partial is None else self.partial.partial_rows()

    @property
    def presence_offset(self) -> int:
        """Where in the first tensor of rows the presence numbers begin, which come last in it."""
        return self.views[-1].offset if self._travels else self.rows_numel

    def start(self, gradients: Gradients, terms: ReductionTerms) -> PendingReduction:
        """Prepare the reduction of ``gradients`` (full, one per parameter, None where there are none)."""
        conformed: Gradients = [
            None if g is None else _conform(g, p.shape, self.dtype)
            for g, p in zip(gradients, self.parameters, strict=True)
        ]
        if self._travels:
            conformed.append(self._presence(gradients))
        return PendingReduction(self, conformed, terms)

    def _presence(self, gradients: Gradients) -> torch.Tensor:
        """See [Note: Gradients that are missing on some ranks]."""
        if all(gradient is not None for gradient in gradients):
            return self._all_present
        return self._all_present.new_tensor([gradient is not None for gradient in gradients])

    def new_zeros(self, numel: int) -> torch.Tensor:
        """A flat tensor of zeros where gradients are computed."""
        return self._all_present.new_zeros(numel)

    def new_empty(self, numel: int) -> torch.Tensor:
        """A flat tensor where gradients are computed."""
        return self._all_present.new_empty(numel)

    def pack(self, inputs: Gradients, foreign: torch.Tensor | None) -> None:
        """Copy the small and the oddly laid out gradients into the message, which is ``foreign`` if that is given."""
        targets, sources = [], []
        for copy in self._copies:
            target = copy.target
            if foreign is not None:
                target = foreign.as_strided(target.shape, target.stride(), foreign.storage_offset() + copy.start)
            gradient = inputs[copy.gradient]
            if gradient is None:
                target.zero_()
            else:
                targets.append(target)
                offset = gradient.storage_offset() + copy.offset
                sources.append(gradient.as_strided(copy.shape, copy.stride, offset))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _plan_pack(self, index: int, slot: Slot) -> None:
        """Prepare the copies from one gradient to the message: at most two, or one per rank if rows interleave."""
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
            for rank in range(world_size):
                rows = slot.local_shape(rank)
                if rows[shape.cut]:
                    first = slot.local_rows(rank)[0] * shape.stride[shape.cut]
                    add(rank, rows, slot.local_stride(rank), first, shape.stride)


class PendingReduction:
    """A reduction under way: its stages, and what must live until they are through. See [Note: Stages of a reduction].

    ``rows`` are flat tensors: one with the rows of all parameters, or without a shard axis one with all packed
    parameters and one for each direct one.
    """

    reducer: GradientReducer
    terms: ReductionTerms
    scattered: bool  # whether the first stage is over
    _inputs: Gradients
    _moves: list[Move]
    _foreign: torch.Tensor | None  # the message, where the transport brings memory of its own
    _present: list[bool]
    _ticket: Ticket | None  # of the present stage
    _rows: list[torch.Tensor]
    _landed: list[torch.Tensor]  # the same tensors in the dtype, and on the device, of the shards

    def __init__(self, reducer: GradientReducer, inputs: Gradients, terms: ReductionTerms) -> None:
        self.reducer, self.terms, self._inputs, self.scattered = reducer, terms, inputs, False
        self._present = [gradient is not None for gradient in inputs[: len(reducer.parameters)]]
        self._ticket = self._foreign = None
        rows = reducer.new_empty(reducer.rows_numel)
        if terms.hook is not None:  # which may look at what lies between the parameters
            rows.zero_()
        self._rows, self._moves = [rows], []
        sharded = self.transport is not None
        for index, slot in reducer.direct:
            region = _region(inputs[index], slot, reducer)
            if sharded:
                self._moves.append(Move(rows.narrow(0, slot.shard_offset, slot.piece_numel), region))
            else:
                self._rows.append(region)
        self._landed = self._rows
        if reducer.dtype is not reducer.shard_dtype:
            self._landed = [torch.empty_like(rows, dtype=reducer.shard_dtype) for rows in self._rows]

    @property
    def transport(self) -> Transport | None:
        """Of the first stage."""
        return self.reducer.mesh.transport

    @property
    def lands_on_host(self) -> bool:
        """Whether the host has to wait before the gradients can be used."""
        return self.reducer.parameters[0].local.device != self.reducer.mesh.device

    # ---------------------------------------------------------------- first stage

    def allocate(self) -> None:
        """Give memory to the packed message."""
        message, transport = self.reducer.message, self.transport
        if not message.numel:
            return
        if transport is not None:
            self._foreign = transport.allocate("reduce", message.numel, message.dtype, message.device)
        if self._foreign is None:
            message.allocate()
        offset = self.reducer.layout.message_offset if transport is not None else 0
        piece = self._rows[0].narrow(0, offset, self.reducer.layout.message_numel)
        self._moves.append(Move(piece, self.reducer.message_tensor if self._foreign is None else self._foreign))

    def copy_in(self) -> None:
        """On the lane: pack what travels packed."""
        if not self.reducer.message.numel:
            return
        if self.terms.hook is not None:
            self._moves[-1].region.zero_()
        self.reducer.pack(self._inputs, self._foreign)
        if self.transport is None:
            self._moves[-1].piece.copy_(self._moves[-1].region)

    def parcel(self, unit: str) -> Parcel:
        """What travels in the first stage."""
        return Parcel(unit, self._moves, self.terms.scatter)

    def issued(self, ticket: Ticket) -> None:
        """A stage is in flight now."""
        self._ticket = ticket

    def copy_out(self) -> None:
        """On the lane: the first stage is over."""
        if self.transport is None:
            factor = self.terms.scatter.before * self.terms.scatter.after
            if factor != 1:
                torch._foreach_mul_(self._rows, 1 / factor)
        if self.reducer.mesh.replica_transport is None:
            self.land()

    # ---------------------------------------------------------------- further stages

    def end_first_stage(self) -> bool:
        """Wait for the first stage and let go of the full gradients. Whether there is a second to be issued."""
        assert self._ticket is not None and not self.scattered
        self._ticket.wait()
        self._let_go()
        reducer = self.reducer
        if reducer.mesh.replica_transport is None:
            return False
        if not self.terms.all_reduce:
            if reducer.partial is None:
                reducer.partial = self
            else:
                reducer.partial._add(self)
            return False
        if reducer.partial is not None:
            self._add(reducer.partial)
            reducer.partial = None
        return True

    def replica_parcel(self, unit: str) -> Parcel:
        """What travels in the second stage."""
        return Parcel(unit, [Move(rows, rows) for rows in self._rows if rows.numel()], self.terms.replicas)

    def land(self) -> None:
        """On the lane: let the user's hook see the rows, cast them, and send them to the host if they live there."""
        terms = self.terms
        if terms.hook is not None:
            with torch.no_grad():
                for index, rows in enumerate(self._rows):
                    seen = rows[: self.reducer.presence_offset] if index == 0 else rows
                    if seen.numel():
                        run_on(terms.hook_stream, terms.hook, seen)
        if self._landed is not self._rows:
            torch._foreach_copy_(self._landed, self._rows)
        if self.lands_on_host:
            hosts = [host_buffer(rows.numel(), rows.dtype, pin=terms.pin_memory) for rows in self._landed]
            for host, rows in zip(hosts, self._landed, strict=True):
                host.copy_(rows, non_blocking=True)
            self._landed = hosts

    def release(self) -> None:
        """Wait for the last stage and let go of what only the device needs."""
        assert self.scattered and self._ticket is not None
        self._ticket.wait()
        if self.reducer.partial is not self:
            self._rows = []

    def accumulate(self) -> None:
        """Set (or add to) the sharded gradients and run the hooks that users put on parameters."""
        reducer, terms = self.reducer, self.terms
        assert self._ticket is not None
        if not terms.all_reduce and reducer.mesh.replica_transport is not None:
            return
        if self.lands_on_host:
            self._ticket.settle()
        present = self._present
        if terms.zeros_for_missing:
            present = [True] * len(present)
        elif not all(present) and len(reducer.views) > len(present):
            # See [Note: Gradients that are missing on some ranks].
            elsewhere = reducer.views[len(present)].on(self._landed).tolist()
            present = [here or abs(somewhere) > 0 for here, somewhere in zip(present, elsewhere, strict=True)]
        for index, parameter in enumerate(reducer.parameters):
            if present[index]:
                _accumulate(parameter, reducer.views[index].on(self._landed))

    def abandon(self) -> None:
        """Drop it after a failure; what is in flight must land first, for its memory is used again."""
        if self._ticket is not None:
            with contextlib.suppress(RuntimeError):
                self._ticket.wait()
        self.reducer.partial = None
        self._let_go()

    def partial_rows(self) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """The parameters that have gradients here, with this rank's rows of them, before they land."""
        return [
            (parameter, self.reducer.views[index].on(self._rows))
            for index, parameter in enumerate(self.reducer.parameters)
            if self._present[index]
        ]

    def _add(self, other: PendingReduction) -> None:
        torch._foreach_add_(self._rows, other._rows)
        self._present = [a or b for a, b in zip(self._present, other._present, strict=True)]

    def _let_go(self) -> None:
        self.scattered = True
        # A side stream may have read the gradients and the message until now.
        self._inputs, self._moves, self._foreign = [], [], None
        self.reducer.message.free()


def issue_reductions(pending: Sequence[tuple[str, PendingReduction]], lane: Lane) -> None:
    """Start the first stage of reductions, with the names of their units, in one launch per transport."""

    def allocate() -> None:
        for _, reduction in pending:
            reduction.allocate()

    def launch() -> list[Work]:
        parcels: dict[int, tuple[Transport, list[Parcel]]] = {}
        for unit, reduction in pending:
            reduction.copy_in()
            transport = reduction.transport
            if transport is not None:
                parcels.setdefault(id(transport), (transport, []))[1].append(reduction.parcel(unit))
        return [work for transport, sent in parcels.values() for work in transport.reduce(sent)]

    def finish() -> None:
        for _, reduction in pending:
            reduction.copy_out()

    ticket = lane.issue(launch, finish, allocate=allocate)
    for _, reduction in pending:
        reduction.issued(ticket)


def issue_second_stage(pending: Sequence[tuple[str, PendingReduction]], lane: Lane) -> None:
    """Start the second stage of reductions in one launch per transport."""

    def launch() -> list[Work]:
        parcels: dict[int, tuple[Transport, list[Parcel]]] = {}
        for unit, reduction in pending:
            transport = reduction.reducer.mesh.replica_transport
            assert transport is not None
            parcels.setdefault(id(transport), (transport, []))[1].append(reduction.replica_parcel(unit))
        return [work for transport, sent in parcels.values() for work in transport.all_reduce(sent)]

    def finish() -> None:
        for _, reduction in pending:
            reduction.land()

    ticket = lane.issue(launch, finish)
    for _, reduction in pending:
        reduction.issued(ticket)


def _accumulate(parameter: ShardedParameter, local: torch.Tensor) -> None:
    sharded = parameter.sharded
    gradient: torch.Tensor = dtensor(local, parameter.spec)
    hooks = sharded._backward_hooks
    if hooks:
        for hook in list(hooks.values()):  # hooks may remove themselves
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
    present = sharded.grad
    if present is None:
        sharded.grad = gradient
    else:
        present._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
    if hooks:
        for hook in list(hooks.values()):
            hook(sharded)


def _conform(gradient: torch.Tensor, shape: ParameterShape, dtype: torch.dtype) -> torch.Tensor:
    """``gradient`` with the parameter's dtype and strides; itself if it has them, as nearly always."""
    if gradient.requires_grad:  # create_graph=True
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.dtype is dtype and gradient.stride() == shape.stride:
        return gradient
    if gradient.dtype is dtype and gradient.is_contiguous() and shape.stride == contiguous_stride(shape.shape):
        return gradient
    conforming = torch.empty_strided(shape.shape, shape.stride, dtype=dtype, device=gradient.device)
    return conforming.copy_(gradient)


def _region(gradient: torch.Tensor | None, slot: Slot, reducer: GradientReducer) -> torch.Tensor:
    """The gradient as a flat region of padded pieces: its own memory unless it is missing or uneven."""
    if gradient is not None and not slot.padded:
        return gradient.as_strided((slot.region_numel,), (1,))
    region = reducer.new_zeros(slot.region_numel)
    if gradient is not None:
        numel = math.prod(slot.parameter.shape)
        region.narrow(0, 0, numel).copy_(gradient.as_strided((numel,), (1,)))
    return region
