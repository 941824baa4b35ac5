"""The gradients of one unit: whether some wait to be reduced, and what autograd and the buckets hold of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.engine.buckets.base import Bucket
from fullshard.engine.hooks import accumulates
from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.reduction.grad_reduction import GradReduction
from fullshard.engine.settings import ReductionSettings
from fullshard.engine.states import GradientState
from fullshard.errors import FullshardError

__all__ = ["UnitGradients"]


class UnitGradients:
    """The gradients of the parameters of a unit."""

    state: GradientState
    parameters: Sequence[ShardedParameter]
    buckets: Sequence[Bucket]

    def __init__(self) -> None:
        self.state, self.parameters, self.buckets = GradientState.NONE, (), ()

    # ---------------------------------------------------------------- in a backward pass

    @property
    def are_coming(self) -> bool:
        """True if the backward pass that runs now accumulates any."""
        return any(accumulates(p.unsharded) for p in self.parameters if p.has_unsharded and p.requires_grad)

    def expect_more(self) -> None:
        """Leave the gradients that there are unreduced, for others to be added to them.

        The next reduction includes the parameters that are trainable now, also if they are frozen until then.
        """
        self.state = GradientState.UNREDUCED
        for bucket in self.buckets:
            bucket.note_trainable()

    def keep(self) -> None:
        """Keep the gradients of a microbatch without gradient sync, to be added to."""
        self.accumulate_in_reduce_dtype()
        for parameter in self.parameters:
            parameter.writable_unreduced_gradient()  # who shares its memory may write to it before the next microbatch
        self.expect_more()

    def accumulate_in_reduce_dtype(self) -> None:
        """Add gradients up in the reduce dtype: several of each parameter come before they are reduced."""
        for parameter in self.parameters:
            parameter.accumulate_in_reduce_dtype()

    def begin_reduction(self, settings: ReductionSettings, *, all_reduce: bool) -> list[GradReduction]:
        """Take the unsharded gradients off the parameters, and return the reductions to be issued."""
        self.state, pending = GradientState.REDUCED, []
        for bucket in self.buckets:
            terms = settings.terms(bucket.mesh, bucket.storage, all_reduce=all_reduce)
            pending += bucket.begin_reduction(terms)
        return pending

    def end_pass(self) -> None:
        """End a backward pass, or a reduction outside of one."""
        if self.state is GradientState.REDUCED:
            self.state = GradientState.NONE

    # ---------------------------------------------------------------- between backward passes

    @property
    def need_all_reduce(self) -> bool:
        """True if some are reduced, or being reduced, over the shard axis and not over the replicate axis."""
        return any(bucket.partial_reduce_output.needs_all_reduce for bucket in self.buckets)

    @property
    def unreduced(self) -> bool:
        """True if some wait for a later microbatch, or for the replicate axis."""
        return self.state is GradientState.UNREDUCED or self.need_all_reduce

    def check_all_reduced(self, unit: str) -> None:
        """Raise FullshardError if some need an all-reduce: where they lie depends on the transport."""
        if self.need_all_reduce:
            raise FullshardError(
                f"unit {unit} has gradients that have not been all-reduced over the replicate axis yet; "
                "call synchronize_gradients() before changing its communication settings"
            )

    def check_reduced(self, unit: str) -> None:
        """Raise FullshardError if some wait for a later microbatch: their dtype or shape would not fit then."""
        if self.unreduced:
            raise FullshardError(
                f"unit {unit} has unreduced gradients of microbatches without gradient sync; call "
                "synchronize_gradients() or zero_grad() before changing the dtype, device or owner of its parameters"
            )

    def pending(self) -> list[tuple[ShardedParameter, torch.Tensor | None, torch.Tensor | None]]:
        """List parameters with gradients to be reduced: the unsharded one, and the shard that needs an all-reduce."""
        shards: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            shards |= bucket.partial_reduce_output.by_parameter()
        found = [(p, p.writable_unreduced_gradient(), shards.get(id(p))) for p in self.parameters]
        return [entry for entry in found if entry[1] is not None or entry[2] is not None]

    def drop(self) -> None:
        """Forget gradients that are still to be reduced."""
        if self.state is GradientState.UNREDUCED:
            self.state = GradientState.NONE
        for parameter in self.parameters:
            parameter.drop_unreduced_gradient()
        for bucket in self.buckets:
            bucket.drop_unreduced_grads()
