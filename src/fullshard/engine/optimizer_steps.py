"""Mark unsharded parameters as out of date when an optimizer steps."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.engine.parameters.sharded import ShardedParameter, managed_by
from fullshard.engine.runtime import each_runtime, live_roots, runtime_of
from fullshard.engine.states import InnerBackward
from fullshard.engine.unaveraged import warn_of_unaveraged
from fullshard.engine.unit import Unit
from fullshard.progress import PROGRESS

__all__ = ["managed_parameters", "unshards_by_itself", "watch_optimizers"]


# Optimizers that unshard units during the step under way, and so have marked them out of date before.
unshards_by_itself: weakref.WeakSet[Optimizer] = weakref.WeakSet()


# By optimizer: the ids of all its parameters, and those of them that are managed.
_managed: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[ShardedParameter]]]]
_managed = weakref.WeakKeyDictionary()


def managed_parameters(optimizer: Optimizer) -> list[weakref.ref[ShardedParameter]]:
    """Return those of an optimizer's parameters that units own."""
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    known = _managed.get(optimizer)
    if known is None or known[0] != ids:
        managed = (managed_by(p) for group in optimizer.param_groups for p in group["params"])
        known = (ids, [weakref.ref(p) for p in managed if p is not None and p.owned])
        if len(known[1]) == len(ids):  # a wrapper may take the others later, and keeps the objects
            _managed[optimizer] = known
    return known[1]


def _units_of(optimizer: Optimizer) -> list[Unit]:
    """Return the units that have the optimizer's parameters now: wrapping may move a parameter to another unit."""
    parameters = (ref() for ref in managed_parameters(optimizer))
    units = (parameter.unit() for parameter in parameters if parameter is not None)
    return list({id(unit): unit for unit in units if unit is not None}.values())


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    PROGRESS.enter("optimizer step", None)
    warn_of_unaveraged(optimizer, live_roots)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Mark units out of date after a step of an optimizer that has their parameters.

    Only steps are seen, not other writes to sharded parameters, and so all ranks see the same ones; with a version
    counter they would not (an optimizer does not touch empty shards).
    """
    PROGRESS.leave("optimizer step")
    if optimizer in unshards_by_itself:
        unshards_by_itself.discard(optimizer)
        _count(_units_of(optimizer))
        return
    units = _units_of(optimizer)
    _count(units)
    for unit in units:
        unit.mark_out_of_date()
        if unit.registration.unsharded and unit.is_idle and not unit.user_unshards and not runtime_of(unit).busy:
            unit.reshard()
        if unit.inner_backward is InnerBackward.ENDED:  # its forward goes on, with what the step has made
            unit.reshard()
            runtime_of(unit).unshard(unit)


def _count(units: list[Unit]) -> None:
    stepped = {unit.ref for unit in units}
    for runtime in each_runtime(units):
        if runtime.largest_trained in stepped:
            runtime.steps.optimizer_stepped()
        for log, largest in runtime.largest_by_group.items():
            if largest in stepped:
                log.stepped()


@functools.cache
def watch_optimizers() -> None:
    """Have unsharded parameters marked out of date by the steps of all optimizers, by a hook on those of the process.

    ``FULLSHARD_WATCH_OPTIMIZERS=0`` in the environment leaves it out. Units whose parameters are still unsharded when
    an optimizer steps then compute with those from before the step until the user calls ``reshard()``.
    """
    if os.environ.get("FULLSHARD_WATCH_OPTIMIZERS", "1") != "0":
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
