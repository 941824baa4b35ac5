"""Makes fullshard's classes subclasses of torch's FSDP classes, while the drop-in is installed.

[Note: Torch's classes as bases]
Programs may refer to torch's classes where they cannot be rebound: in a tuple for ``isinstance``, in a closure. So that
``isinstance`` is True for modules of fullshard, torch's ``FSDPModule``, ``ReplicateModule`` and
``FullyShardedDataParallel`` become the last bases of fullshard's classes of these names, through a class between them
that hides every attribute of torch's: attributes of ``nn.Module`` are ``nn.Module``'s again, and others raise
AttributeError. No method of torch's engine can run on a module of fullshard.

Constructors of torch's engine raise ``MixedEnginesError``.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

import fullshard
from fullshard.dropin.errors import MixedEnginesError
from fullshard.dropin.patches import replace
from fullshard.wrap import annotate

__all__ = ["take_torch_bases"]

INHERENT = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__new__"}


class _HiddenAttribute:
    """Descriptor of an attribute that only torch's class has: raises AttributeError."""

    _name: str

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"{self._name} is an attribute of torch's FSDP, but this module is sharded by fullshard")


class _Annotations:
    """Replaces the class that torch's ``wrap`` and ``enable_wrap`` read, for references taken before ``install()``."""

    def __call__(self, **kwargs: Any) -> AbstractContextManager[None]:
        return annotate.enable_wrap(**kwargs)

    @property
    def in_autowrap_context(self) -> bool:
        """True inside of an ``enable_wrap`` block."""
        return annotate._active.get() is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(annotate._active.get(), name)


def take_torch_bases(undo: contextlib.ExitStack) -> None:
    """Make fullshard's classes subclasses of torch's, and make torch's constructors raise, until ``undo`` is closed."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.fsdp.wrap import enable_wrap

    for ours, theirs in (
        (fullshard.FSDPModule, FSDPModule),
        (fullshard.ReplicateModule, ReplicateModule),
        (fullshard.FullyShardedDataParallel, FullyShardedDataParallel),
    ):
        undo.callback(setattr, ours, "__bases__", ours.__bases__)
        ours.__bases__ = (*ours.__bases__, _without_attributes(theirs))
    replace(undo, sys.modules[enable_wrap.__module__], "_ConfigAutoWrap", _Annotations())
    for constructed, api in ((FSDPState, "fully_shard"), (FullyShardedDataParallel, "FullyShardedDataParallel")):
        replace(undo, constructed, "__init__", _refusing(api))


def _refusing(api: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise MixedEnginesError(
            f"torch's own {api} was called through a reference that was taken before fullshard.dropin.install() and "
            "that install() cannot replace (in a tuple, a closure or a default argument); a model cannot be sharded by "
            f"both engines. Call install() before that code is imported, or import {api} again there"
        )

    return refuse


def _without_attributes(theirs: type) -> type:
    """Make a subclass of torch's class that hides its attributes, see [Note: Torch's classes as bases]."""
    namespace: dict[str, Any] = {}
    for base in theirs.__mro__:
        if base in nn.Module.__mro__:
            continue
        for name in vars(base).keys() - INHERENT:
            known = hasattr(nn.Module, name)
            namespace[name] = inspect.getattr_static(nn.Module, name) if known else _HiddenAttribute(name)
    return type(f"{theirs.__name__}OfTorch", (theirs,), namespace)
