"""Parameters that are cut together with others: a shard is the part that lies in this rank's slice of their bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.layout import FlatLayout, FlatShard, FlatSlot
from fullshard.memory import own_storage

__all__ = ["SliceParameter"]


class SliceParameter(ShardedParameter):
    """A parameter of which a rank holds what lies in its slice of the unsharded buffer."""

    shard: FlatShard | None = None  # the part of the parameter in this rank's slice; None: not sharded yet
    slot: FlatSlot | None = None  # where the parameter lies in its original layout
    original_layout: FlatLayout | None = None  # kept for rebuilt buckets: other slices would need an all-gather
    cut_together: object | None = None  # the same for all of one original bucket; others may be laid out alike

    @staticmethod
    def lay_out(parameters: Sequence[Any], world_size: int, alignment: int) -> FlatLayout:
        """Lay out whole parameters of this class, each from a multiple of ``alignment`` elements on."""
        return FlatLayout.build(tuple(p.shape for p in parameters), world_size=world_size, alignment=alignment)

    def shard_on(self, buffer: torch.Tensor) -> torch.Tensor:
        """Make the shard on a buffer of this rank's slice: 1-D, or of the parameter's shape where nothing is cut."""
        assert self.shard is not None
        whole, numel = self.placement.mesh.world_size == 1, self.shard.numel
        shape, stride = (self.shape.shape, self.shape.stride) if whole else ((numel,), (1,))
        if not numel:  # on memory of its own, see FlatShardedParameter.is_in_place
            return buffer.new_empty(1).as_strided_(shape, stride)
        return own_storage(buffer.as_strided(shape, stride, int(buffer.storage_offset()) + self.shard.offset))

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
