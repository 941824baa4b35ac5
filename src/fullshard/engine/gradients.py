"""The gradients of a unit: those still to be reduced, and those that are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.engine.bucket import Bucket
from fullshard.engine.hooks import accumulates
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.reduction import PendingReduction
from fullshard.engine.settings import ReductionSettings
from fullshard.errors import FullshardError

__all__ = ["UnitGradients"]


class UnitGradients:
    """Looks at, and clears, what autograd and the reducers of a unit hold.

    Args:
        parameters: Of the unit.
        buckets: Of the unit.
    """

    _parameters: Sequence[ShardedParameter]
    _buckets: Sequence[Bucket]

    def __init__(self, parameters: Sequence[ShardedParameter], buckets: Sequence[Bucket]) -> None:
        self._parameters, self._buckets = parameters, buckets

    def begin_reduction(self, settings: ReductionSettings, *, all_reduce: bool) -> list[PendingReduction]:
        """Take the full gradients; what is returned is to be issued."""
        pending = []
        for bucket in self._buckets:
            terms = settings.terms(bucket.mesh, bucket.storage, all_reduce=all_reduce)
            pending += bucket.begin_reduction(terms)
        return pending

    def keep(self) -> None:
        """A microbatch without sync ends: its gradients stay, to be added to."""
        self.add_up()
        for parameter in self._parameters:
            parameter.writable_unreduced_gradient()  # who shares its memory may write to it before the next microbatch
        self.note_trainable()

    def add_up(self) -> None:
        """Several gradients of each parameter are to come before they are reduced."""
        for parameter in self._parameters:
            parameter.keep_gradient()

    def note_trainable(self) -> None:
        """Gradients that are not reduced now count also if their parameters are frozen before the next microbatch."""
        for bucket in self._buckets:
            bucket.note_trainable()

    @property
    def are_coming(self) -> bool:
        """Whether the backward pass that runs now accumulates any."""
        return any(accumulates(p.full) for p in self._parameters if p.has_full and p.requires_grad)

    @property
    def partial(self) -> bool:
        """Whether some are reduced, or being reduced, over the shard axis and not over the replicate axis."""
        return any(reducer.owing for bucket in self._buckets for reducer in bucket.reducers)

    def check_not_partial(self, unit: str) -> None:
        """Raise FullshardError if there are such: their place depends on how they have travelled."""
        if self.partial:
            raise FullshardError(
                f"unit {unit or '<root>'!r} holds gradients that are still to be reduced over the replicate axis; "
                "call synchronize_gradients() before changing how it communicates"
            )

    def pending(self) -> list[tuple[ShardedParameter, torch.Tensor | None, torch.Tensor | None]]:
        """The parameters with gradients that are still to be reduced: the full one, and rows, see PendingReduction."""
        partial = {id(p): rows for bucket in self._buckets for r in bucket.reducers for p, rows in r.partial_rows()}
        found = [(p, p.writable_unreduced_gradient(), partial.get(id(p))) for p in self._parameters]
        return [entry for entry in found if entry[1] is not None or entry[2] is not None]

    def drop_pending(self) -> None:
        """Forget those that are still to be reduced."""
        for parameter in self._parameters:
            parameter.drop_unreduced_gradient()
        for bucket in self._buckets:
            bucket.owed.clear()
            for reducer in bucket.reducers:
                reducer.drop_partial()

    def zero_pending(self) -> None:
        """Set those that are still to be reduced to zero."""
        for _, unreduced, rows in self.pending():
            for tensor in (unreduced, rows):
                if tensor is not None:
                    tensor.detach().zero_()

    def zero_sharded(self, *, set_to_none: bool) -> None:
        """As ``zero_grad``, whatever the modules hold at the moment."""
        for parameter in self._parameters:
            parameter.clear_gradient(set_to_none=set_to_none)
