"""How a tensor is spread over ranks: what this rank holds of it, and which ranks hold the rest.

Answered from the parameter alone, never from its gradient: a gradient may be missing here and not elsewhere, and which
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

from fullshard.engine.flat_parameter import FlatPiece
from fullshard.engine.parameter import managed_by, value_of

__all__ = ["Axes", "Axis", "Part", "Spread", "local_of"]


class Axis(NamedTuple):
    """One axis of a mesh, seen from this rank. Meshes that have these ranks on an axis share it.

    Args:
        ranks: Global ranks on it, sorted.
        group: The first group of these ranks that was met.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


Axes = tuple[Axis, ...]


class Part(NamedTuple):
    """What this rank holds of one tensor.

    Args:
        name: FQN of the parameter, or what else there is to say.
        axes: Over which the tensor is cut. Ranks along other axes hold the same.
        local: This rank's part, maybe empty; None if this rank misses the tensor.
    """

    name: str
    axes: Axes
    local: torch.Tensor | None


class _Lies(NamedTuple):
    """How DTensors of one mesh and placements lie.

    Args:
        mesh: Their mesh.
        placements: Theirs, what is partial replicated; None: this rank is not on the mesh.
        axes: Over which they are cut.
        partial: Whether they are partial on an axis.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...] | None
    axes: Axes
    partial: bool


class Spread:
    """Finds the parts of tensors, and makes one :class:`Axis` of all meshes' axes over the same ranks."""

    _axes: dict[tuple[int, ...], Axis]
    _known: dict[tuple[int, tuple[Placement, ...]], _Lies]  # by the id of the mesh, which is kept in the value

    def __init__(self) -> None:
        self._axes, self._known = {}, {}

    @property
    def axes(self) -> list[Axis]:
        """All axes of parts found so far, the same order on all ranks: smaller ones first."""
        return sorted(self._axes.values(), key=lambda axis: len(axis.ranks))

    def parts(self, parameter: torch.Tensor, tensor: torch.Tensor | None, number: int) -> Iterator[Part]:
        """The parts of ``tensor``, which lies as ``parameter`` does: its gradient, a state of it, or itself.

        Args:
            parameter: A parameter of a sharded model, or any tensor.
            tensor: Of its shape (this rank's shape if plain); None: missing on this rank.
            number: To name parameters by that no unit manages.

        Yields:
            One part; of a ``FlatParameter`` one for each parameter in it.
        """
        managed = managed_by(parameter)
        if isinstance(managed, FlatPiece):
            home = managed.home
            if home is not None and home.flat is parameter:
                for piece in home.pieces:
                    yield Part(piece.fqn, self._cut_of(piece), _slice(piece, tensor))
                return
            if managed.sharded is parameter:
                yield Part(managed.fqn, self._cut_of(managed), None if tensor is None else local_of(tensor))
                return
        # The shape of a DTensor takes longer to find out than all the rest.
        name = f"number {number}, of shape {tuple(parameter.shape)}" if managed is None else managed.fqn
        if not isinstance(parameter, DTensor):
            yield Part(name, (), None if tensor is None else local_of(tensor))
            return
        lies = self._lies(parameter._spec)
        if isinstance(tensor, DTensor) and (lies.partial or tensor._spec is not parameter._spec):
            found = tensor._spec
            if lies.placements is not None and (found.placements != lies.placements or found.mesh != lies.mesh):
                tensor = tensor.redistribute(lies.mesh, lies.placements)
        yield Part(name, lies.axes, None if tensor is None or lies.placements is None else local_of(tensor))

    def _lies(self, spec: DTensorSpec) -> _Lies:
        key = (id(spec.mesh), spec.placements)
        found = self._known.get(key)
        if found is None:
            here = spec.mesh.get_coordinate() is not None
            placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements) if here else None
            axes = self._cut(spec.mesh, placements or ())
            partial = any(p.is_partial() for p in spec.placements)
            found = self._known[key] = _Lies(spec.mesh, placements, axes, partial)
        return found

    def _cut_of(self, piece: FlatPiece) -> Axes:
        mesh, own = piece.placement.mesh, piece.placement.own
        axes = () if own is None else self._cut(own.mesh, own.placements)
        if mesh.shard is None or mesh.world_size == 1:
            return axes
        return tuple(dict.fromkeys((*axes, self._axis(mesh.shard, 0))))

    def _cut(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> Axes:
        cut = (axis for axis, placement in enumerate(placements) if not placement.is_replicate())
        return tuple(self._axis(mesh, axis) for axis in cut if mesh.size(axis) > 1)

    def _axis(self, mesh: DeviceMesh, axis: int) -> Axis:
        group = mesh.get_group(axis)
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        return self._axes.setdefault(ranks, Axis(ranks, group))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, once what is still on its way has come."""
    local = value_of(tensor)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _slice(piece: FlatPiece, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or piece.piece is None:
        return None
    return local_of(tensor).reshape(-1).narrow(0, piece.piece.offset, piece.piece.numel)
