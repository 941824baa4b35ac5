"""Ragged parameters: DTensors whose shards are what lies in this rank's slice of the unit, cut between rows or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.engine.buckets.base import has_all_gather_hooks
from fullshard.engine.buckets.formats import ShardingFormat
from fullshard.engine.parameters.placement import ParameterPlacement
from fullshard.engine.parameters.sharded import Owner, ShardedParameter, keep_gradient_dtype, mark, value_of
from fullshard.engine.parameters.slices import SliceParameter
from fullshard.engine.parameters.tensor_shards import View
from fullshard.layout import FlatLayout, is_row_major
from fullshard.ragged.layout import Granularity, granule_of, ragged_layout
from fullshard.ragged.placement import RaggedShard, ragged_spec

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RaggedParameter", "RaggedShardingFormat"]


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

    def shard_view(self, rank: int) -> View:
        """Return the shard of ``rank`` as a view of the whole parameter: rows, or single elements."""
        return super().shard_view(rank) if self.slot is None else self.ragged_placement().view(rank)

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
        """Return the placement on the shard axis of a parameter that was laid out."""
        assert self.slot is not None, f"{self.fqn} was not laid out"
        return RaggedShard(self.slot, by_rows=self.by_rows)

    def place(self, local: torch.Tensor) -> None:
        """Make ``sharded`` the ``RaggedDTensor`` whose local tensor is ``local``; before the layout, a plain tensor."""
        if self.slot is not None:
            mesh, shard = self.placement.mesh, self.ragged_placement()
            key = local.dtype, shard
            if key not in self.placement.specs:
                placements = mesh.placements(shard)
                self.placement.specs[key] = ragged_spec(mesh.device_mesh, placements, local.dtype)
            self._place(local, self.placement.specs[key])
            return
        self.local, old = local, self.sharded
        self.sharded = nn.Parameter(local, requires_grad=old.requires_grad)
        keep_gradient_dtype(self.sharded, old)
        self.sharded.__dict__.update(self.attributes)
        mark(self.sharded, self)

    def copy_for(self, memo: dict[int, Any]) -> Self:
        """Make the parameter of a deep copy whose modules and parameters are in ``memo``."""
        copied = super().copy_for(memo)
        copied.granularity, copied.first_rank = self.granularity, self.first_rank
        return copied


class RaggedShardingFormat(ShardingFormat):
    """Ragged sharding: one slice of all parameters of a bucket per rank, see ``fullshard.ragged.layout``.

    Parameters that are not cut there are sharded one by one beside it: DTensors of tensor parallelism, those for which
    the user has chosen another dim, and tensor subclasses with their own all-gather hooks.

    Args:
        granularity: Where parameters may be cut: see ``granule_of``; or a function that says it for each FQN and
            parameter.
        first_rank: Where whole parameters begin: see ``ragged_layout``.
    """

    _granularity: Granularity | Callable[[str, nn.Parameter], Granularity]
    _first_rank: int

    def __init__(
        self,
        granularity: Granularity | Callable[[str, nn.Parameter], Granularity] = "element",
        first_rank: int = 0,
    ) -> None:
        self._granularity, self._first_rank = granularity, first_rank

    def parameter(
        self, parameter: nn.Parameter, owner: Owner, fqn: str, placement: ParameterPlacement
    ) -> ShardedParameter:
        """Make the sharded parameter for one that no unit manages yet.

        Raises:
            ValueError: If its granularity is invalid.
        """
        is_cut = placement.own is None and not placement.shard_dim and placement.mesh.shard is not None
        if not is_cut or has_all_gather_hooks(value_of(parameter), fqn):
            return super().parameter(parameter, owner, fqn, placement)
        made = RaggedParameter.of(parameter, owner, fqn, placement)
        chosen = self._granularity
        made.granularity = chosen(fqn, parameter) if callable(chosen) else chosen
        made.first_rank = self._first_rank
        granule_of(made.shape, made.granularity)  # raises errors now, before anything is sharded
        return made

    def accepts(self, parameter: ShardedParameter) -> bool:
        """Return True if a parameter that another unit has kept is of a class of this format."""
        return type(parameter) is RaggedParameter or super().accepts(parameter)
