"""torch's FSDP classes as bases of fullshard's, while fullshard stands in.

[Note: Kinship]
Programs may have kept torch's classes where nobody can bind them anew: in a tuple for ``isinstance``, in a closure. So
that these answer rightly about modules of fullshard, torch's ``FSDPModule``, ``ReplicateModule`` and
``FullyShardedDataParallel`` become the last bases of fullshard's classes of these names, through a class between them
that hides every attribute of torch's: what ``nn.Module`` has is ``nn.Module``'s again, and what is torch's alone raises
AttributeError. No method of torch's engine can run on a module of fullshard.

The other way round, torch's engine refuses to make anything new, see :class:`MixedEnginesError`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

import fullshard
from fullshard.dropin.errors import MixedEnginesError
from fullshard.wrap import annotate

__all__ = ["Kinship"]

INHERENT = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__new__"}


class _Hidden:
    """An attribute that is torch's alone."""

    _name: str

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"{self._name} belongs to torch's FSDP, and this is a module of fullshard")


class _Annotations:
    """What torch's ``wrap`` and ``enable_wrap`` read, for references to them that somebody has kept: fullshard's."""

    def __call__(self, **kwargs: Any) -> AbstractContextManager[None]:
        return annotate.enable_wrap(**kwargs)

    @property
    def in_autowrap_context(self) -> bool:
        """Whether an ``enable_wrap`` block is around."""
        return annotate._active.get() is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(annotate._active.get(), name)


class Kinship:
    """Bases added, and constructors that refuse."""

    _undo: list[Callable[[], None]]

    def __init__(self) -> None:
        self._undo = []

    def begin(self) -> None:
        """Make fullshard's classes subclasses of torch's, and stop torch's from making anything."""
        from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
        from torch.distributed.fsdp.wrap import enable_wrap

        for ours, theirs in (
            (fullshard.FSDPModule, FSDPModule),
            (fullshard.ReplicateModule, ReplicateModule),
            (fullshard.FullyShardedDataParallel, FullyShardedDataParallel),
        ):
            before, kin = ours.__bases__, _hiding(theirs)
            ours.__bases__ = (*before, kin)
            self._undo.append(lambda ours=ours, before=before: setattr(ours, "__bases__", before))  # type: ignore[misc]
        names = vars(sys.modules[enable_wrap.__module__])
        annotations = names["_ConfigAutoWrap"]
        names["_ConfigAutoWrap"] = _Annotations()
        self._undo.append(lambda: names.update(_ConfigAutoWrap=annotations))
        self._refuse(FSDPState, "fully_shard")
        self._refuse(FullyShardedDataParallel, "FullyShardedDataParallel")

    def _refuse(self, constructed: type, api: str) -> None:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise MixedEnginesError(
                f"torch's own {api} was called through a reference that was taken before fullshard.dropin.install(), "
                "in a place that install() cannot see (a tuple, a closure, a default); a model half of which each "
                f"engine shards cannot run. Call install() before that code is imported, or import {api} there anew"
            )

        before = constructed.__dict__["__init__"]
        constructed.__init__ = refuse  # type: ignore[misc]
        self._undo.append(lambda: setattr(constructed, "__init__", before))

    def end(self) -> None:
        """Undo it."""
        while self._undo:
            self._undo.pop()()


def _hiding(theirs: type) -> type:
    """A subclass of torch's class without any of its attributes. See [Note: Kinship]."""
    namespace: dict[str, Any] = {}
    for base in theirs.__mro__:
        if base in nn.Module.__mro__:
            continue
        for name in vars(base).keys() - INHERENT:
            known = hasattr(nn.Module, name)
            namespace[name] = inspect.getattr_static(nn.Module, name) if known else _Hidden(name)
    return type(f"{theirs.__name__}OfTorch", (theirs,), namespace)
