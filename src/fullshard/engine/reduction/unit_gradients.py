"""The gradients of one unit: those to be reduced, and sharded ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.engine.buckets.base import Bucket
from fullshard.engine.hooks import accumulates
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.grad_reduction import GradReduction
from fullshard.engine.settings import ReductionSettings
from fullshard.errors import FullshardError

__all__ = ["UnitGradients"]


class UnitGradients:
    """Takes, looks at and clears the gradients that autograd and the buckets of a unit hold."""

    _parameters: Sequence[ShardedParameter]
    _buckets: Sequence[Bucket]

    def __init__(self, parameters: Sequence[ShardedParameter], buckets: Sequence[Bucket]) -> None:
        self._parameters, self._buckets = parameters, buckets

    def begin_reduction(self, settings: ReductionSettings, *, all_reduce: bool) -> list[GradReduction]:
        """Take the unsharded gradients, and return the reductions to be issued."""
        pending = []
        for bucket in self._buckets:
            terms = settings.terms(bucket.mesh, bucket.storage, all_reduce=all_reduce)
            pending += bucket.begin_reduction(terms)
        return pending

    def keep(self) -> None:
        """Keep the gradients of a microbatch without sync, to be added to."""
        self.accumulate_in_reduce_dtype()
        for parameter in self._parameters:
            parameter.writable_unreduced_gradient()  # who shares its memory may write to it before the next microbatch
        self.note_trainable()

    def accumulate_in_reduce_dtype(self) -> None:
        """Add gradients up in the reduce dtype: several of each parameter come before they are reduced."""
        for parameter in self._parameters:
            parameter.accumulate_in_reduce_dtype()

    def note_trainable(self) -> None:
        """Have the next reduction include parameters that are trainable now, also if they are frozen until then."""
        for bucket in self._buckets:
            bucket.note_trainable()

    @property
    def are_coming(self) -> bool:
        """True if the backward pass that runs now accumulates any."""
        return any(accumulates(p.unsharded) for p in self._parameters if p.has_unsharded and p.requires_grad)

    @property
    def needs_all_reduce(self) -> bool:
        """True if some are reduced, or being reduced, over the shard axis and not over the replicate axis."""
        return any(bucket.partial_reduce_output.needs_all_reduce for bucket in self._buckets)

    def check_all_reduced(self, unit: str) -> None:
        """Raise FullshardError if some need an all-reduce: where they lie depends on the transport."""
        if self.needs_all_reduce:
            raise FullshardError(
                f"unit {unit or '<root>'!r} has gradients that have not been all-reduced over the replicate axis yet; "
                "call synchronize_gradients() before changing its communication settings"
            )

    def pending(self) -> list[tuple[ShardedParameter, torch.Tensor | None, torch.Tensor | None]]:
        """The parameters with gradients to be reduced: the unsharded one, and the shard that needs an all-reduce."""
        shards: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            shards |= bucket.partial_reduce_output.by_parameter()
        found = [(p, p.writable_unreduced_gradient(), shards.get(id(p))) for p in self._parameters]
        return [entry for entry in found if entry[1] is not None or entry[2] is not None]

    def drop_pending(self) -> None:
        """Forget gradients that are still to be reduced."""
        for parameter in self._parameters:
            parameter.drop_unreduced_gradient()
        for bucket in self._buckets:
            bucket.drop_unreduced_grads()

    def zero_pending(self) -> None:
        """Set gradients that are still to be reduced to zero."""
        for _, unreduced, shard in self.pending():
            for tensor in (unreduced, shard):
                if tensor is not None:
                    tensor.detach().zero_()

    def zero_sharded(self, *, set_to_none: bool) -> None:
        """Clear sharded gradients as ``zero_grad`` does, whatever the modules hold at the moment."""
        for parameter in self._parameters:
            parameter.clear_gradient(set_to_none=set_to_none)
