"""Units in the words of torch's FSDP2: parameter groups and what they are doing, also to be patched by tests.

[Note: Patched parameter groups]
Tests of device back ends replace methods of torch's ``FSDPParamGroup`` by functions that note the call and call the
original. Here that class is a view, whose methods nobody in the engine calls. So what is put in the place of one of
them is put, wrapped, in the place of the method of ``Unit`` that does the same: it is called with a view on the unit,
and when it calls the original, that does what the engine was about to do. Nothing is in between while nothing is
patched.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

from fullshard.engine.progress import Phase
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError

__all__ = ["FSDPParamGroup", "ShardedState", "TrainingState", "WrapperTrainingState", "unpatch"]

# Methods of the view, and those of units that do the same when the engine calls them.
DONE_BY = {"unshard": "begin_gather", "reshard": "reshard", "post_backward": "finish_backward"}


class TrainingState(enum.Enum):
    """What a unit is doing, in torch's words."""

    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()
    IDLE = enum.auto()


class ShardedState(enum.Enum):
    """Which of a parameter's faces its module holds, in torch's words."""

    SHARDED = enum.auto()
    SHARDED_POST_FORWARD = enum.auto()
    UNSHARDED = enum.auto()


class WrapperTrainingState(enum.Enum):
    """What a wrapper is doing, in torch's words."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class _Patchable(type):
    """See [Note: Patched parameter groups]."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in DONE_BY:
            _have_units_call(DONE_BY[name], None if value is _originals[name] else value)
        type.__setattr__(cls, name, value)


class FSDPParamGroup(metaclass=_Patchable):
    """A view on a unit: the parameters that are gathered and reduced together."""

    _unit: Unit
    _engine: Callable[[], Any] | None  # what the engine was about to do, see [Note: Patched parameter groups]

    def __init__(self, unit: Unit, engine: Callable[[], Any] | None = None) -> None:
        self._unit, self._engine = unit, engine

    @property
    def _module_fqn(self) -> str:
        return self._unit.name

    @property
    def _training_state(self) -> TrainingState:
        if self._unit.phase is Phase.FORWARD:
            return TrainingState.FORWARD
        return TrainingState.PRE_BACKWARD if self._unit.phase is Phase.BACKWARD else TrainingState.IDLE

    @property
    def _sharded_state(self) -> ShardedState:
        return ShardedState.UNSHARDED if self._unit.registration.full else ShardedState.SHARDED

    @property
    def is_sharded(self) -> bool:
        """Whether modules hold the sharded parameters."""
        return not self._unit.registration.full

    @property
    def is_unsharded(self) -> bool:
        """Whether modules hold the full parameters."""
        return self._unit.registration.full

    @property
    def _all_gather_result(self) -> Unit | None:
        return self._unit if self._unit.gathered and not self._unit.registration.full else None

    def unshard(self, async_op: bool = False) -> Any:
        """Gather; ``wait_for_unshard`` registers."""
        return self._unit.gather() if self._engine is None else self._engine()

    def wait_for_unshard(self) -> None:
        """Register the full parameters."""
        self._unit.use_full()

    def reshard(self) -> Any:
        """Free the full parameters."""
        return self._unit.reshard() if self._engine is None else self._engine()

    def post_backward(self, *_: Any) -> Any:
        """Reduce what microbatches have left, and free the full parameters if they are to be."""
        if self._engine is not None:
            return self._engine()
        if self._unit.schedule is not None:
            self._unit.schedule.finish_reductions()
        self._unit.synchronize()
        if self._unit.settings.reshard_after_backward and self._unit.resting:
            self._unit.reshard()
        return None

    @contextlib.contextmanager
    def use_training_state(self, training_state: TrainingState) -> Iterator[None]:
        """What dynamo compares functions with. Units have phases of their own, which nobody sets from outside."""
        raise FullshardError("use_training_state sets the phase of torch's engine; fullshard's units set their own")
        yield


_originals: dict[str, Any] = {name: vars(FSDPParamGroup)[name] for name in DONE_BY}
_engines: dict[str, Any] = {name: vars(Unit)[name] for name in DONE_BY.values()}


def unpatch() -> None:
    """Have the view and units their own methods again, whatever was put in their place."""
    for name, original in _originals.items():
        setattr(FSDPParamGroup, name, original)


def _have_units_call(name: str, patch: Callable[..., Any] | None) -> None:
    """Put ``patch`` around a method of units; None: take it off."""
    method = _engines[name]
    if patch is None:
        setattr(Unit, name, method)
        return

    @functools.wraps(method)
    def patched(unit: Unit, *args: Any, **kwargs: Any) -> Any:
        done: list[Any] = []

        def engine() -> None:
            done.append(method(unit, *args, **kwargs))

        patch(FSDPParamGroup(unit, engine))
        return done[0] if done else method(unit, *args, **kwargs)  # what the engine needs is never left out

    setattr(Unit, name, patched)
