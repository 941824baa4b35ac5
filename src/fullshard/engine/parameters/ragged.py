"""Ragged parameters: DTensors whose shards are what lies in this rank's slice of the unit, cut between rows or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.parameters.ragged_tensor import RaggedShard
from fullshard.engine.parameters.sharded import ShardedParameter, keep_gradient_dtype, mark
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.layout import FlatLayout, Granularity, granule_of, is_row_major, ragged_layout
from fullshard.memory import own_storage

__all__ = ["RaggedParameter"]


class RaggedParameter(SliceParameter):
    """A parameter that is a ``RaggedDTensor``: global shape, and a local tensor of rows, or of single elements."""

    granularity: Granularity = "element"
    first_rank: int = 0  # see ``ragged_layout``

    @staticmethod
    def lay_out(parameters: Sequence[RaggedParameter], world_size: int, alignment: int) -> FlatLayout:
        """Lay out whole parameters, cut where their granularities allow it."""
        return ragged_layout(
            tuple(parameter.shape for parameter in parameters),
            tuple(parameter.granularity for parameter in parameters),
            world_size=world_size,
            alignment=alignment,
            first_rank=parameters[0].first_rank % world_size,
        )

    def shard_on(self, buffer: torch.Tensor) -> torch.Tensor:
        """Make the shard on a buffer of this rank's slice: rows, or single elements."""
        assert self.shard is not None
        placement, rank = self.ragged_placement(), self.placement.mesh.rank
        shape, stride = placement.local_shape(rank), placement.local_stride(rank)
        if not self.shard.numel:  # memory of its own: a view at the end of the buffer has none, and cannot be saved
            return torch.empty_strided(shape, stride, dtype=buffer.dtype, device=buffer.device)
        return own_storage(buffer.as_strided(shape, stride, self.shard.offset))

    @property
    def by_rows(self) -> bool:
        """True if no slice ends inside of a row, so that local tensors consist of rows; on one rank they do."""
        if self.placement.mesh.world_size == 1:
            return True
        shape = self.shape.shape
        if not shape or not is_row_major(self.shape):
            return False
        row = granule_of(self.shape, "row")
        return granule_of(self.shape, self.granularity) % row == 0

    def ragged_placement(self) -> RaggedShard:
        """The placement on the shard axis; laid out parameters only."""
        assert self.slot is not None, f"{self.fqn} was not laid out"
        return RaggedShard(self.slot, by_rows=self.by_rows)

    def place(self, local: torch.Tensor) -> None:
        """Make ``sharded`` the ``RaggedDTensor`` whose local tensor is ``local``; before the layout, a plain tensor."""
        if self.slot is not None:
            self._place(local, self.placement.ragged_spec(local.dtype, self.ragged_placement()))
            return
        self.local, old = local, self.sharded
        self.sharded = nn.Parameter(local, requires_grad=old.requires_grad)
        keep_gradient_dtype(self.sharded, old)
        self.sharded.__dict__.update(self.attributes)
        mark(self.sharded, self)

    def copy_for(self, memo: dict[int, Any]) -> ShardedParameter:
        """Make the parameter of a deep copy whose modules and parameters are in ``memo``."""
        copied = super().copy_for(memo)
        assert isinstance(copied, RaggedParameter)
        copied.granularity, copied.first_rank = self.granularity, self.first_rank
        return copied
