"""A sharded matrix: the shards that all ranks hold of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.comm import part_of
from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.parameters.tensor_shards import ShardViews, View, views_of

__all__ = ["ShardGroup", "ShardedMatrix", "matrix_shape"]


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that a matrix is sharded over.

    Args:
        ranks: Global ranks, in the order of the group.
        device: Device on which they compute and communicate.
        group: The first process group found of these ranks, of any mesh.
    """

    ranks: tuple[int, ...]
    device: torch.device
    group: dist.ProcessGroup = field(compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class ShardedMatrix:
    """One matrix of an optimizer, and its shards on all ranks.

    Args:
        parameter: The parameter; of a sharded matrix, this rank's shard.
        group: Index of its parameter group.
        name: FQN, or a description.
        shape: Shape of the full matrix.
        stride: Strides of the full matrix when assembled.
        shard_group: Ranks that it is sharded over; None: not sharded.
        shards: Shards of these ranks, in their order.
    """

    parameter: torch.Tensor
    group: int
    name: str
    shape: tuple[int, int]
    stride: tuple[int, ...]
    shard_group: ShardGroup | None = None
    shards: tuple[View, ...] = ()

    @classmethod
    def of(cls, parameter: torch.Tensor, group: int, name: str) -> ShardedMatrix:
        """Return the matrix of which ``parameter`` is this rank's shard.

        Args:
            parameter: 2-D when unsharded: plain, DTensor, or an original parameter of the wrapper.
            group: Index of its parameter group.
            name: FQN, or a description.
        """
        rows, columns = matrix_shape(parameter)
        managed = managed_by(parameter)
        if managed is not None and managed.sharded is parameter:
            views = managed.views()
        elif isinstance(parameter, DTensor):
            views = views_of(parameter)
        else:
            return cls(parameter, group, name, (rows, columns), tuple(parameter.stride()))
        shard_group, shards = _shards_of(views) if views.axes else (None, ())
        return cls(parameter, group, name, (rows, columns), views.stride, shard_group, shards)

    @property
    def numel(self) -> int:
        """Elements of the full matrix."""
        return math.prod(self.shape)

    @property
    def is_on_one_rank(self) -> bool:
        """True if one rank holds the whole matrix; its update needs no communication."""
        return self.shard_group is None or any(shard.numel == self.numel for shard in self.shards)

    def empty_full(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a full matrix."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

    def in_memory_order(self, full: torch.Tensor) -> torch.Tensor:
        """Return ``full`` with ``stride``: itself, or a copy."""
        if full.stride() == self.stride:
            return full
        return self.empty_full(full.dtype, full.device).copy_(full)


def matrix_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the full ``parameter``, which is 1-D if it is an original parameter of the wrapper."""
    managed = managed_by(parameter)
    return tuple(managed.placement.shape if managed is not None and managed.sharded is parameter else parameter.shape)


def _shards_of(views: ShardViews) -> tuple[ShardGroup, tuple[View, ...]]:
    """Return the ranks that differ from this one only on the axes that shard a matrix, and what they hold of it."""
    mesh, here = views.mesh, views.mesh.get_coordinate()
    assert here is not None, "this rank is not on the parameter's mesh"
    every = itertools.product(
        *(range(mesh.size(axis)) if axis in views.axes else (here[axis],) for axis in range(mesh.ndim))
    )
    coordinates = {int(mesh.mesh[coordinate]): coordinate for coordinate in every}
    if len(views.axes) == 1:
        group = mesh.get_group(views.axes[0])
    else:
        world, wanted = dist.group.WORLD, sorted(coordinates)
        assert world is not None
        group = world if wanted == sorted(dist.get_process_group_ranks(world)) else part_of(world, wanted, "matrices")
    kind, ranks = mesh.device_type, tuple(dist.get_process_group_ranks(group))
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    return ShardGroup(ranks, device, group), tuple(views.at(coordinates[rank]) for rank in ranks)
