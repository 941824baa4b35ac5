"""From full gradients to sharded gradients.

[Note: Stages of a reduction]
A reduction goes through up to three stages: a reduce-scatter over the shard axis, an all-reduce of this rank's rows
over the replicate axis, and landing: into the parameters' own dtype, in CPU memory if they are offloaded, added to
what is in ``.grad``. On an axis of size 1 the stage is skipped, and without a shard axis the "rows" are the full
gradients themselves. Memory for all of it is allocated on the compute stream when the reduction starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fullshard.engine.parameter import ShardedParameter, has_gradient_hooks
from fullshard.engine.reducer import GradientReducer, Gradients
from fullshard.memory import Lane, Stream, Ticket, Work, host_buffer, run_on
from fullshard.transport import Division, Move, Parcel, Transport, launch_all

__all__ = ["PendingReduction", "ReductionTerms", "issue_reductions", "issue_second_stage"]


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


class PendingReduction:
    """A reduction under way: its stages, and what must live until they are through. See [Note: Stages of a reduction].

    ``rows`` are flat tensors: one with the rows of all parameters, or without a shard axis one with all packed
    parameters and one for each direct one.
    """

    reducer: GradientReducer
    terms: ReductionTerms
    scattered: bool  # whether the first stage is over
    earlier: PendingReduction | None  # whose rows are reduced over the replicate axis together with these
    _inputs: Gradients
    _moves: list[Move]
    _packed: list[Move]  # those of them that are the message
    _foreign: torch.Tensor | None  # the message, where the transport brings memory of its own
    _present: list[bool]
    _expected: list[bool]  # whether any rank may have a gradient; equal on all
    _ticket: Ticket | None  # of the present stage
    _rows: list[torch.Tensor]
    _landed: list[torch.Tensor]  # the same tensors in the dtype, and on the device, of the shards
    _leaving: list[torch.Tensor]  # what is being copied to the host: a side stream still reads it

    def __init__(
        self,
        reducer: GradientReducer,
        gradients: Gradients,
        terms: ReductionTerms,
        expected: Sequence[bool] | None = None,
    ) -> None:
        self.reducer, self.terms, self.scattered = reducer, terms, False
        self._present = [gradient is not None for gradient in gradients]
        self._expected = [True] * len(gradients) if expected is None else list(expected)
        sharded = self.transport is not None
        # Without a shard axis they are reduced, hooked and scaled in place, and what lands is sharded gradients.
        self._inputs = inputs = reducer.inputs(gradients, writable=not sharded or terms.scatter.before != 1)
        self._ticket = self._foreign = self.earlier = None
        if terms.all_reduce:
            self.earlier, reducer.partial = reducer.partial, None
        reducer.owing = not terms.all_reduce and reducer.mesh.replica_transport is not None
        rows = reducer.new_empty(reducer.rows_numel)
        if terms.hook is not None:  # which may look at what lies between the parameters
            rows.zero_()
        self._rows, self._moves, self._packed = [rows], [], []
        for index, slot in reducer.direct.items():
            region = inputs[index]
            assert region is not None
            if sharded:
                self._moves.append(Move(rows.narrow(0, slot.shard_offset, slot.piece_numel), region))
            else:
                self._rows.append(region)
        self._landed = self._rows
        if reducer.dtype is not reducer.landing_dtype and (terms.all_reduce or reducer.mesh.replica_transport is None):
            self._landed = [torch.empty_like(rows, dtype=reducer.landing_dtype) for rows in self._rows]
        self._leaving = []

    @property
    def transport(self) -> Transport | None:
        """Of the first stage."""
        return self.reducer.mesh.transport

    @property
    def lands_on_host(self) -> bool:
        """Whether the host has to wait before the gradients can be used."""
        return self.reducer.lands_on_host

    # ---------------------------------------------------------------- first stage

    def allocate(self) -> None:
        """Give memory to the packed message. Without a shard axis there is none: the rows are what is packed."""
        message, transport = self.reducer.message, self.transport
        if not message.numel or transport is None:
            return
        self._foreign = transport.allocate("reduce", message.numel, message.dtype, message.device)
        if self._foreign is None:
            message.allocate()
        self._packed = self.reducer.packed_moves(self._rows[0], self._message)
        self._moves += self._packed

    @property
    def _message(self) -> torch.Tensor:
        return self.reducer.message_tensor if self._foreign is None else self._foreign

    def copy_in(self) -> None:
        """On the compute stream, which made the gradients and uses their memory again: pack what travels packed."""
        if self.transport is None:
            self.reducer.pack(self._inputs, self._rows[0])
        elif self._packed:
            if self.terms.hook is not None:
                for move in self._packed:
                    move.region.zero_()
            self.reducer.pack(self._inputs, self._message)
        self._inputs = []  # what travels by itself is held by its move

    def parcel(self, unit: str) -> Parcel:
        """What travels in the first stage."""
        return Parcel(unit, self._moves, self.terms.scatter)

    def issued(self, ticket: Ticket) -> None:
        """A stage is in flight now."""
        self._ticket = ticket

    def copy_out(self) -> None:
        """On the lane: the first stage is over."""
        replicas = self.reducer.mesh.replica_transport
        if self.transport is None and not (replicas is not None and replicas.hooked):
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
        for earlier in (self.earlier, reducer.partial):  # the second: one that was under way when this began
            if earlier is not None:
                self._add(earlier)
        self.earlier = reducer.partial = None
        return True

    def replica_parcel(self, unit: str) -> Parcel:
        """What travels in the second stage."""
        return Parcel(unit, self.reducer.replica_moves(self._rows), self.terms.replicas)

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
            self._landed, self._leaving = hosts, self._landed

    def release(self) -> None:
        """Wait for the last stage and let go of what only the device needs."""
        assert self.scattered and self._ticket is not None
        self._ticket.wait()
        self._leaving = []
        if self.reducer.partial is not self:
            self._rows = []

    @property
    def arriving(self) -> list[tuple[ShardedParameter, torch.Tensor]] | None:
        """The gradients that parameters will have of it, in the memory in which they land; None if that is not known
        before, or if users' functions are called then.
        """
        reducer, terms, mesh = self.reducer, self.terms, self.reducer.mesh
        if not terms.all_reduce and mesh.replica_transport is not None:
            return []
        hooked = terms.hook is not None or any(has_gradient_hooks(p.sharded) for p in reducer.parameters)
        if self.lands_on_host or hooked or (mesh.transport is not None and mesh.transport.hooked):
            return None
        if mesh.replica_transport is not None and not mesh.replica_transport.sums_at_once:
            return None  # ranks would send the rest at different times
        if any(wanted and not here for wanted, here in zip(self._expected, self._present, strict=True)):
            return None
        return reducer.arriving(self._landed, self._present)

    def accumulate(self) -> None:
        """Set (or add to) the sharded gradients and run the hooks that users put on parameters."""
        reducer, terms = self.reducer, self.terms
        assert self._ticket is not None
        if not terms.all_reduce and reducer.mesh.replica_transport is not None:
            return
        if self.lands_on_host:
            self._ticket.settle()
        present = [True] * len(self._present) if terms.zeros_for_missing else self._present_anywhere(self._landed)
        reducer.accumulate(self._landed, present)

    def abandon(self) -> None:
        """Drop it after a failure; what is in flight must land first, for its memory is used again."""
        if self._ticket is not None:
            with contextlib.suppress(RuntimeError):
                self._ticket.wait()
        self.reducer.drop_partial()
        self._let_go()

    def partial_rows(self) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """The parameters that have gradients here, with this rank's rows of them, before they land."""
        views, present = self.reducer.views, self._present_anywhere(self._rows)
        named = zip(self.reducer.parameters, present, strict=True)
        return [(parameter, views[i].on(self._rows)) for i, (parameter, is_there) in enumerate(named) if is_there]

    def _present_anywhere(self, rows: list[torch.Tensor]) -> list[bool]:
        """See [Note: Gradients that are missing on some ranks]."""
        present, views = self._present, self.reducer.views
        if all(present) or len(views) == len(present):
            return present
        if not any(wanted and not here for wanted, here in zip(self._expected, present, strict=True)):
            return present  # nobody has what is missing: it is frozen
        elsewhere = views[len(present)].on(rows).tolist()
        return [here or abs(somewhere) > 0 for here, somewhere in zip(present, elsewhere, strict=True)]

    def _add(self, other: PendingReduction) -> None:
        torch._foreach_add_(self._rows, other._rows)
        self._present = [a or b for a, b in zip(self._present, other._present, strict=True)]
        self._expected = [a or b for a, b in zip(self._expected, other._expected, strict=True)]

    def _let_go(self) -> None:
        self.scattered = True
        # A side stream may have read the gradients and the message until now.
        if self._foreign is not None and self.transport is not None:
            self.transport.release("reduce", self._foreign)
        self._inputs, self._moves, self._packed, self._foreign = [], [], [], None
        self.reducer.message.free()


_Named = tuple[str, PendingReduction]  # with the name of its unit


def issue_reductions(pending: Sequence[_Named], lane: Lane) -> None:
    """Start the first stage of reductions in one launch per transport."""

    def allocate() -> None:
        for _, reduction in pending:
            reduction.allocate()
            reduction.copy_in()

    def launch() -> list[Work]:
        sent = ((reduction.transport, reduction.parcel(unit)) for unit, reduction in pending)
        return launch_all(sent, Transport.reduce)

    def finish() -> None:
        for _, reduction in pending:
            reduction.copy_out()

    _issue(pending, lane.issue(launch, finish, allocate=allocate))


def issue_second_stage(pending: Sequence[_Named], lane: Lane) -> None:
    """Start the second stage of reductions in one launch per transport."""

    def launch() -> list[Work]:
        sent = ((each.reducer.mesh.replica_transport, each.replica_parcel(unit)) for unit, each in pending)
        return launch_all(sent, Transport.all_reduce)

    def finish() -> None:
        for _, reduction in pending:
            reduction.land()

    _issue(pending, lane.issue(launch, finish))


def _issue(pending: Sequence[_Named], ticket: Ticket) -> None:
    for _, reduction in pending:
        reduction.issued(ticket)
