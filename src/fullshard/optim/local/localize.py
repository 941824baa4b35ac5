"""Make stock optimizers step plain local tensors, several at once where they are adjacent, in place of DTensors.

[Note: Localized optimizers]
A localized optimizer is the same object with another class: a subclass of its own, of the same name, that overrides
``step`` and nothing else. ``param_groups`` and ``state`` remain the optimizer's own; they are replaced by those of the
local tensors only while its arithmetic runs in ``step()``. The alternative was a second optimizer object on local
tensors, kept in sync with the user's: every method that reads or writes state would have had to be translated,
including those of libraries.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

from fullshard.optim.local.step import LocalStep

__all__ = ["local_step_of", "localize"]

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
REASONS = {
    "LBFGS": "it treats all parameters as one vector and takes inner products",
    "Adafactor": "its state has means over rows and columns of full matrices",
    "Muon": "it orthogonalizes full matrices",
    "SparseAdam": "it requires sparse gradients",
}

_SUBCLASS = "_fullshard_localized"  # attribute of classes
_STEP = "_fullshard_local_step"  # attribute of a localized optimizer


def localize(optimizer: _O, *, elementwise: bool | None = None) -> _O:
    """Make an optimizer step plain local tensors instead of DTensors from now on.

    The step then has no DTensor dispatch. Parameters that are adjacent in a shard buffer, are in the same parameter
    group and have adjacent gradients are stepped as one tensor. The results are those of the same implementation in
    torch (``foreach``, ``fused`` or neither; by default torch uses ``foreach`` on accelerators, also for DTensors, and
    a loop on the CPU), bit for bit unless kernels round the last elements of a tensor differently. Everything else
    stays the same: ``param_groups``, ``state``, ``state_dict()``, hooks, schedulers, gradient scalers, copying and
    pickling.

    Args:
        optimizer: A ``torch.optim`` optimizer of parameters of ``fullshard.fully_shard`` modules or wrappers, and any
            other parameters. With or without state. It is changed in place.
        elementwise: True if each element of a parameter is updated only from the same element of gradient and state and
            from scalars, and everything that the optimizer reads and writes is in ``param_groups`` and ``state``. None:
            known for torch's own classes, and for subclasses that override neither ``step`` nor ``_init_group``.

    Returns:
        The same object. If it cannot be localized, it is left unchanged.

    Raises:
        TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer``.

    Warns:
        UserWarning: If the optimizer cannot be localized, with the reason.

    Example:
        ```python
        import torch
        from torch import nn
        from fullshard import fully_shard
        from fullshard.optim import localize

        model = fully_shard(nn.Linear(16, 16))
        optimizer = localize(torch.optim.AdamW(model.parameters(), lr=1e-3))
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        ```
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"localize: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if _STEP in vars(optimizer):
        return optimizer
    original = type(optimizer)
    reason = _unsupported_reason(optimizer, original, elementwise)
    if reason is not None:
        warnings.warn(f"localize: {original.__name__} is left unchanged: {reason}", stacklevel=2)
    else:
        vars(optimizer).pop("step", None)  # a scheduler's wrapper of the step method, which would call the old method
        _attach(optimizer, original)
    return optimizer


def local_step_of(optimizer: Optimizer) -> LocalStep | None:
    """Return the ``LocalStep`` of a localized optimizer; None for others."""
    step: LocalStep | None = vars(optimizer).get(_STEP)
    return step


def _attach(optimizer: Optimizer, original: type[Optimizer]) -> None:
    inner = original.step
    inner = getattr(inner, "__wrapped__", inner) if getattr(inner, "hooked", False) else inner
    vars(optimizer)[_STEP] = LocalStep(inner)
    optimizer.__class__ = _localized(original)


def _is_torch_elementwise(kind: type[Any]) -> bool:
    """Return True if the arithmetic is that of one of torch's elementwise optimizers."""
    bases: tuple[type[Any], ...] = ELEMENTWISE
    return any(
        issubclass(kind, base) and kind.step is base.step and kind._init_group is base._init_group for base in bases
    )


def _unsupported_reason(optimizer: Optimizer, original: type[Optimizer], elementwise: bool | None) -> str | None:
    """Return why an optimizer cannot be localized; None if it can."""
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return "its step method was replaced by something other than a learning rate scheduler; localize it before that"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True requires autograd through the parameters themselves"
    if elementwise is None:
        elementwise = _is_torch_elementwise(original)
    if elementwise:
        return None
    for kind in original.__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in REASONS:
            return REASONS[kind.__name__]
    return "it is not known to be elementwise; if it is, pass elementwise=True"


# ---------------------------------------------------------------- the class


def _localized(original: type[Optimizer]) -> type[Optimizer]:
    """Return the subclass of ``original`` that steps local tensors. See [Note: Localized optimizers]."""
    made: type[Optimizer] | None = vars(original).get(_SUBCLASS)
    if made is None:
        made = _subclass(original)
        setattr(original, _SUBCLASS, made)  # on the class itself, so that both have the same lifetime
    return made


def _subclass(original: type[Optimizer]) -> type[Optimizer]:
    @functools.wraps(getattr(original.step, "__wrapped__", original.step))
    def step(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # type: ignore[attr-defined] # as learning rate schedulers record steps
        returned = vars(self)[_STEP].step(self, *args, **kwargs)
        return returned if closure is None else loss

    @functools.wraps(original.__reduce_ex__)
    def reduce(self: Optimizer, protocol: Any) -> Any:
        return _rebuild, (original,), self.__getstate__()

    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce,
    }
    names["step"] = Optimizer.profile_hook_step(step)
    names["step"].hooked = names["step"]._wrapped_by_lr_sched = True  # no further wrappers of torch's are needed
    return type(original.__name__, (original,), names)


def _rebuild(original: type[Optimizer]) -> Optimizer:
    """Create an empty localized optimizer, for copying and unpickling."""
    optimizer = original.__new__(original)
    _attach(optimizer, original)
    return optimizer
