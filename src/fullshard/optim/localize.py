"""Stock optimizers that step plain local tensors, or runs of them, in place of DTensors. See [Note: Localised].

[Note: Localised]
A localised optimizer is the same object with another class: one made from its own, of the same name, that overrides
``step`` and ``_init_group`` and nothing else. The user's view of it is therefore not imitated: ``param_groups``,
``state`` and what torch makes of them are the optimizer's own, and only while its arithmetic runs do they stand back
for those of the pieces. An object with parameters of its own, kept in step with the user's, was the alternative: every
method that reads or writes state would have had to be translated, those of libraries included.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

from fullshard.optim.local_step import LocalStep

__all__ = ["delocalize", "local_step_of", "localize"]

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
    "LBFGS": "it works on all parameters as one vector, with inner products over them",
    "Adafactor": "it keeps means over rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients only",
}

_SUBCLASS, _ORIGINAL = "_fullshard_localized", "_fullshard_original"  # attributes of classes
_STEP = "_fullshard_local_step"  # attribute of a localised optimizer


def localize(optimizer: _O, *, flatten: bool = True, elementwise: bool | None = None) -> _O:
    """Have an optimizer step plain local tensors from now on, in place of the DTensors that it was built from.

    The results are the same, bit for bit with the same of torch's implementations (``foreach``, ``fused`` or neither;
    where none is asked for, torch takes ``foreach`` for plain tensors on a GPU and never for DTensors). What it costs
    is no longer a matter of DTensor's dispatch. Everything else stays as it is: ``param_groups``, ``state``,
    ``state_dict()``, hooks, schedulers, scalers, copies, files.

    Args:
        optimizer: A ``torch.optim`` optimizer over parameters of :func:`fullshard.fully_shard` models or wrappers,
            and any others. With or without state; changed in place.
        flatten: Whether parameters that lie next to each other in a shard buffer, in the same group and with
            gradients that lie likewise, are stepped as one flat tensor.
        elementwise: Whether each element of a parameter is stepped by itself, from the same element of gradient and
            state and from numbers. None: that is known of torch's own classes, and of subclasses that change neither
            ``step`` nor ``_init_group``. True: the caller vouches for it; all that the optimizer reads and writes
            has to be in ``param_groups`` and ``state``.

    Returns:
        The same object. If it cannot be localised it is left as it is, with a warning that says why.

    Raises:
        TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"localize: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    original: type[Optimizer] = _original(type(optimizer))
    reason = None if _STEP in vars(optimizer) else _reason_against(optimizer, original, elementwise)
    if reason is not None:
        warnings.warn(f"localize: {original.__name__} is left as it is: {reason}", stacklevel=2)
    else:
        _attach(optimizer, original, flatten=flatten)
    return optimizer


def delocalize(optimizer: _O) -> _O:
    """Undo :func:`localize`. The state stays.

    Args:
        optimizer: Any; one that is not localised stays as it is.

    Returns:
        The same object.
    """
    if _STEP in vars(optimizer):
        del vars(optimizer)[_STEP]
        watched = _unwatch(optimizer)
        optimizer.__class__ = _original(type(optimizer))  # type: ignore[assignment]
        if watched:
            _watch(optimizer)
    return optimizer


def local_step_of(optimizer: Optimizer) -> LocalStep | None:
    """How a localised optimizer steps; None for others."""
    step: LocalStep | None = vars(optimizer).get(_STEP)
    return step


def _attach(optimizer: Optimizer, original: type[Optimizer], *, flatten: bool) -> None:
    inner = original.step
    inner = getattr(inner, "__wrapped__", inner) if getattr(inner, "hooked", False) else inner
    before = local_step_of(optimizer)
    made = vars(optimizer)[_STEP] = LocalStep(inner, flatten=flatten, is_known=_is_known(original))
    made.in_parts = None if before is None else before.in_parts
    watched = _unwatch(optimizer)
    optimizer.__class__ = _localized(original)
    if watched:
        _watch(optimizer)


def _is_known(kind: type[Any]) -> bool:
    """Whether its arithmetic is that of one of torch's elementwise optimizers."""
    bases: tuple[type[Any], ...] = ELEMENTWISE
    return any(
        issubclass(kind, base) and kind.step is base.step and kind._init_group is base._init_group for base in bases
    )


def _reason_against(optimizer: Optimizer, original: type[Optimizer], elementwise: bool | None) -> str | None:
    """Why an optimizer cannot be localised."""
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return "something else than a learning rate scheduler has replaced its step method; localize it before that"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "with differentiable=True, autograd has to see the parameters themselves"
    if elementwise is None:
        elementwise = _is_known(original)
    if elementwise:
        return None
    for kind in original.__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in REASONS:
            return REASONS[kind.__name__]
    return "it is not known to step each element by itself; if it does, pass elementwise=True"


# ---------------------------------------------------------------- the class


def _localized(original: type[Optimizer]) -> type[Optimizer]:
    """The subclass of ``original`` that steps pieces. See [Note: Localised]."""
    made: type[Optimizer] | None = vars(original).get(_SUBCLASS)
    if made is None:
        made = _subclass(original)
        setattr(original, _SUBCLASS, made)  # not in a table of ours: the two live and die together
    return made


def _subclass(original: type[Optimizer]) -> type[Optimizer]:
    @functools.wraps(getattr(original.step, "__wrapped__", original.step))
    def step(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        returned = vars(self)[_STEP].step(self, *args, **kwargs)
        return returned if closure is None else loss

    @functools.wraps(original.__reduce_ex__)
    def reduce(self: Optimizer, protocol: Any) -> Any:
        return _rebuild, (original, vars(self)[_STEP].flatten), self.__getstate__()

    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce,
        _ORIGINAL: original,
    }
    if hasattr(original, "_init_group"):
        own: Any = original

        def fill(self: Optimizer, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
            local: LocalStep | None = vars(self).get(_STEP)
            if local is None or named or len(lists) < 2:
                return own._init_group(self, group, *lists, **named)
            return local.fill(group, lists, functools.partial(own._init_group, self))

        names["_init_group"] = fill
    names["step"] = Optimizer.profile_hook_step(step)
    names["step"].hooked = True  # as torch marks those that call hooks
    return type(original.__name__, (original,), names)


def _original(kind: type[Any]) -> type[Optimizer]:
    original: type[Optimizer] = vars(kind).get(_ORIGINAL, kind)
    return original


def _rebuild(original: type[Optimizer], flatten: bool) -> Optimizer:
    """For copies and files: a localised optimizer that has nothing yet."""
    optimizer = original.__new__(original)
    _attach(optimizer, original, flatten=flatten)
    return optimizer


# ---------------------------------------------------------------- learning rate schedulers


def _unwatch(optimizer: Optimizer) -> bool:
    """Take off what a learning rate scheduler has put over the step method, which keeps calling the old one."""
    return vars(optimizer).pop("step", None) is not None


def _watch(optimizer: Optimizer) -> None:
    """Put its like over the new one: schedulers want to know whether a step came before theirs."""
    ref, called = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(called)
    def step(*args: Any, **kwargs: Any) -> Any:
        found: Any = ref()
        found._opt_called = True
        return called(found, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # what they look for
    vars(optimizer)["step"] = step
