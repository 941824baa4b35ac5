"""Make optimizers step plain local tensors in place of DTensors.

[Note: Local steps]
Optimizers of sharded parameters step local tensors from their first step on, without a call. torch runs hooks around
every step, also if a scheduler, accelerate or a gradient scaler has wrapped the method:
- The last pre-hook of the optimizer has torch call its own ``step`` with a ``_WithoutParameters`` in place of the
  optimizer. So all that this ``step`` does is to run the closure and to return its loss.
- The first post-hook of the optimizer puts the optimizer back among the arguments, with which torch calls the user's
  post-hooks, and runs the arithmetic: the class's ``step`` of the optimizer itself, whose groups and state are those of
  local tensors meanwhile. Pre-hooks and closure of the user see the optimizer before the step, post-hooks after it, all
  with DTensors.
- A pre-hook of all optimizers, which runs before those of one, keeps the two hooks in their places.

What lost: a subclass with another ``step`` (schedulers and accelerate keep the method from before, so it had to be
asked for in time); local tensors, or no parameters, in the optimizer from pre-hook to post-hook (torch calls no
post-hook for a step that raises, and users' hooks and closures would see them); a second optimizer of the same class
for the closure (it is finalized after every step, by the ``__del__`` of the user's class too); a second optimizer
object for the user (every method that reads or writes state would have to be translated, including those of libraries).

An optimizer is known by its class: torch's, or a library's by name, with neither ``step`` nor ``_init_group`` changed.
All others step DTensors, unless the user says that they are elementwise.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.engine.optimizer_steps import managed_parameters
from fullshard.optim.local.step import WITHOUT_HOOKS, LocalStep, own_step

__all__ = ["local_step_of", "localize", "step_local_tensors", "stepping_dtensors", "usable_step"]

_O = TypeVar("_O", bound=Optimizer)

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
# Of libraries, by package and class; libraries are not imported to find out.
ELEMENTWISE_OF_LIBRARIES = {
    "schedulefree": {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"},
}
REASONS = {
    "LBFGS": "it treats all parameters as one vector and takes inner products",
    "Adafactor": "its state has means over rows and columns of full matrices",
    "Muon": "it orthogonalizes full matrices",
    "SparseAdam": "it requires sparse gradients",
}

_STEP = "_fullshard_local_step"  # attribute of an optimizer: its LocalStep; None: it steps DTensors
_OPTIMIZER = "_fullshard_optimizer"  # attribute of a _WithoutParameters: what it stands in for
_HOOK = -1  # key of the post-hook; torch counts from 0


def localize(optimizer: _O, *, elementwise: bool | None = None, enable: bool = True) -> _O:
    """Choose whether an optimizer steps plain local tensors or DTensors.

    Optimizers that are known to be elementwise step local tensors without this call, if they have parameters of
    ``fullshard.fully_shard`` modules or wrappers: those of ``torch.optim`` (``SGD``, ``Adam``, ``AdamW``, ``NAdam``,
    ``RAdam``, ``Adamax``, ``Adadelta``, ``Adagrad``, ``RMSprop``, ``Rprop``, ``ASGD``) and of schedulefree, and their
    subclasses that override neither ``step`` nor ``_init_group``. Call it for your own classes, with
    ``elementwise=True``, or to return to DTensors, with ``enable=False``.

    A step on local tensors has no DTensor dispatch. The results are those of the same implementation in torch
    (``foreach``, ``fused`` or neither; by default torch uses ``foreach`` on accelerators, also for DTensors, and a loop
    on the CPU), bit for bit. Everything else stays the same: ``param_groups``, ``state``, ``state_dict()``, hooks,
    schedulers, gradient scalers.

    Args:
        optimizer: An optimizer of parameters of ``fullshard.fully_shard`` modules or wrappers, and any other
            parameters. With or without state.
        elementwise: True if each element of a parameter is updated only from the same element of gradient and state and
            from scalars, and everything that the optimizer reads and writes is in ``param_groups`` and ``state``. In
            each step its ``step`` is also called once without parameters, for the closure, and must allow that. None:
            known for the classes above.
        enable: False: the optimizer steps DTensors, as torch does, from now on.

    Returns:
        The same object. If it cannot step local tensors, it steps DTensors.

    Raises:
        TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer``.

    Warns:
        UserWarning: If the optimizer cannot step local tensors, with the reason.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import fully_shard
        from fullshard.optim import localize


        class Signs(torch.optim.Optimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.add_(p.grad.sign(), alpha=-group["lr"])


        model = fully_shard(nn.Linear(16, 16))
        optimizer = localize(Signs(model.parameters(), lr=1e-3), elementwise=True)
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        ```
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"localize: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if not enable:
        vars(optimizer)[_STEP] = None
        return optimizer
    if local_step_of(optimizer) is not None:
        return optimizer
    reason = _unsupported_reason(optimizer, elementwise)
    if reason is not None:
        warnings.warn(f"localize: {type(optimizer).__name__} is left unchanged: {reason}", stacklevel=2)
    else:
        vars(optimizer)[_STEP] = LocalStep()
        _add_hook()
    return optimizer


def local_step_of(optimizer: Optimizer) -> LocalStep | None:
    """Return the ``LocalStep`` of an optimizer that steps local tensors; None for others, and before its first step."""
    step: LocalStep | None = vars(optimizer).get(_STEP)
    return step


def step_local_tensors() -> None:
    """Have optimizers of sharded parameters step local tensors. See [Note: Local steps].

    ``FULLSHARD_LOCAL_OPTIMIZERS=0`` in the environment, or ``FULLSHARD_WATCH_OPTIMIZERS=0``, leaves it to ``localize``.
    """
    if _is_default():
        _add_hook()


@functools.cache
def _is_default() -> bool:
    names = ("FULLSHARD_LOCAL_OPTIMIZERS", "FULLSHARD_WATCH_OPTIMIZERS")
    return all(os.environ.get(name, "1") != "0" for name in names)


# ---------------------------------------------------------------- classes of optimizers


def _is_known(kind: type[Any]) -> bool:
    """Return True if the arithmetic is that of a known elementwise optimizer."""
    bases: tuple[type[Any], ...] = ELEMENTWISE
    for base in kind.__mro__:
        in_library = base.__name__ in ELEMENTWISE_OF_LIBRARIES.get(base.__module__.partition(".")[0], ())
        if base in bases or in_library:
            step = own_step(kind)
            is_unchanged = step is own_step(base) and getattr(kind, "_init_group", 0) is getattr(base, "_init_group", 0)
            return is_unchanged and _package(step) == _package(base)  # someone else may have replaced it in the base
    return False


def _package(named: Any) -> str:
    name: str = named.__module__
    return name.partition(".")[0]


def _unsupported_reason(optimizer: Optimizer, elementwise: bool | None) -> str | None:
    """Return why an optimizer cannot step local tensors; None if it can."""
    kind = type(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True requires autograd through the parameters themselves"
    if elementwise is None:
        elementwise = _is_known(kind)
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        return "its param_groups and state are not attributes of its own"
    if elementwise:
        return None
    for base in kind.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in REASONS:
            return REASONS[base.__name__]
    return "it is not known to be elementwise; if it is, pass elementwise=True"


# ---------------------------------------------------------------- hooks


@functools.cache
def _add_hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the hooks of an optimizer that steps local tensors run last and first. See [Note: Local steps]."""
    if torch.compiler.is_compiling() or usable_step(optimizer) is None:
        return
    pre_hooks: Any = optimizer._optimizer_step_pre_hooks
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    if next(reversed(pre_hooks), None) != _HOOK:
        pre_hooks[_HOOK] = _before_own_step
        pre_hooks.move_to_end(_HOOK)
    if next(iter(post_hooks), None) != _HOOK:
        post_hooks[_HOOK] = _after_own_step
        post_hooks.move_to_end(_HOOK, last=False)


def _before_own_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Have torch run the optimizer's own step without parameters, and the post-hook the arithmetic."""
    if torch.compiler.is_compiling() or usable_step(optimizer) is None:
        return None
    return [_WithoutParameters(optimizer), *args[1:]], kwargs  # a list: the post-hook puts the optimizer back


def _after_own_step(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    """Run the arithmetic, unless the optimizer itself has stepped: without local tensors, or by a hook of the user."""
    step = local_step_of(optimizer)
    if (
        step is None
        or not args
        or type(args[0]) is not _WithoutParameters
        or vars(args[0])[_OPTIMIZER] is not optimizer
    ):
        return
    args[0] = optimizer
    further = {name: value for name, value in kwargs.items() if name != "closure"}
    step.step(optimizer, *(None, *args[2:])[: len(args) - 1], **further)


@contextmanager
def stepping_dtensors(optimizer: Optimizer) -> Iterator[None]:
    """While the context is open, the optimizer steps DTensors, without hooks of its own."""
    attributes, replaced = vars(optimizer), {**WITHOUT_HOOKS, _STEP: None}
    users = {name: attributes[name] for name in replaced if name in attributes}
    attributes.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del attributes[name]
        attributes.update(users)


def usable_step(optimizer: Optimizer) -> LocalStep | None:
    """Return what steps the optimizer's local tensors in this step; None: it steps DTensors."""
    attributes = vars(optimizer)
    if _STEP not in attributes:
        if not _is_default() or not managed_parameters(optimizer) or _unsupported_reason(optimizer, None) is not None:
            return None
        attributes[_STEP] = LocalStep()
    step: LocalStep | None = attributes[_STEP]
    if step is None or step.is_running:  # a step of the user's that calls that of its base class
        return None
    options = (value for group in optimizer.param_groups for value in group.values())
    scale = (attributes.get("grad_scale"), attributes.get("found_inf"))
    if any(isinstance(value, DTensor) for each in (options, scale) for value in each):
        return None
    return None if any(group.get("differentiable") for group in optimizer.param_groups) else step


class _WithoutParameters:
    """Stands in for an optimizer while torch runs its ``step`` for the closure: its groups and state are empty.

    It is no optimizer of the user's class, so nothing of that class makes or finalizes it. Methods and properties of
    the class run with it; everything else that is read is the optimizer's, and everything that is written is dropped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        # A step may call that of a base class, around which torch runs hooks again.
        own = {"param_groups": groups, "state": defaultdict(dict), _STEP: None, _OPTIMIZER: optimizer, **WITHOUT_HOOKS}
        own["_warned_capturable_if_run_uncaptured"] = True  # torch's, of a warning that is given in the real step
        vars(self).update(own)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """Be an instance of the optimizer's class, for ``super()``."""
        return type(vars(self)[_OPTIMIZER])

    def __getattr__(self, name: str) -> Any:
        optimizer = vars(self)[_OPTIMIZER]
        found = inspect.getattr_static(type(optimizer), name, None)
        if isinstance(found, (FunctionType, property)) and name not in vars(optimizer):
            return found.__get__(self, type(optimizer))
        return getattr(optimizer, name)
