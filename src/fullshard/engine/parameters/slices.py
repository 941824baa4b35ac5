"""Parameters that are cut together with others: a shard is the part that lies in this rank's slice of their bucket."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.layout import FlatLayout, FlatShard, FlatSlot

__all__ = ["SliceParameter"]


class SliceParameter(ShardedParameter):
    """A parameter of which a rank holds what lies in its slice of the unsharded buffer."""

    shard: FlatShard | None = None  # the part of the parameter in this rank's slice; None: not sharded yet
    slot: FlatSlot | None = None  # where the parameter lies in its original layout
    original_layout: FlatLayout | None = None  # kept for rebuilt buckets: other slices would need an all-gather
    cut_together: object | None = (
        None  # the same for the parameters of one original bucket; others may be laid out alike
    )

    def forget_layout(self, value: torch.Tensor) -> None:
        """Hold ``value``, the whole parameter, until it is laid out anew."""
        self.shard = self.slot = self.original_layout = self.cut_together = None
        self.place(value)

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``value``, unsharded or that shard already, in the shape of ``local``."""
        shape, local = self.shape, self.local
        if tuple(value.shape) != shape.shape or (local.dim() != 1 and tuple(local.shape) == shape.shape):
            return value.view(local.shape)
        if tuple(value.stride()) != shape.stride:
            value = torch.empty_strided(shape.shape, shape.stride, dtype=value.dtype, device=value.device).copy_(value)
        assert self.shard is not None
        start = int(value.storage_offset()) + self.shard.start
        return value.as_strided(local.shape, local.stride(), start)

    def copy_for(self, memo: dict[int, Any]) -> ShardedParameter:
        """Make the parameter of a deep copy whose modules and parameters are in ``memo``."""
        copied = super().copy_for(memo)
        assert isinstance(copied, SliceParameter)
        copied.shard, copied.slot = self.shard, self.slot
        copied.original_layout, copied.cut_together = self.original_layout, self.cut_together
        return copied
