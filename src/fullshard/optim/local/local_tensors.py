"""Plain local tensors that an optimizer steps in place of sharded parameters, on the same memory.

[Note: Local tensors]
The *local tensor* of a parameter is this rank's shard: a plain tensor, on which an optimizer's kernels run without
DTensor dispatch. Its gradient and its state are those of the parameter, in the same memory: the local tensors of
DTensors. They are looked up anew in every step, and nothing refers to them afterwards, so that an optimizer keeps no
memory alive but that of its ``state`` and its parameters, whatever users do to these between two steps.

That of a 0-D parameter is 1-D: its state would look like numbers, such as ``step``, which are plain tensors in the
user's view too.

What cannot be stepped like that (sparse gradients, gradients that lie otherwise than the parameter, tensor subclasses,
state of other shapes) is stepped as it is: its local tensor is the user's parameter itself.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.placement import dtensor_like
from fullshard.engine.parameters.ragged_tensor import SHARDED_TYPES
from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.unit import Unit, unit_owning

__all__ = ["LocalTensor", "State", "StateEntries", "local_of", "local_tensors", "owning_unit", "write_back"]

StateEntries = dict[Any, Any]  # state of one parameter or local tensor, by name
State = dict[Any, StateEntries]  # state of an optimizer, by parameter or local tensor


@dataclass(slots=True, eq=False)
class LocalTensor:
    """A tensor that an optimizer steps. See [Note: Local tensors].

    Args:
        group: Index of the parameter's group in the optimizer.
        parameter: The user's parameter.
        local: Its local tensor, plain; the parameter itself if that is stepped.
        gradient: The gradient of ``local``; None: it is the parameter's own.
        known: State of ``local`` before the step; None: there was none.
    """

    group: int
    parameter: torch.Tensor
    local: torch.Tensor
    gradient: torch.Tensor | None = None
    known: StateEntries | None = None


def local_tensors(optimizer: torch.optim.Optimizer, local_state: State) -> list[LocalTensor]:
    """Return the local tensors of all parameters with gradients, in order, and put their state into ``local_state``.

    A parameter that is listed twice is returned twice.
    """
    made: dict[int, LocalTensor] = {}
    found: list[LocalTensor] = []
    state: Any = optimizer.state
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            tensor = made.get(id(parameter))
            if tensor is None:
                entries = state.get(parameter)
                tensor = made[id(parameter)] = _local_tensor(number, parameter, gradient, entries)
                if tensor.gradient is None:
                    tensor.known = entries
                if tensor.known is not None:
                    local_state[tensor.local] = tensor.known if tensor.gradient is None else dict(tensor.known)
            found.append(tensor)
    local_state.update(_shared_entries(state))
    return found


def _local_tensor(
    group: int, parameter: torch.Tensor, gradient: torch.Tensor, entries: StateEntries | None
) -> LocalTensor:
    """Return what is stepped for a parameter: its shard, or the parameter itself."""
    kind = type(parameter)
    if kind not in SHARDED_TYPES or type(gradient) is not kind:
        return LocalTensor(group, parameter, parameter)
    assert isinstance(parameter, DTensor)
    assert isinstance(gradient, DTensor)
    local, own = parameter._local_tensor, gradient._local_tensor
    known = _local_entries(parameter, entries) if _is_alike(gradient, parameter) and _lie_alike(own, local) else None
    if known is None:
        return LocalTensor(group, parameter, parameter)
    if not local.dim():
        local, own = local.view(1), own.view(1)
    elif local.requires_grad or own.dtype is not local.dtype:
        local = local.detach()
    return LocalTensor(group, parameter, local, own, None if entries is None else known)


def _local_entries(parameter: DTensor, entries: StateEntries | None) -> StateEntries | None:
    """Return the state of the local tensor of a parameter; None if it has entries that are no state of it."""
    if not entries:
        return {}
    local, known = parameter._local_tensor, {}
    shape, kind = local.shape, type(parameter)
    for name, entry in entries.items():
        if type(entry) is kind:
            value = entry._local_tensor
            if not _is_alike(entry, parameter) or value.shape != shape:
                return None
            known[name] = value if shape else value.view(1)
        elif isinstance(entry, torch.Tensor) and (isinstance(entry, DTensor) or entry.dim()):
            return None  # maybe of the unsharded parameter: a fused kernel would take the beginning of it
        else:
            known[name] = entry
    return known


def _is_alike(tensor: DTensor, parameter: DTensor) -> bool:
    """Return True if a gradient, or an entry of the state, is sharded as the parameter is."""
    own, found = parameter._spec, tensor._spec
    if type(tensor._local_tensor) is not torch.Tensor:
        return False
    return found is own or (found.placements == own.placements and found.shape == own.shape and found.mesh == own.mesh)


def _lie_alike(gradient: torch.Tensor, local: torch.Tensor) -> bool:
    """Return True if the elements of a shard and of its gradient lie in the same order, on the same device."""
    if type(local) is not torch.Tensor or local.layout is not torch.strided or gradient.layout is not torch.strided:
        return False
    if gradient.shape != local.shape or gradient.device != local.device:
        return False
    if gradient.stride() == local.stride():
        return True
    sizes = zip(local.shape, local.stride(), gradient.stride(), strict=True)
    return not local.numel() or all(stride == theirs for size, stride, theirs in sizes if size != 1)


def write_back(optimizer: torch.optim.Optimizer, tensors: list[LocalTensor], local_state: State) -> None:
    """Update the user's view of the state after a step that left ``local_state``.

    Only new objects are written back: entries changed in place share memory with the user's view. They are added in the
    order of the parameters, as without local tensors.
    """
    state: Any = optimizer.state
    for tensor in tensors:
        left, known, parameter = local_state.get(tensor.local), tensor.known, tensor.parameter
        if left is None:
            continue
        if tensor.gradient is None:
            if known is not left:
                state[parameter] = left
        elif known is None or len(left) != len(known) or not all(map(operator.is_, left.values(), known.values())):
            entries = state[parameter] if known is not None else state.setdefault(parameter, {})
            before = known or {}
            for name in before.keys() - left.keys():
                entries.pop(name, None)
            for name, entry in left.items():
                if name not in before or before[name] is not entry:
                    entries[name] = _user_entry(entry, tensor)
            tensor.known = dict(left)
    state.update(_shared_entries(local_state))


def _shared_entries(state: State) -> State:
    """Return the entries of a state that belong to no parameter."""
    others = {kind for kind in set(map(type, state)) if not issubclass(kind, torch.Tensor)}
    return {key: entries for key, entries in state.items() if type(key) in others} if others else {}


def _user_entry(entry: Any, tensor: LocalTensor) -> Any:
    """Return an entry of the state as users see it: a DTensor on the same memory if it has the parameter's elements."""
    parameter = tensor.parameter
    if type(entry) is not torch.Tensor or entry.shape != tensor.local.shape or not isinstance(parameter, DTensor):
        return entry
    return dtensor_like(entry.view(parameter._local_tensor.shape), parameter)


def local_of(entry: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    return entry._local_tensor if isinstance(entry, DTensor) else entry


def owning_unit(parameter: torch.Tensor) -> Unit | None:
    """Return the unit that a parameter belongs to; None for others."""
    managed = managed_by(parameter)
    return None if managed is None else unit_owning(managed)
