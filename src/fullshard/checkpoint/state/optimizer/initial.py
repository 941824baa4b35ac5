"""Give an optimizer the state that it has just before its first step, as a target for loading.

[Note: No dummy step]
PyTorch's optimizers create their state in the first step. Its checkpoint functions therefore run a step with zero
gradients, which leaves ``step`` at 1 and momentum that decays from there, calls the user's hooks, and changes
parameters if the optimizer has no ``lr``. Here the step runs for one parameter at a time and is undone: of each entry
of the state only the first value that was written is kept, copied before the step continued. A step on local tensors
writes its state at the end: the optimizer's own step runs instead, on DTensors, without hooks.
"""

from __future__ import annotations

import copy
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullshard.engine.parameters.placement import dtensor_like
from fullshard.engine.parameters.sharded import value_of
from fullshard.errors import FullshardError
from fullshard.optim.local.localize import stepping_dtensors
from fullshard.optim.local.step import own_step

__all__ = ["give_initial_state"]


class _FirstValues(UserDict[str, Any]):
    """State of one parameter that remembers the first value written under each name."""

    first: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.first = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        super().__setitem__(key, value)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, also of subclasses that cannot be cloned, such as the quantized states of torchao's optimizers."""
    if isinstance(value, DTensor):
        return dtensor_like(_copy(value.to_local()), value)
    if not is_traceable_wrapper_subclass(value):
        return value.clone()
    names, context = value.__tensor_flatten__()
    parts = {name: _copy(getattr(value, name)) for name in names}
    copied: torch.Tensor = type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())
    return copied


@torch.no_grad()
def give_initial_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer the state that its first step would begin with. See [Note: No dummy step].

    Parameters, gradients, options and counters are as before. An optimizer whose step needs arguments, such as LBFGS,
    gets no state.

    Args:
        optimizer: Left alone if it has state.

    Raises:
        FullshardError: If its own step fails, as one of plain tensors does with DTensors.
    """
    optimizer = _itself(optimizer)
    if optimizer.state:
        return
    groups, state, made = optimizer.param_groups, optimizer.state, {}
    step = own_step(type(optimizer))  # of the class: schedulers replace the instance's by one that counts
    try:
        with stepping_dtensors(optimizer):
            for group in groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        made[parameter] = _state_of_step(step, optimizer, group, parameter)
    except TypeError:  # step() requires a closure
        made = {}
    except Exception as error:
        raise FullshardError(
            f"cannot determine the initial state of {type(optimizer).__name__}: its own step fails "
            f"({type(error).__name__}: {error}); run a step first, or initialize the state in the optimizer"
        ) from error
    finally:
        optimizer.param_groups, optimizer.state = groups, state
    state.update((parameter, values) for parameter, values in made.items() if values)


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Unwrap the optimizer that steps: accelerate's wrapper passes calls on and never initialized an optimizer
    itself.
    """
    while "_optimizer_step_pre_hooks" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def _state_of_step(
    step: Callable[[torch.optim.Optimizer], Any],
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: nn.Parameter,
) -> dict[str, Any]:
    """Run ``step`` for one parameter, undo it, and return the first values of the state."""
    value, gradient = value_of(parameter), parameter.grad
    before = value.clone()
    optimizer.param_groups = [{**_copies(group.items()), "params": [parameter]}]
    optimizer.state = defaultdict(_FirstValues)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    try:
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        # Some optimizers round stochastically; the next real step must draw the same numbers.
        drawn_on = [] if value.device.type in ("cpu", "meta") else [value.device]
        with torch.random.fork_rng(drawn_on, device_type=value.device.type if drawn_on else "cpu"):
            step(optimizer)
    finally:
        parameter.grad = gradient
        value.copy_(before)
    made = optimizer.state.get(parameter, {})
    if isinstance(made, _FirstValues):
        return made.first
    if "step" in made:  # the whole dictionary was assigned
        made["step"] = torch.zeros_like(made["step"]) if isinstance(made["step"], torch.Tensor) else 0
    return dict(made)


def _copies(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Copy options that a step may change in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in options
        if key != "params"
    }
