"""A sharded matrix: the shards that all ranks hold of it."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm import part_of
from fullshard.engine.parameters.flat import FlatParameter, FlatShardedParameter
from fullshard.engine.parameters.placement import region_at
from fullshard.engine.parameters.ragged_tensor import RaggedDTensor, ragged_placement
from fullshard.engine.parameters.sharded import managed_by

__all__ = ["MatrixShard", "ShardGroup", "ShardedMatrix", "is_sharded_twice", "matrix_name", "matrix_shape"]


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


class MatrixShard(NamedTuple):
    """The shard of one rank, as a view of the full matrix: a block, or a range of the wrapper's flat buffer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the shard in a full matrix with the parameter's strides, a view."""
        return full.as_strided(self.shape, self.stride, int(full.storage_offset()) + self.offset)


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
    shard_group: ShardGroup | None
    shards: tuple[MatrixShard, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor, group: int, name: str) -> ShardedMatrix:
        """Return the matrix of which ``parameter`` is this rank's shard.

        Args:
            parameter: 2-D when unsharded: plain, DTensor, or an original parameter of the wrapper, unless
                ``is_sharded_twice``.
            group: Index of its parameter group.
            name: Result of ``matrix_name``.
        """
        rows, columns = matrix_shape(parameter)
        managed = managed_by(parameter)
        stride: tuple[int, ...] = tuple(parameter.stride())
        shard_group, shards = _NOT_SHARDED
        if isinstance(managed, FlatShardedParameter) and managed.sharded is parameter:
            stride = managed.shape.stride
            shard_group, shards = _shards_of_flat(managed)
        elif isinstance(parameter, DTensor):
            shard_group, shards = _shards_of_dtensor(parameter)
        return cls(parameter, group, name, (rows, columns), stride, shard_group, shards)

    @property
    def numel(self) -> int:
        """Elements of the full matrix."""
        return math.prod(self.shape)

    @property
    def is_on_one_rank(self) -> bool:
        """True if one rank holds all of it, so that nothing has to be sent: whether there is a gradient, it knows."""
        return self.shard_group is None or any(shard.numel == self.numel for shard in self.shards)

    def empty_full(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a full matrix."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

    def in_memory_order(self, full: torch.Tensor) -> torch.Tensor:
        """Return ``full`` with ``stride``: itself, or a copy."""
        if full.stride() == self.stride:
            return full
        return self.empty_full(full.dtype, full.device).copy_(full)


_Sharding = tuple[ShardGroup | None, tuple[MatrixShard, ...]]
_NOT_SHARDED: _Sharding = (None, ())


def _shards_of_dtensor(parameter: DTensor) -> _Sharding:
    mesh, placements, stride = parameter.device_mesh, parameter.placements, tuple(parameter.stride())
    sharded_axes = [axis for axis, p in enumerate(placements) if not p.is_replicate() and mesh.size(axis) > 1]
    if not sharded_axes:
        return _NOT_SHARDED
    coordinates = _sharing_ranks(mesh, sharded_axes)
    shard_group = _shard_group(mesh, sharded_axes, coordinates)
    if isinstance(parameter, RaggedDTensor):
        return shard_group, tuple(_shard_of_ragged(parameter, coordinates[rank]) for rank in shard_group.ranks)
    regions = [region_at(parameter, coordinates[rank]) for rank in shard_group.ranks]
    return shard_group, tuple(
        MatrixShard(region.sizes, stride, sum(map(operator.mul, region.offsets, stride))) for region in regions
    )


def _shard_of_ragged(parameter: RaggedDTensor, coordinate: Sequence[int]) -> MatrixShard:
    axis, placement = ragged_placement(parameter._spec)
    rank = coordinate[axis]
    return MatrixShard(placement.local_shape(rank), placement.local_stride(rank), placement.shard(rank).start)


def _shards_of_flat(flat: FlatShardedParameter) -> _Sharding:
    mesh, slot = flat.placement.mesh, flat.slot
    if mesh.shard is None or mesh.world_size == 1:
        return _NOT_SHARDED
    assert slot is not None, f"{flat.fqn} was not laid out"
    coordinates = _sharing_ranks(mesh.shard, [0])
    shard_group = _shard_group(mesh.shard, [0], coordinates)
    ranges = [slot.shard(coordinates[rank][0]) for rank in shard_group.ranks]
    return shard_group, tuple(MatrixShard((r.numel,), (1,), r.start) for r in ranges)


def matrix_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the full ``parameter``, which is 1-D if it is an original parameter of the wrapper."""
    managed = managed_by(parameter)
    is_original = isinstance(managed, FlatShardedParameter) and managed.sharded is parameter
    if managed is not None and is_original and not isinstance(parameter, FlatParameter):
        return tuple(managed.placement.shape)
    return tuple(parameter.shape)


def is_sharded_twice(parameter: torch.Tensor) -> bool:
    """Return True for an original parameter of the wrapper that tensor parallelism had sharded before: a range of a
    shard.
    """
    managed = managed_by(parameter)
    own = managed.placement.own if isinstance(managed, FlatShardedParameter) else None
    if own is None:
        return False
    return any(
        not placement.is_replicate() and own.mesh.size(axis) > 1 for axis, placement in enumerate(own.placements)
    )


def matrix_name(parameter: torch.Tensor, default: str) -> str:
    """Return the FQN of ``parameter`` if a unit manages it, else ``default``."""
    managed = managed_by(parameter)
    if isinstance(parameter, FlatParameter):
        return f"the FlatParameter of {', '.join(parameter.fqns) if hasattr(parameter, 'fqns') else default}"
    return default if managed is None else managed.fqn


def _sharing_ranks(mesh: DeviceMesh, sharded_axes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the coordinates of the ranks that differ from this one only on ``sharded_axes``."""
    here = mesh.get_coordinate()
    assert here is not None, "this rank is not on the parameter's mesh"
    ranks = mesh.mesh
    every = itertools.product(
        *(range(mesh.size(axis)) if axis in sharded_axes else (here[axis],) for axis in range(mesh.ndim))
    )
    return {int(ranks[coordinate]): coordinate for coordinate in every}


def _shard_group(mesh: DeviceMesh, sharded_axes: Sequence[int], ranks: Iterable[int]) -> ShardGroup:
    kind = mesh.device_type
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    if len(sharded_axes) == 1:
        group = mesh.get_group(sharded_axes[0])
    else:
        world, wanted = dist.group.WORLD, sorted(ranks)
        assert world is not None
        group = world if wanted == sorted(dist.get_process_group_ranks(world)) else part_of(world, wanted, "matrices")
    return ShardGroup(tuple(dist.get_process_group_ranks(group)), device, group)
