"""One reduction in flight: from the unsharded gradients of a bucket to sharded gradients.

[Note: Stages of a reduction]
A reduction goes through up to three stages: a reduce-scatter over the shard axis, an all-reduce of this rank's shards
over replicas, and finalization: into the parameters' own dtype, in CPU memory if they are offloaded; then the shards
are added to what is in ``.grad``. Without replicas the second stage is skipped, and without a shard axis the first one
scales gradients in place. Memory for all of it is allocated on the compute stream when the reduction starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fullshard.comm import CommRequest, GradScaling, Operand, Transport, launch_all
from fullshard.engine.reduction.plan import Gradients, ReductionPlan
from fullshard.memory import Buffer, CommStream, PendingWork, Stream, Work, host_buffer, run_on

__all__ = ["GradReduction", "PartialReduceOutput", "ReductionTerms", "issue_all_reduces", "issue_reduce_scatters"]


class ReductionTerms(NamedTuple):
    """The user's settings for reducing the gradients of a bucket. Equal on all ranks."""

    scatter: GradScaling  # of sums over the shard axis
    replicas: GradScaling  # of sums over the replicate axis
    all_reduce: bool  # over the replicate axis now; if not, this rank's shards are kept for later
    zeros_for_missing: bool  # parameters without a gradient on any rank get one of zeros instead of None
    hook: Callable[[torch.Tensor], object] | None  # called with each flat tensor of reduced shards, before finalization
    hook_stream: Stream | None  # where the hook runs; None: where the collectives do
    pin_memory: bool  # shards that are copied to CPU memory are in page-locked memory there


class GradReduction:
    """A reduction under way, and what must live until it is over, see [Note: Stages of a reduction].

    It takes one gradient per parameter of its plan, None where there is none, and empties their list. ``expected``
    are the parameters that may have a gradient on any rank, equal on all.
    """

    plan: ReductionPlan
    terms: ReductionTerms
    transport: Transport  # of the reduce-scatter
    all_reduced_later: bool  # there are replicas, but its shards wait for the all-reduce of a later one
    reduce_scattered: bool  # the first stage is over
    tensors: list[torch.Tensor]  # the tensors of shards, as the plan says
    present: list[bool]  # parameters that have a gradient on this rank
    expected: list[bool]  # parameters that may have one on any rank; equal on all
    _partial_reduce_output: PartialReduceOutput  # of the bucket: where shards are kept that are not all-reduced now
    _inputs: Gradients
    _pieces: Sequence[torch.Tensor]  # of the first tensor of shards: what operands are reduced into
    _operands: list[Operand]
    _message: Buffer | torch.Tensor | None  # the packed gradients of all ranks; a tensor is the transport's own memory
    _pending_work: PendingWork | None  # of the present stage
    _finalized: list[torch.Tensor]  # the same tensors in the dtype, and on the device, of sharded gradients
    _leaving: list[torch.Tensor]  # what is being copied to the host: a side stream still reads it

    def __init__(
        self,
        plan: ReductionPlan,
        gradients: Gradients,
        terms: ReductionTerms,
        partial_reduce_output: PartialReduceOutput,
        expected: list[bool],
    ) -> None:
        self.plan, self.terms, self.transport = plan, terms, plan.mesh.transport
        self._partial_reduce_output = partial_reduce_output
        self.all_reduced_later, self.reduce_scattered = plan.all_reduces and not terms.all_reduce, False
        self.present, self.expected = [gradient is not None for gradient in gradients], expected
        self._inputs = plan.inputs(gradients, writable=plan.reduces_in_place or terms.scatter.before != 1)
        partial_reduce_output.begin(plan, all_reduce=terms.all_reduce)
        # Hooks may look at what lies between the parameters.
        tensors = self.tensors = self._finalized = plan.new_shards(self._inputs, zeros=terms.hook is not None)
        self._pieces = plan.pieces_of(tensors)
        self._operands = plan.direct_operands(self._inputs, tensors, self._pieces)
        if not self.all_reduced_later and (dtype := plan.sharded_dtype) is not plan.dtype:
            self._finalized = [torch.empty_like(each, dtype=dtype) for each in tensors]
        self._pending_work, self._message, self._leaving = None, None, []

    # ---------------------------------------------------------------- first stage: reduce-scatter

    def pack(self) -> None:
        """Allocate and fill the message; on the compute stream, which made the gradients and uses their memory again.

        Without a shard axis there is none: the first tensor of shards is packed.
        """
        plan, numel = self.plan, self.plan.packing.numel
        memory = self.tensors[0]
        if numel:
            own = self.transport.allocate("reduce_scatter", numel, plan.dtype, plan.mesh.device)
            self._message = Buffer(numel, plan.dtype, plan.mesh.device) if own is None else own
            memory = self._message.tensor(0, (numel,), (1,)) if isinstance(self._message, Buffer) else self._message
            packed = plan.packed_operands(self._pieces, memory)
            for operand in packed if self.terms.hook is not None or plan.zeroes_message else ():
                operand.unsharded.zero_()
            self._operands += packed
        if numel or plan.reduces_in_place:
            plan.packing.pack(self._inputs, memory)
        self._inputs = []  # what is not packed is held by its operand

    def request(self, unit: str) -> CommRequest:
        """Return the operands of the reduce-scatter."""
        return CommRequest(unit, self._operands, self.terms.scatter)

    def end_reduce_scatter(self) -> bool:
        """Wait for the first stage and free the unsharded gradients. True if an all-reduce is to be issued next."""
        assert self._pending_work is not None and not self.reduce_scattered
        self._pending_work.wait()
        self._free_inputs()
        if self.all_reduced_later:
            self._partial_reduce_output.keep(self)
        if not self.plan.all_reduces or self.all_reduced_later:
            return False
        earlier = self._partial_reduce_output.take(self.plan)
        if earlier is not None:
            self.add(earlier)
        return True

    def add(self, other: GradReduction) -> None:
        """Add the shards of other microbatches, reduced by the same plan."""
        torch._foreach_add_(self.tensors, other.tensors)
        self.present = [a or b for a, b in zip(self.present, other.present, strict=True)]
        self.expected = [a or b for a, b in zip(self.expected, other.expected, strict=True)]

    # ---------------------------------------------------------------- second stage: all-reduce over replicas

    def all_reduce_request(self, unit: str) -> CommRequest:
        """Return the operands of the all-reduce."""
        return CommRequest(unit, self.plan.all_reduce_operands(self.tensors), self.terms.replicas)

    # ---------------------------------------------------------------- third stage: sharded gradients

    def finalize(self) -> None:
        """Call the user's hook, cast, and copy to the host what belongs there; on the communication stream."""
        terms = self.terms
        if terms.hook is not None:
            with torch.no_grad():
                for index, shards in enumerate(self.tensors):
                    seen = shards[: self.plan.presence_offset] if index == 0 else shards
                    if seen.numel():
                        run_on(terms.hook_stream, terms.hook, seen)
        if self._finalized is not self.tensors:
            torch._foreach_copy_(self._finalized, self.tensors)
        if self.plan.ends_on_host:
            hosts = [host_buffer(each.numel(), each.dtype, pin=terms.pin_memory) for each in self._finalized]
            for host, shards in zip(hosts, self._finalized, strict=True):
                host.copy_(shards, non_blocking=True)
            self._finalized, self._leaving = hosts, self._finalized

    def release(self) -> None:
        """Wait for the last stage and free what only the device needs."""
        assert self.reduce_scattered and self._pending_work is not None
        self._pending_work.wait()
        self._leaving = []
        self.tensors = self._finalized

    def is_of_same_bucket(self, other: GradReduction) -> bool:
        """Return True if the gradients of both are accumulated into the same parameters."""
        return self._partial_reduce_output is other._partial_reduce_output

    @property
    def is_read_by_host(self) -> bool:
        """True if the host has to wait for the result: offloaded gradients, or presence numbers of missing ones."""
        plan = self.plan
        if plan.ends_on_host:
            return True
        reads_presence = plan.presence is not None and not self.terms.zeros_for_missing and self.misses_some
        return reads_presence and plan.mesh.device.type != "cpu" and not self.all_reduced_later

    def accumulate(self) -> None:
        """Set (or add to) the sharded gradients and run the hooks that users put on parameters."""
        assert self._pending_work is not None
        if self.all_reduced_later:
            return
        if self.plan.ends_on_host:
            self._pending_work.synchronize()
        present = [True] * len(self.present) if self.terms.zeros_for_missing else self.present_anywhere()
        self.plan.accumulate(self.tensors, present)

    @property
    def misses_some(self) -> bool:
        """True if parameters have no gradient on this rank that may have one on others."""
        if self.present == self.expected:
            return False
        return any(wanted and not here for wanted, here in zip(self.expected, self.present, strict=True))

    def present_anywhere(self) -> list[bool]:
        """Find parameters with a gradient on any rank, see [Note: Gradients that are missing on some ranks]."""
        presence = self.plan.presence
        if presence is None or not self.misses_some:
            return self.present  # nobody has what is missing: it is frozen
        elsewhere = presence.on(self.tensors[0]).tolist()
        return [here or abs(somewhere) > 0 for here, somewhere in zip(self.present, elsewhere, strict=True)]

    def abandon(self) -> None:
        """Drop it after a failure; what is in flight is waited for, because its memory is used again."""
        if self._pending_work is not None:
            with contextlib.suppress(RuntimeError):
                self._pending_work.wait()
        self._partial_reduce_output.drop(self.plan)
        self._free_inputs()

    def _free_inputs(self) -> None:
        self.reduce_scattered = True
        # A side stream may have read the gradients and the message until now.
        if isinstance(self._message, Buffer):
            self._message.free()
        elif self._message is not None:
            self.transport.release("reduce_scatter", self._message)
        self._inputs, self._operands, self._pieces, self._message = [], [], (), None


class PartialReduceOutput:
    """The gradients of a bucket that wait for their all-reduce over replicas.

    Microbatches with ``set_requires_all_reduce(False)`` leave them. They are added up by plan until a reduction by the
    same plan does all-reduce.
    """

    _needed: set[ReductionPlan]  # whose last reduction, as far as it has begun, was one without an all-reduce
    _kept: dict[ReductionPlan, GradReduction]  # sums of those whose reduce-scatter has ended

    def __init__(self) -> None:
        self._needed, self._kept = set(), {}

    @property
    def needs_all_reduce(self) -> bool:
        """True if there are such gradients, or will be once a reduction in flight has ended."""
        return bool(self._needed)

    def needed_by(self, plan: ReductionPlan) -> bool:
        """Return True if gradients that were reduced by ``plan`` need an all-reduce."""
        return plan in self._needed

    def begin(self, plan: ReductionPlan, *, all_reduce: bool) -> None:
        """Record whether gradients of this plan still need an all-reduce once a reduction that begins has ended."""
        if plan.all_reduces and not all_reduce:
            self._needed.add(plan)
        else:
            self._needed.discard(plan)

    def keep(self, reduction: GradReduction) -> None:
        """Keep the shards of a reduction that does not all-reduce."""
        kept = self._kept.setdefault(reduction.plan, reduction)
        if kept is not reduction:
            kept.add(reduction)

    def take(self, plan: ReductionPlan) -> GradReduction | None:
        """Take the shards that wait for the all-reduce of this plan: those of reductions that were issued earlier."""
        return self._kept.pop(plan, None)

    def drop(self, plan: ReductionPlan | None = None) -> None:
        """Forget the gradients of one plan, or all."""
        for each in [*self._needed, *self._kept] if plan is None else [plan]:
            self._needed.discard(each)
            self._kept.pop(each, None)

    def by_parameter(self) -> dict[int, torch.Tensor]:
        """Return this rank's shards of the gradients that wait, by the id of the ShardedParameter.

        Those that a reduction in flight will take along are no longer among them.
        """
        shards: dict[int, torch.Tensor] = {}
        for kept in (kept for plan, kept in self._kept.items() if plan in self._needed):
            found = zip(kept.plan.parameters, kept.plan.views, kept.present_anywhere(), strict=True)
            shards |= {id(p): view.on(kept.tensors[tensor]) for p, (tensor, view), there in found if there}
        return shards


_Named = tuple[str, GradReduction]  # with the name of its unit


def issue_reduce_scatters(reductions: Sequence[_Named], comm_stream: CommStream) -> None:
    """Start the first stage of reductions in one launch per transport."""

    def allocate() -> None:
        for _, reduction in reductions:
            reduction.pack()

    def launch() -> list[Work]:
        requests = ((reduction.transport, reduction.request(unit)) for unit, reduction in reductions)
        return launch_all(requests, Transport.reduce_scatter)

    def finish() -> None:
        for _, reduction in reductions:
            if not reduction.plan.all_reduces:  # there is no second stage
                reduction.finalize()

    _issued(reductions, comm_stream.issue(launch, finish, allocate=allocate))


def issue_all_reduces(reductions: Sequence[_Named], comm_stream: CommStream) -> None:
    """Start the second stage of reductions in one launch per transport."""

    def launch() -> list[Work]:
        requests = ((each.plan.mesh.replica_transport, each.all_reduce_request(unit)) for unit, each in reductions)
        return launch_all(requests, Transport.all_reduce)

    def finish() -> None:
        for _, reduction in reductions:
            reduction.finalize()

    _issued(reductions, comm_stream.issue(launch, finish))


def _issued(reductions: Sequence[_Named], pending_work: PendingWork) -> None:
    for _, reduction in reductions:
        reduction._pending_work = pending_work
