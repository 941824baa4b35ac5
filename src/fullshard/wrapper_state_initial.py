"""The state that an optimizer has just before its first step, for who needs something to load into.

[Note: No dummy step]
PyTorch's optimizers make their state in the first step. Its checkpoint functions therefore run a step with zero
gradients, which leaves ``step`` at 1 and momentum that decays from there, calls the user's hooks, and moves parameters
if the optimizer has no ``lr``. Here the step runs for one parameter at a time, and nothing of it stays: of what is
written into a parameter's state only the first value under each name is kept, a copy from before the step went on.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullshard.engine.parameter import value_of

__all__ = ["give_initial_state"]


class _FirstValues(dict[str, Any]):
    """The state of one parameter, which remembers what was first written under each name."""

    first: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.first = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        super().__setitem__(key, value)

    def update(self, *others: Any, **values: Any) -> None:
        """As of ``dict``."""
        for key, value in dict(*others, **values).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As of ``dict``."""
        if key not in self:
            self[key] = default
        return self[key]


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy, also of subclasses that cannot be cloned, such as the quantised states of torchao's optimizers."""
    if isinstance(value, DTensor):
        local = _copy(value.to_local())
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
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
    gets nothing.

    Args:
        optimizer: Without state, else nothing is done.
    """
    optimizer = _itself(optimizer)
    if optimizer.state:
        return
    groups, state, made = optimizer.param_groups, optimizer.state, {}
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict()  # they are told of steps, and this is none
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        for group in groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    made[parameter] = _initial_state(optimizer, group, parameter)
    except TypeError:  # it wants a closure
        made = {}
    finally:
        optimizer.param_groups, optimizer.state = groups, state
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    state.update((parameter, values) for parameter, values in made.items() if values)


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps: accelerate's only pass on to another, and never became an optimizer themselves."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def _initial_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    value, gradient = value_of(parameter), parameter.grad
    before = value.clone()
    optimizer.param_groups = [{**_copies(group.items()), "params": [parameter]}]
    optimizer.state = defaultdict(_FirstValues)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    try:
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        # Some round at random, and the next real step is to draw what it would have.
        drawn_on = [] if value.device.type in ("cpu", "meta") else [value.device]
        with torch.random.fork_rng(drawn_on, device_type=value.device.type if drawn_on else "cpu"):
            # Of the class: schedulers put a function that counts in the instance.
            type(optimizer).step(optimizer)
    finally:
        parameter.grad = gradient
        value.copy_(before)
    made = optimizer.state.get(parameter, {})
    if isinstance(made, _FirstValues):
        return made.first
    if "step" in made:  # put there as a whole
        made["step"] = torch.zeros_like(made["step"]) if isinstance(made["step"], torch.Tensor) else 0
    return dict(made)


def _copies(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Options that a step may change in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in options
        if key != "params"
    }
