"""Whole tensors of an optimizer's state, from the pieces that ranks hold: one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.parameters import LocalParameter
from fullshard.engine.flat_parameter import FlatPiece
from fullshard.engine.placement import dtensor
from fullshard.layout import FlatSlot

__all__ = ["full_state", "groups_of", "rows_of_state"]


def groups_of(part: LocalParameter) -> Iterator[dist.ProcessGroup]:
    """The ranks that hold the same parameter, or parts of it, and that gather its state together."""
    if part.sharded is not None:
        mesh = part.sharded.placement.mesh
        yield from (axis.get_group() for axis in (mesh.shard, mesh.replicate) if axis is not None and axis.size() > 1)
        if part.sharded.placement.own is not None:
            yield from _groups_of_mesh(part.sharded.placement.own.mesh)
    elif isinstance(part.parameter, DTensor):
        yield from _groups_of_mesh(part.parameter.device_mesh)


def _groups_of_mesh(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    return (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def full_state(part: LocalParameter, value: torch.Tensor, cut: bool, only_on: int | None = None) -> torch.Tensor | None:
    """A state as a whole tensor. All ranks of :func:`groups_of` call it.

    Args:
        part: Whose it is.
        value: The state of ``part.parameter``.
        cut: Whether it is cut as that is.
        only_on: The global number of the rank that wants it. None: all.

    Returns:
        With memory of its own, on the device where the unit computes; None where it was not wanted, mostly.
    """
    value = value.detach()
    if not cut or (part.sharded is None and not isinstance(part.parameter, DTensor)):
        return _own(value.full_tensor() if isinstance(value, DTensor) else value)
    if isinstance(part.sharded, FlatPiece):
        if part.sharded.placement.own is None:
            return _gather(part.sharded, part.local_of(value), only_on)
        whole = _gather(part.sharded, part.local_of(value), None)  # its other axes have ranks that wait for each other
        assert whole is not None
        return _full_tensor(part.sharded.placement.full(whole))
    return _own(_full_tensor(_like_parameter(part.parameter, value)))


def rows_of_state(part: LocalParameter, value: torch.Tensor, cut: bool) -> torch.Tensor:
    """A state as a DTensor that is cut over rows. All ranks of :func:`groups_of` call it.

    Args:
        part: Whose it is.
        value: The state of ``part.parameter``.
        cut: Whether it is cut as that is.

    Returns:
        Of ``fully_shard`` and of DTensors: the state itself. What is not cut, and what no unit manages or cuts, is
        plain.
    """
    value = value.detach()
    if not cut or isinstance(value, DTensor):
        return value
    if not isinstance(part.sharded, FlatPiece):
        return _like_parameter(part.parameter, value)
    whole = _gather(part.sharded, part.local_of(value), None)
    assert whole is not None
    placement = part.sharded.placement
    mesh, rows = placement.mesh, whole
    if mesh.shard is None:
        return placement.full(whole)  # nothing is cut, so the model's own state dict has it whole, too
    if placement.cut is not None:
        chunks = torch.chunk(whole, mesh.world_size, placement.cut)
        rows = chunks[mesh.rank] if mesh.rank < len(chunks) else whole.narrow(placement.cut, 0, 0)
        rows = rows.clone()
    return dtensor(rows, placement.sharded_spec(rows.dtype))


def _like_parameter(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """As a DTensor, if the parameter is one and ``value`` is this rank's part."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    near = _near(value._local_tensor, value.device_mesh.device_type)
    if near is not value._local_tensor:  # offloaded; its group communicates on the accelerator
        value = DTensor.from_local(
            near, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return value.full_tensor()


def _own(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


def _near(value: torch.Tensor, device_type: str) -> torch.Tensor:
    return value if value.device.type == device_type else value.to(device_type)


def _gather(piece: FlatPiece, local: torch.Tensor, only_on: int | None) -> torch.Tensor | None:
    """The whole tensor of a flat piece's state, with the strides of the parameter."""
    mesh, shape = piece.placement.mesh, piece.shape
    local = _near(local, mesh.device.type)
    make = partial(torch.empty_strided, shape.shape, shape.stride, dtype=local.dtype, device=local.device)
    if mesh.shard is None or mesh.world_size == 1:
        whole = make()
        return whole.copy_(local.view_as(whole))
    assert piece.slot is not None
    group = mesh.shard.get_group()
    if only_on is None:
        whole = make()
        elements = whole.as_strided((shape.numel,), (1,))
        _broadcast_all([elements[_held(piece.slot, rank)] for rank in range(mesh.world_size)], local, mesh.rank, group)
        return whole
    ranks = dist.get_process_group_ranks(group)
    if only_on not in ranks:
        return None  # a replica
    receiver = ranks.index(only_on)
    receives = mesh.rank == receiver
    elements = make().as_strided((shape.numel,), (1,)) if receives else local.new_empty(0)
    held = [piece.slot.piece(rank)[1] * local.itemsize for rank in range(mesh.world_size)]
    # One collective that all ranks take part in, with nothing to send as well: the first operation of a group on NCCL
    # needs all of its ranks. As bytes, because NCCL does not know every dtype.
    dist.all_to_all_single(
        elements.view(torch.uint8),
        local.contiguous().view(-1).view(torch.uint8),
        held if receives else [0] * len(held),
        [held[mesh.rank] if rank == receiver else 0 for rank in range(mesh.world_size)],
        group=group,
    )
    return elements.as_strided(shape.shape, shape.stride) if receives else None


def _held(slot: FlatSlot, rank: int) -> slice:
    start, numel, _ = slot.piece(rank)
    return slice(start, start + numel)


def _broadcast_all(places: Sequence[torch.Tensor], local: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Fill every rank's place on all ranks. Few have anything of one tensor, and it goes straight into place."""
    if local.numel():
        places[rank].copy_(local)
    works = [
        dist.broadcast(place, group=group, group_src=source, async_op=True)
        for source, place in enumerate(places)
        if place.numel()
    ]
    for work in works:
        if work is not None:
            work.wait()
