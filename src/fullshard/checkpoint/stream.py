"""The full tensors of a sharded model, one after another, without ever holding many of them.

Tensors are gathered in groups that follow each other in their unit and fit into a budget, each group by one collective
launch of the unit's own transport. The groups have memory of their own: what modules hold is never touched, so there is
nothing to put back when somebody stops half-way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.model_state import ModelState, model_state
from fullshard.checkpoint.parameters import local_parameters, walk
from fullshard.engine.bucket import Bucket, BufferBucket
from fullshard.engine.flat_bucket import FlatBucket, FlatGather
from fullshard.engine.full_copies import gather_outside
from fullshard.engine.gather import BufferGather
from fullshard.engine.ownership import nested_units
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.unit import Unit
from fullshard.errors import UnmaterializedParameterError
from fullshard.layout import PerParameterLayout
from fullshard.memory import Buffer

__all__ = ["GROUP_BYTES", "full_tensors"]

GROUP_BYTES = 256 * 1024 * 1024  # of tensors that are gathered together; one that is larger is gathered by itself


def full_tensors(
    model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and persistent buffers of ``model`` as full tensors, with their names as before wrapping.

    All ranks iterate together, to the end or to the same place: gathering is collective. Beside the shards, one group
    of tensors of up to 256 MiB, or one larger tensor, is in memory at a time, as long as nobody keeps what was given.
    To stop early leaves nothing behind.

    Args:
        model: Of either front end, or plain; between steps. It must not run, and its parameters must not change, until
            the iteration ends.
        dtype: Convert floating-point tensors to it, before they travel. None: each in its own.
        device: Where the tensors are to be. None: where the model computes.

    Returns:
        Iterator over name and tensor, unit by unit, then parameters that are in no unit, then buffers. A tied
        parameter comes under each of its names, the same tensor. Do not write to the tensors: what was not sharded is
        the model's own memory.

    Raises:
        PhaseError: If a unit is in the middle of a step, or its full parameters are summoned.
        UnmaterializedParameterError: If something is on the meta device.
        ValueError: If ``dtype`` is not a floating-point one.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"full_tensors: dtype: expected a floating-point dtype, found {dtype}")
    state = model_state(model)
    meta = [name for name, pieces in state.tensors.items() if pieces.device.type == "meta"]
    if meta:
        raise UnmaterializedParameterError(
            f"full_tensors: {meta[0]} (and {len(meta) - 1} more) are on the meta device; give the model memory first, "
            "with to_empty() or load_safetensors()"
        )
    return _named(model, state, dtype, None if device is None else torch.device(device))


def _named(
    model: nn.Module, state: ModelState, dtype: torch.dtype | None, device: torch.device | None
) -> Iterator[tuple[str, torch.Tensor]]:
    names = {name: [name] for name in state.tensors}
    for alias, first in state.aliases.items():
        names[first].append(alias)
    for first, tensor in itertools.chain(_parameters(model, dtype), _buffers(model, state)):
        with torch.no_grad():
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            given = tensor.detach().to(tensor.device if device is None else device, wanted)
        del tensor  # the group is the caller's now: it is freed with the last tensor of it that somebody keeps
        for name in names[first]:
            yield name, given
        del given


def _parameters(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = local_parameters(model)
    names = {id(parameter.sharded): parameter.fqn for parameter in parameters}
    for unit in nested_units(model):
        for bucket in unit.buckets:
            for group in _groups(bucket, dtype):
                with torch.inference_mode(False), torch.no_grad():
                    values = _gather(unit, bucket, group, dtype)
                while group:
                    yield names[id(group[0])], _whole(group[0].placement.full(values.pop(0)))
                    del group[0]
    for parameter in parameters:
        if parameter.sharded is None:
            yield parameter.fqn, _whole(parameter.parameter)


def _buffers(model: nn.Module, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in walk(model):
        for name, buffer in module._buffers.items():
            if buffer is None or prefix + name not in state.tensors:
                continue
            pieces = state.tensors[prefix + name]  # in the dtype in which it is saved
            yield prefix + name, _whole(buffer) if isinstance(buffer, DTensor) else pieces.pieces[0].local


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor that the user made: its full tensor. A collective on its mesh."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _groups(bucket: Bucket, dtype: torch.dtype | None) -> list[list[ShardedParameter]]:
    """The parameters that are gathered together, in the order in which they lie in the bucket."""
    groups: list[list[ShardedParameter]] = []
    taken = 0
    for parameter in bucket.parameters:
        nbytes = parameter.shape.numel * _dtype_of(parameter, dtype).itemsize
        if not groups or taken + nbytes > GROUP_BYTES:
            groups.append([])
            taken = 0
        groups[-1].append(parameter)
        taken += nbytes
    return groups


def _dtype_of(parameter: ShardedParameter, dtype: torch.dtype | None) -> torch.dtype:
    own = parameter.local.dtype
    return dtype if dtype is not None and own.is_floating_point else own


def _gather(unit: Unit, bucket: Bucket, group: list[ShardedParameter], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The full values of some parameters of a bucket, in new memory where anything travels. A collective."""
    mesh, travels_as = bucket.mesh.exactly(), _dtype_of(group[0], dtype)
    if mesh.transport is None:
        return [parameter.local.to(mesh.device) for parameter in group]
    if isinstance(bucket, FlatBucket):
        return _gather_slices(unit, bucket, group, travels_as)
    if not isinstance(bucket, BufferBucket):
        bucket.copies()  # says why it cannot
        raise AssertionError("a new kind of bucket")
    layout = PerParameterLayout.build(
        [parameter.shape for parameter in group],
        world_size=mesh.world_size,
        itemsize=travels_as.itemsize,
        direct_bytes=mesh.transport.direct_bytes,
    )
    source = torch.empty(layout.shard_numel, dtype=travels_as, device=mesh.device)
    for parameter, slot in zip(group, layout.slots, strict=True):
        place = slot.local_shape(mesh.rank), slot.local_stride(mesh.rank), slot.shard_offset
        source.as_strided(*place).copy_(parameter.local)
    buffer = Buffer(layout.full_numel, travels_as, mesh.device)
    gather_outside(unit, [BufferGather(layout, source, buffer, mesh.transport)])
    return [buffer.tensor(s.full_offset, s.parameter.shape, s.parameter.stride) for s in layout.slots]


def _gather_slices(
    unit: Unit, bucket: FlatBucket, group: list[ShardedParameter], dtype: torch.dtype
) -> list[torch.Tensor]:
    """All of a flat bucket by its own gather; a part of it from the ranks on whose slices it lies."""
    mesh, layout = bucket.mesh.exactly(), bucket.layout
    wanted = {id(parameter) for parameter in group}
    pairs = zip(bucket.parameters, layout.slots, strict=True)
    slots = [slot for parameter, slot in pairs if id(parameter) in wanted]
    begin, end = 0, layout.full_numel
    if len(group) < len(bucket.parameters):
        begin, end = slots[0].full_offset, slots[-1].full_offset + slots[-1].parameter.numel
    buffer = Buffer(end - begin, dtype, mesh.device)
    if len(group) == len(bucket.parameters):
        gather_outside(unit, [FlatGather(layout, bucket.shard_buffer, buffer, mesh)])
    else:
        assert mesh.shard is not None
        process_group, numel, works = mesh.shard.get_group(), layout.slice_numel, []
        for rank in range(begin // numel, -(-end // numel)):
            first, last = max(begin, rank * numel), min(end, (rank + 1) * numel)
            if first == last:
                continue
            part = buffer.tensor(first - begin, (last - first,), (1,))
            if rank == mesh.rank:
                part.copy_(bucket.shard_buffer[first - rank * numel : last - rank * numel])
            works.append(dist.broadcast(part, group=process_group, group_src=rank, async_op=True))
        for work in works:
            work.wait()
    return [buffer.tensor(s.full_offset - begin, s.parameter.shape, s.parameter.stride) for s in slots]
