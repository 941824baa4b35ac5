"""This rank's shards of tensors, and the mesh axes that the tensors are sharded over.

The axes follow from the parameter alone, never from its gradient: a gradient may be missing on some ranks, and which
collectives run must not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Replicate

from fullshard.engine.parameters.flat import FlatShardedParameter
from fullshard.engine.parameters.sharded import managed_by, value_of

__all__ = ["Axes", "Axis", "LocalShard", "ShardLocator", "local_of"]


class Axis(NamedTuple):
    """One axis of a mesh through this rank. Axes of different meshes with the same ranks are one.

    Args:
        ranks: Global ranks on the axis, sorted.
        group: The first process group found of these ranks.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


Axes = tuple[Axis, ...]


class LocalShard(NamedTuple):
    """This rank's shard of one tensor.

    Args:
        name: FQN of the parameter, or a description of it.
        axes: Axes that the tensor is sharded over. It is replicated over other axes.
        local: Local tensor, maybe empty; None if the tensor is missing on this rank.
    """

    name: str
    axes: Axes
    local: torch.Tensor | None


class _DTensorSharding(NamedTuple):
    """Sharding of DTensors with the same mesh and placements.

    Args:
        mesh: Their mesh.
        placements: Their placements, with Replicate for Partial; None: this rank is not on the mesh.
        axes: Axes that they are sharded over.
        partial: True if a placement is Partial.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...] | None
    axes: Axes
    partial: bool


class ShardLocator:
    """Finds the local shards of tensors, with one ``Axis`` for all meshes' axes over the same ranks."""

    _axes: dict[tuple[int, ...], Axis]
    # By the id of the mesh, which the value keeps alive.
    _known: dict[tuple[int, tuple[Placement, ...]], _DTensorSharding]

    def __init__(self) -> None:
        self._axes, self._known = {}, {}

    @property
    def axes(self) -> list[Axis]:
        """All axes of shards found so far, in the same order on all ranks: smaller ones first."""
        return sorted(self._axes.values(), key=lambda axis: len(axis.ranks))

    def axes_of(self, spec: DTensorSpec) -> Axes | None:
        """Return the axes that DTensors are sharded over whose parameter has their very spec; None if ``shards`` is
        needed to find what is here.

        With a plain local tensor, ``shards`` yields these axes and the local tensor, in many times as long.
        """
        sharding = self._sharding(spec)
        return None if sharding.partial or sharding.placements is None else sharding.axes

    def shards(self, parameter: torch.Tensor, tensor: torch.Tensor | None, number: int) -> Iterator[LocalShard]:
        """Yield the local shards of ``tensor``, which is sharded as ``parameter``: its gradient, a state of it, or
        itself.

        Args:
            parameter: A parameter of a sharded model, or any tensor.
            tensor: A tensor of its shape (of the local shape if plain); None: missing on this rank.
            number: Index for the names of parameters that no unit manages.

        Yields:
            One shard; for a ``FlatParameter`` one for each parameter in it.
        """
        managed = managed_by(parameter)
        if isinstance(managed, FlatShardedParameter):
            home = managed.handle
            if home is not None and home.flat is parameter:
                for flat in home.sharded_parameters:
                    yield LocalShard(flat.fqn, self._axes_of(flat), _slice(flat, tensor))
                return
            if managed.sharded is parameter:
                yield LocalShard(managed.fqn, self._axes_of(managed), None if tensor is None else local_of(tensor))
                return
        # Accessing the shape of a DTensor takes longer than all the rest.
        name = f"parameter {number} of shape {tuple(parameter.shape)}" if managed is None else managed.fqn
        if not isinstance(parameter, DTensor):
            yield LocalShard(name, (), None if tensor is None else local_of(tensor))
            return
        sharding = self._sharding(parameter._spec)
        if isinstance(tensor, DTensor) and (sharding.partial or tensor._spec is not parameter._spec):
            found = tensor._spec
            if sharding.placements is not None and (
                found.placements != sharding.placements or found.mesh != sharding.mesh
            ):
                tensor = tensor.redistribute(sharding.mesh, sharding.placements)
        yield LocalShard(
            name, sharding.axes, None if tensor is None or sharding.placements is None else local_of(tensor)
        )

    def _sharding(self, spec: DTensorSpec) -> _DTensorSharding:
        key = (id(spec.mesh), spec.placements)
        found = self._known.get(key)
        if found is None:
            here = spec.mesh.get_coordinate() is not None
            placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements) if here else None
            axes = self._sharded_axes(spec.mesh, placements or ())
            partial = any(p.is_partial() for p in spec.placements)
            found = self._known[key] = _DTensorSharding(spec.mesh, placements, axes, partial)
        return found

    def _axes_of(self, flat: FlatShardedParameter) -> Axes:
        mesh, own = flat.placement.mesh, flat.placement.own
        axes = () if own is None else self._sharded_axes(own.mesh, own.placements)
        if mesh.shard is None or mesh.world_size == 1:
            return axes
        return tuple(dict.fromkeys((*axes, self._axis(mesh.shard, 0))))

    def _sharded_axes(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> Axes:
        sharded = (axis for axis, placement in enumerate(placements) if not placement.is_replicate())
        return tuple(self._axis(mesh, axis) for axis in sharded if mesh.size(axis) > 1)

    def _axis(self, mesh: DeviceMesh, axis: int) -> Axis:
        group = mesh.get_group(axis)
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        return self._axes.setdefault(ranks, Axis(ranks, group))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor, after waiting for pending communication."""
    local = value_of(tensor)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _slice(flat: FlatShardedParameter, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or flat.shard is None:
        return None
    return local_of(tensor).reshape(-1).narrow(0, flat.shard.offset, flat.shard.numel)
