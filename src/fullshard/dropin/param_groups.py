"""Views on units with the interface of torch's ``FSDPParamGroup``, whose methods may be patched.

[Note: Patched parameter groups]
Tests of device back ends patch methods of torch's ``FSDPParamGroup`` with functions that record the call and call the
original. Here that class is a view, and the engine does not call its methods. So a patch of one of them also patches
the engine's method that does the same: the patch is called with a view on the unit, and when it calls the original,
that runs the engine's method. Without a patch the engine is not changed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

from fullshard.engine.runtime import Runtime, runtime_of
from fullshard.engine.states import Phase
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError

__all__ = ["FSDPParamGroup", "ShardedState", "TrainingState", "WrapperTrainingState", "unpatch"]

# Methods of the view, and the engine's methods that do the same.
ENGINE_METHODS: dict[str, tuple[type, str]] = {
    "unshard": (Unit, "prepare_unshard"),
    "reshard": (Unit, "reshard"),
    "post_backward": (Runtime, "reshard_and_reduce"),
}


class TrainingState(enum.Enum):
    """Training state of a unit, as torch's enum."""

    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()
    IDLE = enum.auto()


class ShardedState(enum.Enum):
    """State of the registered parameters, as torch's enum."""

    SHARDED = enum.auto()
    SHARDED_POST_FORWARD = enum.auto()
    UNSHARDED = enum.auto()


class WrapperTrainingState(enum.Enum):
    """Training state of a wrapper, as torch's FSDP1 enum."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class _Patchable(type):
    """Metaclass that applies patches of methods to the engine, see [Note: Patched parameter groups]."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in ENGINE_METHODS:
            _patch_engine(name, None if value is _originals[name] else value)
        type.__setattr__(cls, name, value)


class FSDPParamGroup(metaclass=_Patchable):
    """View on a unit: the parameters that are unsharded and reduced together."""

    _unit: Unit
    _engine: Callable[[], Any] | None  # the engine's call that a patch intercepts

    def __init__(self, unit: Unit, engine: Callable[[], Any] | None = None) -> None:
        self._unit, self._engine = unit, engine

    @property
    def _module_fqn(self) -> str:
        return self._unit.name

    @property
    def _training_state(self) -> TrainingState:
        if self._unit.phase is Phase.FORWARD:
            return TrainingState.FORWARD
        return TrainingState.PRE_BACKWARD if self._unit.phase.is_backward else TrainingState.IDLE

    @property
    def _sharded_state(self) -> ShardedState:
        return ShardedState.UNSHARDED if self._unit.registration.unsharded else ShardedState.SHARDED

    @property
    def is_sharded(self) -> bool:
        """True if modules hold the sharded parameters."""
        return not self._unit.registration.unsharded

    @property
    def is_unsharded(self) -> bool:
        """True if modules hold the unsharded parameters."""
        return self._unit.registration.unsharded

    @property
    def _all_gather_result(self) -> Unit | None:
        return self._unit if self._unit.is_unsharded and not self._unit.registration.unsharded else None

    def unshard(self, async_op: bool = False) -> Any:
        """Issue the all-gather; ``wait_for_unshard`` registers the parameters."""
        return runtime_of(self._unit).begin_unshard([self._unit]) if self._engine is None else self._engine()

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and register the unsharded parameters."""
        runtime_of(self._unit).unshard(self._unit)

    def reshard(self) -> Any:
        """Free the unsharded parameters and register the sharded ones."""
        return self._unit.reshard() if self._engine is None else self._engine()

    def post_backward(self, *_: Any) -> Any:
        """Reduce unreduced gradients, and reshard unless ``reshard_after_backward`` is off."""
        if self._engine is not None:
            return self._engine()
        runtime = runtime_of(self._unit)
        runtime.finish_reductions()
        runtime.reduce_unreduced(self._unit)
        if self._unit.settings.reshard_after_backward and self._unit.is_idle:
            self._unit.reshard()
        return None

    @contextlib.contextmanager
    def use_training_state(self, training_state: TrainingState) -> Iterator[None]:
        """Raise FullshardError; dynamo compares functions with this one."""
        raise FullshardError("use_training_state is internal to torch's FSDP; fullshard's units track their own phase")
        yield


_originals: dict[str, Any] = {name: vars(FSDPParamGroup)[name] for name in ENGINE_METHODS}
_engines: dict[str, Any] = {name: vars(owner)[method] for name, (owner, method) in ENGINE_METHODS.items()}


def unpatch() -> None:
    """Restore the methods of the view and of the engine."""
    for name, original in _originals.items():
        setattr(FSDPParamGroup, name, original)


def _patch_engine(name: str, patch: Callable[..., Any] | None) -> None:
    """Make the engine's method for ``name`` of the view call ``patch``; None: restore it."""
    owner, method_name = ENGINE_METHODS[name]
    method = _engines[name]
    if patch is None:
        setattr(owner, method_name, method)
        return

    @functools.wraps(method)
    def patched(*args: Any, **kwargs: Any) -> Any:
        unit = next(each for each in args if isinstance(each, Unit))
        done: list[Any] = []

        def engine() -> None:
            done.append(method(*args, **kwargs))

        patch(FSDPParamGroup(unit, engine))
        return done[0] if done else method(*args, **kwargs)  # even if the patch does not call the original

    setattr(owner, method_name, patched)
