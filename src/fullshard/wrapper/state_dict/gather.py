"""Gather an optimizer's state from all ranks, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.parameters import LocalParameter
from fullshard.engine.parameters.flat import FlatShardedParameter
from fullshard.engine.parameters.placement import dtensor
from fullshard.ranks.groups import data_parallel_groups

__all__ = ["ShardedTensor", "full_state", "full_tensor", "gather_groups", "gather_sharded_tensor", "sharded_state"]


def gather_groups(original: LocalParameter) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups of the ranks that hold shards of the parameter and gather its state together."""
    if original.sharded is not None:
        yield from data_parallel_groups(original.sharded.placement.mesh)
        if original.sharded.placement.own is not None:
            yield from _groups_of_mesh(original.sharded.placement.own.mesh)
    elif isinstance(original.parameter, DTensor):
        yield from _groups_of_mesh(original.parameter.device_mesh)


def _groups_of_mesh(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    return (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def full_state(
    original: LocalParameter, value: torch.Tensor, is_sharded: bool, only_on: int | None = None
) -> torch.Tensor | None:
    """Return a state as a full tensor. All ranks of ``gather_groups`` call it.

    Args:
        original: The parameter.
        value: A state of ``original.parameter``.
        is_sharded: True if the state is sharded as the parameter.
        only_on: Global rank that needs the result. None: all.

    Returns:
        A new tensor, on the device where the unit computes; None on most ranks that do not need it.
    """
    value = value.detach()
    if not is_sharded or (original.sharded is None and not isinstance(original.parameter, DTensor)):
        return (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    if isinstance(original.sharded, FlatShardedParameter):
        if original.sharded.placement.own is None:
            return _gather(original.sharded, original.local_of(value), only_on)
        whole = _gather(
            original.sharded, original.local_of(value), None
        )  # ranks along its other mesh axes take part in the next collective
        assert whole is not None
        return full_tensor(original.sharded.placement.unsharded(whole))
    return full_tensor(_like_parameter(original.parameter, value)).clone()


def sharded_state(original: LocalParameter, value: torch.Tensor, is_sharded: bool) -> torch.Tensor:
    """Return a state as a DTensor with Shard(0). All ranks of ``gather_groups`` call it.

    Args:
        original: The parameter.
        value: A state of ``original.parameter``.
        is_sharded: True if the state is sharded as the parameter.

    Returns:
        The state itself for DTensors. A plain tensor if the state is replicated, or no unit shards the parameter.
    """
    value = value.detach()
    if not is_sharded or isinstance(value, DTensor):
        return value
    if not isinstance(original.sharded, FlatShardedParameter):
        return _like_parameter(original.parameter, value)
    whole = _gather(original.sharded, original.local_of(value), None)
    assert whole is not None
    placement = original.sharded.placement
    mesh, rows = placement.mesh, whole
    if mesh.shard is None:
        return placement.unsharded(whole)  # not sharded: whole in the model's own state dict as well
    if placement.shard_dim is not None:
        chunks = torch.chunk(whole, mesh.world_size, placement.shard_dim)
        rows = chunks[mesh.rank] if mesh.rank < len(chunks) else whole.narrow(placement.shard_dim, 0, 0)
        rows = rows.clone()
    return dtensor(rows, placement.sharded_spec(rows.dtype))


def _like_parameter(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Wrap a local tensor in a DTensor if the parameter is one."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, also of an offloaded one; a plain tensor as it is."""
    if not isinstance(value, DTensor):
        return value
    on_device = _to_device(value._local_tensor, value.device_mesh.device_type)
    if on_device is not value._local_tensor:  # offloaded, but its group communicates on the accelerator
        value = DTensor.from_local(
            on_device, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return value.full_tensor()


def _to_device(value: torch.Tensor, device_type: str) -> torch.Tensor:
    return value if value.device.type == device_type else value.to(device_type)


def _gather(flat: FlatShardedParameter, local: torch.Tensor, only_on: int | None) -> torch.Tensor | None:
    """Return the full tensor of a flat-sharded state, with the strides of the parameter."""
    mesh, shape = flat.placement.mesh, flat.shape
    local = _to_device(local, mesh.device.type)
    make = partial(torch.empty_strided, shape.shape, shape.stride, dtype=local.dtype, device=local.device)
    if mesh.shard is None or mesh.world_size == 1:
        whole = make()
        return whole.copy_(local.view_as(whole))
    assert flat.slot is not None
    group, slices = mesh.shard.get_group(), [flat.slot.shard(rank)[:2] for rank in range(mesh.world_size)]
    if only_on is None:
        # Few ranks hold any of one tensor, and each slice is received in place.
        whole = make()
        elements = whole.as_strided((shape.numel,), (1,))
        places = [elements[start : start + numel] for start, numel in slices]
        places[mesh.rank].copy_(local.reshape(-1))
        works = [
            dist.broadcast(place, group=group, group_src=source, async_op=True)
            for source, place in enumerate(places)
            if place.numel()
        ]
        for work in works:
            if work is not None:
                work.wait()
        return whole
    ranks = dist.get_process_group_ranks(group)
    if only_on not in ranks:
        return None  # a replica of another shard group
    receiver = ranks.index(only_on)
    receives = mesh.rank == receiver
    elements = make().as_strided((shape.numel,), (1,)) if receives else local.new_empty(0)
    held = [numel * local.itemsize for _, numel in slices]
    # All ranks take part, also those with nothing to send: the first operation of a group on NCCL needs all of its
    # ranks. As bytes, because NCCL does not support every dtype.
    dist.all_to_all_single(
        elements.view(torch.uint8),
        local.contiguous().view(-1).view(torch.uint8),
        held if receives else [0] * len(held),
        [held[mesh.rank] if rank == receiver else 0 for rank in range(mesh.world_size)],
        group=group,
    )
    return elements.as_strided(shape.shape, shape.stride) if receives else None


def gather_sharded_tensor(value: ShardedTensor) -> torch.Tensor:
    """All-gather a ShardedTensor on every rank of its group: one collective.

    These are torch's sharded tensors before DTensor. ``load_sharded_optimizer_state_dict`` of
    ``torch.distributed.checkpoint.optimizer``, with which Lightning reads optimizers, still returns them.

    Args:
        value: A sharded tensor with any number of shards per rank.

    Returns:
        The full tensor, on the device that its group communicates on.
    """
    group, metadata = value._process_group, value.metadata()
    device = dist.distributed_c10d._get_pg_default_device(group)
    regions: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(dist.get_world_size(group))]
    for shard in metadata.shards_metadata:
        owner = shard.placement.rank()  # type: ignore[union-attr]
        assert owner is not None
        regions[dist.get_group_rank(group, owner)].append((list(shard.shard_offsets), list(shard.shard_sizes)))
    local_shards = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    most = max(sum(math.prod(sizes) for _, sizes in owned) for owned in regions)
    local = torch.zeros(most, dtype=value.dtype, device=device)
    if regions[dist.get_rank(group)]:
        parts = [
            local_shards[tuple(offsets)].detach().to(device).reshape(-1) for offsets, _ in regions[dist.get_rank(group)]
        ]
        torch.cat(parts, out=local[: sum(part.numel() for part in parts)])
    received = [torch.empty_like(local) for _ in regions]
    dist.all_gather(received, local, group=group)
    full = torch.empty(metadata.size, dtype=value.dtype, device=device)
    for owned, sent in zip(regions, received, strict=True):
        at = 0
        for offsets, sizes in owned:
            region = full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            region.copy_(sent[at : at + region.numel()].view(sizes))
            at += region.numel()
    return full
