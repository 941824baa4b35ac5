"""Have torch's functions that make DTensors of parts, or cut whole tensors, know ``RaggedShard``.

[Note: torch's functions and RaggedShard]
Programs hand the placements of a parameter on: ``DTensor.from_local(state, p.device_mesh, p.placements)`` makes the
state of an optimizer (torchao's do), ``distribute_tensor(value, p.device_mesh, p.placements)`` a parameter to load.
torch refuses both; given a global shape, the first makes a plain DTensor, of which ``RaggedShard`` refuses operations.
Between ``enable_ragged_placements`` and its end these functions make ``RaggedDTensor``s of what has a ``RaggedShard``,
and are torch's own for everything else. Names in modules are rebound; who holds torch's ``distribute_tensor``
elsewhere, such as in an attribute of a class, still gets torch's, which raises.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed._state_dict_utils as state_dicts
import torch.distributed.tensor as tensors
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullshard.dropin.patches import SharedPatch, replace
from fullshard.engine import hooks
from fullshard.layout import FlatSlot, ParameterShape
from fullshard.ragged import RaggedDTensor, RaggedShard
from fullshard.ragged.placement import ragged_spec, rebuild_shard, view_here
from fullshard.ragged.tensor import make_ragged, part_of

__all__ = ["enable_ragged_placements"]


def enable_ragged_placements() -> contextlib.ExitStack:
    """Make ``DTensor.from_local``, ``distribute_tensor`` and more accept the placements of ragged parameters.

    Programs that pass the placements of a parameter on to these functions of torch, such as quantized optimizers of
    torchao, then work with ``fully_shard(layout="ragged")``. So do ``set_model_state_dict`` with full state dicts, and
    ``torch.load`` of saved ragged tensors. torch is patched for the whole process, and does with other placements what
    it did before. ``fullshard.dropin.install`` includes this call.

    Returns:
        A context manager that undoes this call at its end or by ``close()``; it may be discarded. The patches stay
        while another call is in effect.

    Example:
        ```python
        import torch
        from torch import nn
        from torch.distributed.tensor import DTensor

        from fullshard import fully_shard
        from fullshard.dropin import enable_ragged_placements

        weight = fully_shard(nn.Linear(8, 8), layout="ragged").weight
        with enable_ragged_placements():
            state = DTensor.from_local(torch.zeros_like(weight.to_local()), weight.device_mesh, weight.placements)
        assert type(state) is type(weight.data)
        ```
    """
    return _shared.enable()


def _patch(undo: contextlib.ExitStack) -> None:
    replace(undo, DTensor, "from_local", staticmethod(_knowing(DTensor.from_local, _from_local)))
    name, known = "distribute_tensor", tensors.distribute_tensor
    knowing = _knowing(known, _distribute_tensor)
    for module in list(sys.modules.values()):  # in torch, and where it was imported by name
        if getattr(module, "__dict__", {}).get(name) is known:
            replace(undo, module, name, knowing)
    whole = functools.partial(_distribute_in_state_dict, state_dicts._distribute_tensors)
    replace(undo, state_dicts, "_distribute_tensors", whole)
    undo.enter_context(torch.serialization.safe_globals([RaggedDTensor, FlatSlot, ParameterShape, rebuild_shard]))


_shared = SharedPatch(_patch)


def _knowing(original: Callable[..., Any], ours: Callable[..., DTensor]) -> Callable[..., Any]:
    """Call ``ours`` for plain tensors and placements with a RaggedShard, else ``original``."""

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        placements = args[2] if len(args) > 2 else kwargs.get("placements")
        tensors_given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ragged = placements is not None and any(type(placement) is RaggedShard for placement in placements)
        if not ragged or any(isinstance(tensor, DTensor) for tensor in tensors_given):
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return either


def _from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of this rank's part, as ``DTensor.from_local`` does. A gradient has the same placements.

    Raises:
        ValueError: If the part, or the global shape, is another one than that of the placement, or the gradient's
            placements are others.
    """
    device_mesh = device_mesh or _mesh_resources.get_current_mesh()
    local, spec = local_tensor, ragged_spec(device_mesh, placements, local_tensor.dtype)
    if grad_placements is not None and tuple(grad_placements) != spec.placements:
        raise ValueError(
            f"DTensor.from_local: expected grad_placements {spec.placements}, those of the tensor, or None; found "
            f"{tuple(grad_placements)}"
        )
    _, expected, own_stride = view_here(spec)
    if tuple(local.shape) != expected or (shape is not None and tuple(shape) != tuple(spec.shape)):
        found = f"a tensor of shape {tuple(local.shape)}" + ("" if shape is None else f" of shape {tuple(shape)}")
        raise ValueError(
            f"DTensor.from_local: expected this rank's part, of shape {expected}, of a parameter of shape "
            f"{tuple(spec.shape)} that is sharded with layout='ragged', found {found}; use distribute_tensor for a "
            "whole tensor"
        )
    if local.device.type != device_mesh.device_type and not local.is_meta:
        local = local.to(device_mesh.device_type)
    if not is_traceable_wrapper_subclass(local) and not _lies_as(local, own_stride):
        local = torch.empty_strided(expected, own_stride, dtype=local.dtype, device=local.device).copy_(local)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return make_ragged(local.detach(), spec)

    def local_part(gradient: DTensor) -> torch.Tensor:
        alike = isinstance(gradient, RaggedDTensor) and gradient.placements == spec.placements
        return gradient._local_tensor if alike else part_of(gradient, spec)

    return cast("DTensor", hooks.differentiable(local, lambda value: make_ragged(value.detach(), spec), local_part))


def _lies_as(local: torch.Tensor, stride: Sequence[int]) -> bool:
    """True if the elements lie in memory as those of a tensor with these strides."""
    return all(own == other for size, own, other in zip(local.shape, local.stride(), stride, strict=True) if size > 1)


def _distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Keep this rank's part of the values of one rank, as ``distribute_tensor`` does.

    Raises:
        ValueError: If the value has another shape than the parameter.
    """
    device_mesh = device_mesh or _mesh_resources.get_current_mesh()
    spec = ragged_spec(device_mesh, placements, tensor.dtype)
    if tuple(tensor.shape) != tuple(spec.shape):
        raise ValueError(
            f"distribute_tensor: expected a tensor of shape {tuple(spec.shape)}, that of the parameter whose placements"
            f" {tuple(placements)} are, found {tuple(tensor.shape)}"
        )
    replicated = [Replicate()] * device_mesh.ndim
    whole = tensors.distribute_tensor(tensor, device_mesh, replicated, src_data_rank=src_data_rank)
    made = make_ragged(part_of(whole, spec), spec)
    made.requires_grad = tensor.requires_grad
    return made


def _distribute_in_state_dict(
    original: Callable[..., None], local_state: dict[str, Any], keys: Sequence[str], *args: Any, **kwargs: Any
) -> None:
    """Put whole tensors that all ranks have into ragged entries, and leave the other entries to torch.

    Args:
        original: torch's function.
        local_state: By key, the present DTensor and a whole tensor.
        keys: Of the entries.
        args: Of ``original``.
        kwargs: Of ``original``.
    """
    others = []
    for key in keys:
        entry = local_state.get(key)
        if not isinstance(entry, tuple) or not isinstance(entry[0], RaggedDTensor):
            others.append(key)
            continue
        present, whole = entry
        if present.is_meta:
            local_state[key] = _distribute_tensor(whole, present.device_mesh, present.placements, src_data_rank=None)
        else:
            present.detach().copy_(whole)
            local_state[key] = present
    if others:
        original(local_state, others, *args, **kwargs)
