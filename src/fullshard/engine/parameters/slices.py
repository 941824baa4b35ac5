"""Parameters that are cut together with others: a shard is the part that lies in this rank's slice of their bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fullshard.engine.parameters.sharded import ShardedParameter
from fullshard.engine.parameters.tensor_shards import View
from fullshard.layout import FlatLayout, FlatShard, FlatSlot
from fullshard.memory import own_storage

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SliceParameter"]


class SliceParameter(ShardedParameter):
    """A parameter of which a rank holds what lies in its slice of the unsharded buffer."""

    shard: FlatShard | None = None  # the part of the parameter in this rank's slice; None: not sharded yet
    slot: FlatSlot | None = None  # in its first layout, kept by rebuilt buckets: other slices would need an all-gather
    cut_together: object | None = None  # the same for all of one original bucket; others may be laid out alike

    @staticmethod
    def lay_out(parameters: Sequence[Any], world_size: int, alignment: int) -> FlatLayout:
        """Lay out whole parameters of this class, each from a multiple of ``alignment`` elements on."""
        return FlatLayout.build(tuple(p.shape for p in parameters), world_size=world_size, alignment=alignment)

    def shard_view(self, rank: int) -> View:
        """Return the shard of a rank as a view of the whole parameter: 1-D, or all of it where nothing is cut."""
        if self.slot is None or self.placement.mesh.world_size == 1:
            return View(0, self.shape.shape, self.shape.stride)
        shard = self.slot.shard(rank)
        return View(shard.start, (shard.numel,), (1,))

    def shard_on(self, buffer: torch.Tensor) -> torch.Tensor:
        """Make the shard on a buffer of this rank's slice."""
        view = self.shard_view(self.placement.mesh.rank)
        assert self.shard is not None
        if not view.numel:  # at the buffer's end there is no memory, see also FlatShardedParameter.is_in_place
            return buffer.new_empty(1).as_strided_(view.shape, view.stride)
        start = int(buffer.storage_offset()) + self.shard.offset
        return own_storage(buffer.as_strided(view.shape, view.stride, start))

    def forget_layout(self, value: torch.Tensor) -> None:
        """Hold ``value``, the whole parameter, until it is laid out anew."""
        self.shard = self.slot = self.cut_together = None
        self.place(value)

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``value``, unsharded or that shard already, in the shape of ``local``."""
        view, whole = self.shard_view(self.placement.mesh.rank), self.shape.shape
        if view.shape == whole or tuple(value.shape) != whole:
            return value.view(view.shape)
        return view.cut(value, self.shape.stride)

    def copy_for(self, memo: dict[int, Any]) -> Self:
        """Make the parameter of a deep copy whose modules and parameters are in ``memo``."""
        copied = super().copy_for(memo)
        copied.shard, copied.slot, copied.cut_together = self.shard, self.slot, self.cut_together
        return copied
