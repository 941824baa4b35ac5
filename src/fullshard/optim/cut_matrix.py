"""Where the parts of a matrix lie: what every rank that shares it holds of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.pieces import box_at
from fullshard.engine.flat_parameter import FlatParameter, FlatPiece
from fullshard.engine.parameter import managed_by
from fullshard.layout import Box
from fullshard.transport import part_of

__all__ = ["CutMatrix", "Sharers", "cut_twice", "matrix_name", "matrix_shape"]


@dataclass(frozen=True)
class Sharers:
    """The ranks that a matrix is cut over.

    Args:
        ranks: Global ranks, in the order of the group.
        device: Where they compute and communicate.
        group: Of these ranks; the first that was met, whichever mesh it is of.
    """

    ranks: tuple[int, ...]
    device: torch.device
    group: dist.ProcessGroup = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Range:
    """Part of a matrix' memory: from element ``start``, ``numel`` elements."""

    start: int
    numel: int


@dataclass(frozen=True)
class CutMatrix:
    """One matrix and its parts.

    Args:
        name: FQN, or what else there is to say.
        shape: Of the whole.
        stride: Of the whole, where it is put together.
        sharers: That it is cut over; None: this rank has all of it.
        parts: Of each of them, in their order.
    """

    name: str
    shape: tuple[int, int]
    stride: tuple[int, ...]
    sharers: Sharers | None
    parts: tuple[Box | _Range, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str) -> CutMatrix:
        """The matrix that ``parameter`` is, or is this rank's part of.

        Args:
            parameter: 2-D as a whole: plain, DTensor, or one of the wrapper's with original parameters, unless it is
                :func:`cut_twice`.
            name: See :func:`matrix_name`.
        """
        rows, columns = matrix_shape(parameter)
        managed = managed_by(parameter)
        if isinstance(managed, FlatPiece) and managed.sharded is parameter:
            return cls._of_piece(managed, name)
        if not isinstance(parameter, DTensor):
            return cls(name, (rows, columns), tuple(parameter.stride()), None, ())
        mesh, placements = parameter.device_mesh, parameter.placements
        cuts = [axis for axis, p in enumerate(placements) if not p.is_replicate() and mesh.size(axis) > 1]
        stride = tuple(parameter.stride())
        if not cuts:
            return cls(name, (rows, columns), stride, None, ())
        coordinates = _sharing(mesh, cuts)
        sharers = _sharers(mesh, cuts, coordinates)
        boxes = (box_at(parameter, coordinates[rank]) for rank in sharers.ranks)
        return cls(name, (rows, columns), stride, sharers, tuple(boxes))

    @classmethod
    def _of_piece(cls, piece: FlatPiece, name: str) -> CutMatrix:
        mesh, slot = piece.placement.mesh, piece.slot
        rows, columns = piece.placement.shape
        stride = piece.shape.stride
        if mesh.shard is None or mesh.world_size == 1:
            return cls(name, (rows, columns), stride, None, ())
        assert slot is not None, f"{name} was not laid out"
        coordinates = _sharing(mesh.shard, [0])
        sharers = _sharers(mesh.shard, [0], coordinates)
        ranges = (slot.piece(coordinates[rank][0]) for rank in sharers.ranks)
        return cls(name, (rows, columns), stride, sharers, tuple(_Range(r.start, r.numel) for r in ranges))

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def part_numel(self, index: int) -> int:
        """Elements that rank ``index`` of the sharers holds."""
        return self.parts[index].numel

    def part_shape(self, index: int) -> tuple[int, ...]:
        """Of the part that rank ``index`` of the sharers holds, as it does."""
        part = self.parts[index]
        return part.sizes if isinstance(part, Box) else (part.numel,)

    def part(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """The part of rank ``index`` of the sharers in ``whole``, a view.

        Args:
            whole: Of :attr:`shape` and :attr:`stride`.
            index: Among the sharers.
        """
        part = self.parts[index]
        if isinstance(part, _Range):
            return whole.as_strided((part.numel,), (1,), int(whole.storage_offset()) + part.start)
        return whole[tuple(slice(start, end) for start, end in zip(part.offsets, part.ends, strict=True))]

    def new_whole(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the whole."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

    def in_memory_order(self, whole: torch.Tensor) -> torch.Tensor:
        """``whole`` with :attr:`stride`: itself, or a copy."""
        if whole.stride() == self.stride:
            return whole
        return self.new_whole(whole.dtype, whole.device).copy_(whole)


def matrix_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole of ``parameter``, which may be 1-D here because it is a piece of the wrapper's."""
    managed = managed_by(parameter)
    if isinstance(managed, FlatPiece) and managed.sharded is parameter and not isinstance(parameter, FlatParameter):
        return tuple(managed.placement.shape)
    return tuple(parameter.shape)


def cut_twice(parameter: torch.Tensor) -> bool:
    """Whether it is one of the wrapper's that tensor parallelism had cut before: a range of a part, no part."""
    managed = managed_by(parameter)
    own = managed.placement.own if isinstance(managed, FlatPiece) else None
    if own is None:
        return False
    return any(
        not placement.is_replicate() and own.mesh.size(axis) > 1 for axis, placement in enumerate(own.placements)
    )


def matrix_name(parameter: torch.Tensor, otherwise: str) -> str:
    """FQN of ``parameter`` if a unit manages it."""
    managed = managed_by(parameter)
    if isinstance(parameter, FlatParameter):
        return f"the FlatParameter of {', '.join(parameter.fqns) if hasattr(parameter, 'fqns') else otherwise}"
    return otherwise if managed is None else managed.fqn


def _sharing(mesh: DeviceMesh, cuts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Coordinates of the ranks that differ from this one on the axes ``cuts`` alone."""
    here = mesh.get_coordinate()
    assert here is not None, "this rank is not on the parameter's mesh"
    ranks = mesh.mesh
    every = itertools.product(*(range(mesh.size(axis)) if axis in cuts else (here[axis],) for axis in range(mesh.ndim)))
    return {int(ranks[coordinate]): coordinate for coordinate in every}


def _sharers(mesh: DeviceMesh, cuts: Sequence[int], ranks: Iterable[int]) -> Sharers:
    kind = mesh.device_type
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    if len(cuts) == 1:
        group = mesh.get_group(cuts[0])
    else:
        world, wanted = dist.group.WORLD, sorted(ranks)
        assert world is not None
        group = world if wanted == sorted(dist.get_process_group_ranks(world)) else part_of(world, wanted, "matrices")
    return Sharers(tuple(dist.get_process_group_ranks(group)), device, group)
