"""The ranks that parameters are sharded and replicated over, seen from this rank."""

from __future__ import annotations

import copy
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from fullshard.comm import SingleRankTransport, Transport, make_transport, part_of
from fullshard.policy import DataParallelMeshDims

__all__ = ["ShardMesh", "WholeMesh", "axis_of", "shard_mesh"]


class WholeMesh(NamedTuple):
    """A mesh of all axes, data-parallel and others, on which parameters are DTensors already."""

    device_mesh: DeviceMesh
    dims: DataParallelMeshDims


class ShardMesh:
    """The data-parallel axes: one to shard over, one of replicas, either of which may be missing (size 1).

    Pure sharding, HSDP, pure replication and a single rank differ in the two sizes only: an axis that is missing has
    the transport of a single rank. Shared by the units of one mesh, so that they share transports.

    Args:
        device_mesh: The data-parallel mesh: DTensors of plain parameters lie on it. Axes in the order replicate,
            shard, as far as they exist.
        shard: The 1-D part to shard over; None: nothing is sharded.
        replicate: The 1-D part that holds replicas; None: there are none.
        whole: Where parameters are DTensors on a mesh that includes the data-parallel axes.
    """

    device_mesh: DeviceMesh
    shard: DeviceMesh | None
    replicate: DeviceMesh | None
    whole: WholeMesh | None
    root: DeviceMesh  # that the user's mesh is a part of
    device: torch.device  # where this rank computes
    rank: int  # on the shard axis
    world_size: int  # of the shard axis
    replicas: int  # size of the replicate axis
    transport: Transport  # of the shard axis
    replica_transport: Transport  # of the replicate axis
    exact_transport: Transport  # of the shard axis, for values that leave the model: ``transport`` may quantize
    _subgroups: dict[int, Transport]  # by size
    _joined: dict[DeviceMesh, DeviceMesh]
    _plain: ShardMesh | None  # for parameters that are no DTensors

    def __init__(
        self,
        device_mesh: DeviceMesh,
        shard: DeviceMesh | None,
        replicate: DeviceMesh | None = None,
        whole: WholeMesh | None = None,
    ) -> None:
        self.device_mesh, self.shard, self.replicate, self.whole = device_mesh, shard, replicate, whole
        self.root, self.device = device_mesh, _compute_device(device_mesh.device_type)
        self.rank, self.world_size = (0, 1) if shard is None else (shard.get_local_rank(), shard.size())
        self.replicas = 1 if replicate is None else replicate.size()
        self.transport = self.replica_transport = SingleRankTransport()
        if shard is not None:
            self.transport = make_transport(shard.get_group(), self.device)
        if replicate is not None:
            self.replica_transport = make_transport(replicate.get_group(), self.device)
        self.exact_transport = self.transport
        self._subgroups, self._joined, self._plain = {}, {}, None

    def placements(self, placement: Placement) -> tuple[Placement, ...]:
        """Return the placements on ``device_mesh`` of a parameter whose shard axis has ``placement``."""
        replicated = (Replicate(),) if self.replicate is not None else ()
        return replicated if self.shard is None else (*replicated, placement)

    def joined(self, other: DeviceMesh) -> DeviceMesh:
        """Return the mesh of the data-parallel axes and those of ``other``: the same object every time.

        Raises:
            ValueError: If they are not parts of one mesh.
        """
        if other not in self._joined:
            try:
                self._joined[other] = DeviceMesh._concatenate([self.device_mesh, other])
            except (RuntimeError, AttributeError, ValueError, TypeError, AssertionError) as error:
                raise ValueError(
                    f"expected the mesh of the DTensor, {other}, and the data-parallel mesh, {self.device_mesh}, to be "
                    "submeshes of one mesh with different named axes; create that with "
                    "init_device_mesh(..., mesh_dim_names=...) and slice it by name"
                ) from error
        return self._joined[other]

    def with_transports(self, shard: Transport, replicas: Transport, *, exact: Transport | None = None) -> ShardMesh:
        """Return the same ranks with other transports.

        Args:
            shard: Of the shard axis.
            replicas: Of the replicate axis.
            exact: Of the shard axis, for values that leave the model; None: ``shard``.
        """
        changed = copy.copy(self)
        changed.transport, changed.replica_transport, changed._plain = shard, replicas, None
        changed.exact_transport = shard if exact is None else exact
        return changed

    def for_plain(self) -> ShardMesh:
        """Return the same ranks, for parameters that are no DTensors: the same object every time."""
        if self._plain is None:
            self._plain = copy.copy(self)
            self._plain.whole = None
        return self._plain

    def subgroup(self, size: int) -> Transport:
        """Return the transport of the ``size`` consecutive ranks of the shard axis that this rank belongs to.

        Backward all-gathers from them with ``reshard_after_forward=<int>``. All ranks must call it.
        """
        if size not in self._subgroups:
            assert self.shard is not None
            ranks = dist.get_process_group_ranks(self.shard.get_group())
            first = self.rank // size * size
            group = part_of(self.shard.get_group(), ranks[first : first + size], "subgroup")
            self._subgroups[size] = make_transport(group, self.device)
        return self._subgroups[size]


# Not on the device meshes, which DTensors take along wherever they are copied or saved. A value keeps the mesh whose
# id is in its key alive.
_shard_meshes: weakref.WeakValueDictionary[object, ShardMesh] = weakref.WeakValueDictionary()


def shard_mesh(
    mesh: DeviceMesh,
    shard: DeviceMesh | None = None,
    replicate: DeviceMesh | None = None,
    dims: DataParallelMeshDims | None = None,
) -> ShardMesh:
    """Return the ranks of some axes of ``mesh``; the same object for the same axes of the same mesh.

    Args:
        mesh: The mesh that the user passed.
        shard: The axis to shard over, a part of it.
        replicate: The axis of replicas, a part of it.
        dims: Instead of the last two, where parameters are DTensors on all of ``mesh``.
    """
    whole = None if dims is None else WholeMesh(mesh, dims)
    if dims is not None:
        shard, replicate = _flat(mesh, dims.shard_names), _flat(mesh, dims.replicate_names)
    # By the root: slicing it, as in fully_shard(block, mesh=mesh["dp"]), makes a new object every time.
    key = (id(mesh._get_root_mesh()), _group(shard), _group(replicate), dims)
    ranks = _shard_meshes.get(key)
    if ranks is None:
        parts = [part for part in (replicate, shard) if part is not None]
        ordered = len(parts) == mesh.ndim and dims is None and (replicate is None or _group(mesh) == _group(replicate))
        device_mesh = mesh if ordered else parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
        ranks = _shard_meshes[key] = ShardMesh(device_mesh, shard, replicate, whole)
        ranks.root = mesh._get_root_mesh()
    return ranks


def _group(mesh: DeviceMesh | None) -> str | None:
    """Return the name of this rank's process group on the first axis of ``mesh``."""
    return None if mesh is None else str(mesh.get_group(0).group_name)


def axis_of(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """Return one axis of ``mesh`` as a separate mesh; the axes need not have names."""
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _compute_device(device_type: str) -> torch.device:
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
