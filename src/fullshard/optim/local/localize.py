"""Make optimizers step plain local tensors in place of DTensors.

[Note: Local steps]
Optimizers of sharded parameters step local tensors from their first step on, without a call. torch runs hooks around
every step, also if a scheduler, accelerate or a gradient scaler has wrapped the method:
- The last pre-hook of the optimizer runs the closure, and then the class's ``step`` of the optimizer itself, whose
  groups and state are those of local tensors meanwhile. If one of them raises, the pre-hook does, after it has restored
  the optimizer. Closures and all hooks of the user see the optimizer with DTensors.
- torch then runs ``step`` once more: with nothing to step, and a closure that returns the loss. It runs on an object of
  the class that defines ``step``, which has the options but neither parameters nor state.
- The first post-hook of the optimizer puts the arguments back, with which torch calls the user's post-hooks.
- A pre-hook of all optimizers, which runs before those of one, keeps the two hooks in their places.

What lost: a subclass with another ``step`` (schedulers and accelerate keep the method from before, so it had to be
asked for in time); local tensors, or no parameters, in the optimizer itself from pre-hook to post-hook (torch calls no
post-hook for a step that raises); a ``step`` of torch's classes that is replaced (fullshard patches nothing of torch).

An optimizer is known by its class: torch's, or a library's by name, with neither ``step`` nor ``_init_group`` changed.
All others step DTensors, unless the user says that they are elementwise. Such an optimizer gets a ``step`` of its own,
around which torch runs hooks as around any other: nobody has kept the one from before, if it is done in time.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.engine.optimizer_steps import stepped_units
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
            from scalars, and everything that the optimizer reads and writes is in ``param_groups`` and ``state``. The
            closure is called before its ``step``, which gets None. Call it before learning rate schedulers are made
            and before others wrap the optimizer: whoever keeps its ``step`` from before steps DTensors. None: known
            for the classes above.
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
        return optimizer
    is_known = _known_class(type(optimizer)) is not None
    vars(optimizer)[_STEP] = LocalStep(vouched=not is_known)
    if is_known:
        _add_hook()
    else:
        vars(optimizer)["step"] = MethodType(Optimizer.profile_hook_step(_vouched_step), optimizer)
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


def _known_class(kind: type[Any]) -> type[Any] | None:
    """Return the class of a known elementwise optimizer whose arithmetic a class has; None for all others."""
    bases: tuple[type[Any], ...] = ELEMENTWISE
    for base in kind.__mro__:
        in_library = base.__name__ in ELEMENTWISE_OF_LIBRARIES.get(base.__module__.partition(".")[0], ())
        if base in bases or in_library:
            step = own_step(kind)
            is_unchanged = step is own_step(base) and getattr(kind, "_init_group", 0) is getattr(base, "_init_group", 0)
            # Someone else may have replaced it in the base.
            return base if is_unchanged and _package(step) == _package(base) else None
    return None


def _package(named: Any) -> str:
    name: str = named.__module__
    return name.partition(".")[0]


def _unsupported_reason(optimizer: Optimizer, elementwise: bool | None) -> str | None:
    """Return why an optimizer cannot step local tensors; None if it can."""
    kind = type(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True requires autograd through the parameters themselves"
    if elementwise is None:
        elementwise = _known_class(kind) is not None
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
    """Make our pre-hook of an optimizer the last and our post-hook the first. See [Note: Local steps]."""
    step = None if torch.compiler.is_compiling() else usable_step(optimizer)
    if step is None or step.vouched:
        return
    pre_hooks: Any = optimizer._optimizer_step_pre_hooks
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    if next(reversed(pre_hooks), None) != _HOOK:
        pre_hooks[_HOOK] = _before_own_step
        pre_hooks.move_to_end(_HOOK)
    if next(iter(post_hooks), None) != _HOOK:
        post_hooks[_HOOK] = _after_own_step
        post_hooks.move_to_end(_HOOK, last=False)


class _Done(list[Any]):
    """Arguments for torch's step without work, which hold the user's arguments to restore them afterwards.

    Args:
        idle: What it runs on.
        loss: What its closure returns.
        args: The user's arguments.
        kwargs: The user's arguments by name.
    """

    def __init__(self, idle: Optimizer, loss: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__((idle, lambda: loss))
        self.args, self.kwargs = args, kwargs


def _before_own_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Step local tensors, and have torch run the optimizer's own step with nothing to do."""
    step = None if torch.compiler.is_compiling() else usable_step(optimizer)
    known = _known_class(type(optimizer))
    if step is None or known is None:
        return None
    loss = _step(step, *args, **kwargs)
    idle: Any = object.__new__(known)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    vars(idle).update(vars(optimizer) | WITHOUT_HOOKS | {"param_groups": groups, "state": defaultdict(dict)})
    return _Done(idle, loss, args, kwargs), {}


def _after_own_step(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    """Put the user's arguments back for the hooks that follow."""
    if type(args) is _Done:
        args[:] = args.args
        kwargs.update(args.kwargs)


def _vouched_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer that the user has vouched for."""
    step = None if torch.compiler.is_compiling() else usable_step(optimizer)
    if step is None:
        return own_step(type(optimizer))(optimizer, *args, **kwargs)
    return _step(step, optimizer, *args, **kwargs)


def _step(
    step: LocalStep, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Run the closure and then the step on local tensors, and return the loss."""
    if closure is None:
        return step.step(optimizer, None, *args, **kwargs)
    with torch.enable_grad():
        loss = closure()
    step.step(optimizer, None, *args, **kwargs)
    return loss


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
        if not _is_default() or not stepped_units(optimizer) or _unsupported_reason(optimizer, None) is not None:
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
