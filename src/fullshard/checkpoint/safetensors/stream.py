"""Iterate over the full tensors of a sharded model without ever holding many of them.

Each parameter is gathered by itself, into new memory. The modules' parameters are not touched, so the iteration can
stop anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.model import ModelState, model_state
from fullshard.checkpoint.state.parameters import local_parameters, walk_modules
from fullshard.engine.ownership import units_of
from fullshard.errors import UnmaterializedParameterError

__all__ = ["full_tensors"]


def full_tensors(
    model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and persistent buffers of ``model`` as full tensors, with their names before wrapping.

    A collective: all ranks iterate together, to the end or to the same tensor. In addition to the shards, one tensor
    is in memory at a time, with what gathering it takes, unless the caller keeps references.

    Args:
        model: A model of ``fully_shard`` or ``FullyShardedDataParallel``, or plain; not in the middle of a step. It
            must not run, and its parameters must not change, until the iteration ends.
        dtype: Convert floating-point tensors to it before they are communicated. None: keep their dtypes.
        device: Device of the tensors. None: the compute device.

    Returns:
        Iterator over pairs of name and tensor: unit by unit, then parameters that are in no unit, then buffers. A tied
        parameter is yielded under each of its names, as the same tensor. Do not write to the tensors: those that are
        not sharded share memory with the model.

    Raises:
        PhaseError: If a unit is in the middle of a step, or its parameters are unsharded by ``summon_full_params``.
        UnmaterializedParameterError: If a parameter or buffer is on the meta device.
        ValueError: If ``dtype`` is not a floating-point dtype.

    Example:
        ```python
        from torch import nn
        import fullshard

        model = fullshard.fully_shard(nn.Linear(16, 8))
        shapes = {name: tuple(tensor.shape) for name, tensor in fullshard.full_tensors(model)}
        assert shapes == {"weight": (8, 16), "bias": (8,)}
        ```
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"full_tensors: dtype: expected a floating-point dtype, found {dtype}")
    state = model_state(model)
    meta = [name for name, shards in state.tensors.items() if shards.device.type == "meta"]
    if meta:
        raise UnmaterializedParameterError(
            f"full_tensors: {meta[0]} (and {len(meta) - 1} more) are on the meta device; give the model memory first, "
            "with to_empty() or load_safetensors()"
        )
    return _named(model, state, dtype, None if device is None else torch.device(device))


def _named(
    model: nn.Module, state: ModelState, dtype: torch.dtype | None, device: torch.device | None
) -> Iterator[tuple[str, torch.Tensor]]:
    names = state.names_of
    for first, tensor in itertools.chain(_parameters(model, dtype), _buffers(model, state)):
        with torch.no_grad():
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            given = tensor.detach().to(tensor.device if device is None else device, wanted)
        del tensor  # the caller owns it now
        for name in names[first]:
            yield name, given
        del given


def _parameters(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = local_parameters(model)
    names = {id(parameter.sharded): parameter.fqn for parameter in parameters}
    for unit in units_of(model):
        for bucket in unit.buckets:
            for sharded in [each for each in bucket.parameters if id(each) in names]:
                if not bucket.has_parts and bucket.mesh.world_size > 1:
                    bucket.copies()  # raises an error that says why there are none
                value = sharded.local
                if dtype is not None and value.is_floating_point():
                    value = value.to(dtype)
                with torch.inference_mode(False), torch.no_grad():
                    whole = sharded.full_from(value)
                yield names[id(sharded)], whole
                del value, whole
    for parameter in parameters:
        if parameter.sharded is None:
            yield parameter.fqn, _whole(parameter.parameter)


def _buffers(model: nn.Module, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in walk_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and prefix + name in state.tensors:
                saved = state.tensors[prefix + name].shards  # in the dtype in which it is saved
                yield prefix + name, _whole(buffer) if isinstance(buffer, DTensor) else saved[0].local


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor that the user made. A collective on its mesh."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
