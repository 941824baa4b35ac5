"""This rank's shards of reduced gradients, and those that wait for their all-reduce over replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.plan import ReductionPlan

__all__ = ["PartialReduceOutput", "ShardedGradients"]


@dataclass
class ShardedGradients:
    """This rank's shards of the gradients of a plan's parameters."""

    plan: ReductionPlan  # says where each lies
    tensors: list[torch.Tensor]  # the tensors of shards
    present: list[bool]  # parameters that have a gradient on this rank
    expected: list[bool]  # parameters that may have one on any rank; equal on all

    def add(self, other: ShardedGradients) -> None:
        """Add the gradients of other microbatches, by the same plan."""
        torch._foreach_add_(self.tensors, other.tensors)
        self.present = [a or b for a, b in zip(self.present, other.present, strict=True)]
        self.expected = [a or b for a, b in zip(self.expected, other.expected, strict=True)]

    @property
    def misses_some(self) -> bool:
        """True if parameters have no gradient on this rank that may have one on others."""
        if self.present == self.expected:
            return False
        return any(wanted and not here for wanted, here in zip(self.expected, self.present, strict=True))

    def present_anywhere(self) -> list[bool]:
        """Parameters that have a gradient on any rank, see [Note: Gradients that are missing on some ranks]."""
        presence = self.plan.presence
        if presence is None or not self.misses_some:
            return self.present  # nobody has what is missing: it is frozen
        elsewhere = presence.on(self.tensors[0]).tolist()
        return [here or abs(somewhere) > 0 for here, somewhere in zip(self.present, elsewhere, strict=True)]

    def by_parameter(self) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """The parameters that have a gradient, with this rank's shard of it."""
        found = zip(self.plan.parameters, self.plan.views, self.present_anywhere(), strict=True)
        return [(p, view.on(self.tensors[tensor])) for p, (tensor, view), is_there in found if is_there]


class PartialReduceOutput:
    """The gradients of a bucket that wait for their all-reduce over replicas: the only place that knows of them.

    Microbatches with ``set_requires_all_reduce(False)`` leave them. They are added up by plan until a reduction by the
    same plan does all-reduce.
    """

    _needed: set[ReductionPlan]  # whose last reduction, as far as it has begun, was one without an all-reduce
    _gradients: dict[ReductionPlan, ShardedGradients]

    def __init__(self) -> None:
        self._needed, self._gradients = set(), {}

    @property
    def needs_all_reduce(self) -> bool:
        """True if there are such gradients, or will be once a reduction in flight has ended."""
        return bool(self._needed)

    def needed_by(self, plan: ReductionPlan) -> bool:
        """True if gradients that were reduced by ``plan`` need an all-reduce."""
        return plan in self._needed

    def begin(self, plan: ReductionPlan, *, all_reduce: bool) -> ShardedGradients | None:
        """Note that a reduction begins. If it all-reduces, return the gradients to be reduced together with its own."""
        if not all_reduce and plan.all_reduces:
            self._needed.add(plan)
        else:
            self._needed.discard(plan)
        return self._gradients.pop(plan, None) if all_reduce else None

    def keep(self, gradients: ShardedGradients) -> None:
        """Keep the gradients of a reduction that does not all-reduce."""
        kept = self._gradients.setdefault(gradients.plan, gradients)
        if kept is not gradients:
            kept.add(gradients)

    def take(self, plan: ReductionPlan) -> ShardedGradients | None:
        """Take the gradients of reductions by ``plan`` that were in flight when the one that takes them began."""
        return self._gradients.pop(plan, None)

    def drop(self, plan: ReductionPlan | None = None) -> None:
        """Forget the gradients of one plan, or all."""
        plans = [*self._needed, *self._gradients] if plan is None else [plan]
        for each in plans:
            self._needed.discard(each)
            self._gradients.pop(each, None)

    def by_parameter(self) -> dict[int, torch.Tensor]:
        """This rank's shards of the gradients that wait, by the id of the ShardedParameter."""
        return {id(p): shard for kept in self._gradients.values() for p, shard in kept.by_parameter()}
