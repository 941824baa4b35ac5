"""Unsharded weights of Linear layers whose gradients backward writes straight into the message that is reduced.

[Note: Gradients written in place]
Autograd computes a gradient into memory of its own, which is then copied into the message of the reduce-scatter. With
``set_write_gradients_in_place`` the matrix multiplication of a Linear layer's weight gradient writes to its place in
the message. That needs gradients that are reduced in the dtype in which they are computed.
- The unsharded weight is a ``LinearWeight``, for which ``F.linear`` is another autograd function. In compiled code,
  autocast and transforms it is torch's own.
- When the backward of a unit begins, its message takes gradients, unless a reduction has it, or the transport brings
  memory of its own. The first gradient allocates it. A place is given once: what a weight that is used twice gets the
  second time is ordinary memory, autograd adds both up elsewhere, and the sum is packed.
- Packing leaves out what lies in its place.
- Users may keep such a gradient (a hook on the parameter sees it), although the memory is about to be freed. So before
  it is sent, the references to the message's memory are counted. If there are others than ours, the memory is left to
  them, and the gradients are packed into new memory.
docs/design/ragged.md has what else was tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from fullshard.engine import hooks
from fullshard.engine.parameters.sharded import ShardedParameter

__all__ = ["LinearWeight", "is_linear_weight", "write_in_place"]

Place = Callable[[], "torch.Tensor | None"]

_PLACE = "_fullshard_place"  # attribute of a LinearWeight


class LinearWeight(nn.Parameter):
    """The unsharded weight of Linear layers, whose gradient may be written in place."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function; ``F.linear`` with this weight with a backward of our own."""
        kwargs = kwargs or {}
        if any(each is not cls for each in types):  # it is for the other class to say what happens
            return _without_ours(func, args, kwargs)
        if func is F.linear and len(args) > 1 and type(args[1]) is cls and kwargs.keys() <= {"bias"}:
            inputs, weight, bias = args if len(args) == 3 else (*args, kwargs.get("bias"))
            place = weight.__dict__.get(_PLACE)
            if place is not None and hooks.may_differentiate_linear(inputs, weight, bias):
                return hooks.linear(inputs, weight, bias, place)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(_ordinary(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _without_ours(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` as if all weights were ordinary parameters."""
    weights: list[Any] = [each for each in tree_leaves((args, kwargs)) if type(each) is LinearWeight]
    for weight in weights:
        weight.__class__ = nn.Parameter
    try:
        return func(*args, **kwargs)
    finally:
        for weight in weights:
            weight.__class__ = LinearWeight


def _ordinary(weight: LinearWeight) -> nn.Parameter:
    """A parameter on the same memory, with the attributes that users have set."""
    with torch._C.DisableTorchFunctionSubclass():
        made = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    made.__dict__.update({name: value for name, value in weight.__dict__.items() if name != _PLACE})
    return made


def is_linear_weight(parameter: ShardedParameter) -> bool:
    """True if a Linear layer holds the parameter as its weight, and it is not cut for tensor parallelism."""
    if len(parameter.shape.shape) != 2 or parameter.placement.own is not None:
        return False
    if not parameter.sharded.dtype.is_floating_point:
        return False
    held = ((owner.module(), owner.name) for owner in parameter.owners)
    return any(isinstance(module, nn.Linear) and name == "weight" for module, name in held)


def write_in_place(parameter: ShardedParameter, place: Place | None) -> None:
    """Have the unsharded parameter's gradient written to what ``place`` returns; None: no longer."""
    unsharded = parameter.unsharded
    unsharded.__dict__.pop(_PLACE, None)
    unsharded.__class__ = nn.Parameter
    if place is not None:
        unsharded.__class__ = LinearWeight
        unsharded.__dict__[_PLACE] = place
