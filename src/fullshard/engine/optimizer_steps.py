"""Mark unsharded parameters as out of date when an optimizer steps, and find the sharded ones that it has to step."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from typing import Any, NamedTuple

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.engine.finalization import check_stepped
from fullshard.engine.ownership import superseding
from fullshard.engine.parameters.sharded import ShardedParameter, managed_by
from fullshard.engine.runtime import Runtime, each_runtime, live_roots, runtime_of
from fullshard.engine.states import InnerBackward
from fullshard.engine.unaveraged import warn_of_unaveraged
from fullshard.engine.unit import Unit, unit_owning
from fullshard.errors import FullshardError
from fullshard.progress import PROGRESS, LaunchLog

__all__ = ["stepped_units", "watch_optimizers"]


_UnitRef = weakref.ref[Unit]


class _Known(NamedTuple):
    """Valid while an optimizer has parameters with these ids, and nothing has been sharded since."""

    sharded: int
    ids: list[int]
    units: list[_UnitRef]  # that have some of the parameters


_largest: weakref.WeakKeyDictionary[Runtime, tuple[_UnitRef, dict[LaunchLog, _UnitRef]]] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_sharded = 0  # how often modules were sharded in this process
_stepping: weakref.WeakKeyDictionary[Optimizer, list[_UnitRef]] = weakref.WeakKeyDictionary()


def _times_sharded() -> int:
    return _sharded + ShardedParameter.superseded


def _known_of(optimizer: Optimizer) -> _Known | None:
    known = _known.get(optimizer)
    if known is None or known.sharded != _times_sharded():
        return None
    return known if known.ids == [id(p) for group in optimizer.param_groups for p in group["params"]] else None


def stepped_units(optimizer: Optimizer) -> list[Unit]:
    """Return the units that have some of the optimizer's parameters now: sharding may move one to another unit."""
    known = _known_of(optimizer)
    if known is None:
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = (unit_owning(managed) for managed in map(managed_by, every) if managed is not None)
        units = dict.fromkeys(unit.ref for unit in owners if unit is not None)
        known = _known[optimizer] = _Known(_times_sharded(), list(map(id, every)), list(units))
    return [unit for ref in known.units if (unit := ref()) is not None]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if _known_of(optimizer) is None:
        _take_sharded(optimizer)
        warn_of_unaveraged(optimizer, live_roots)
    PROGRESS.enter("optimizer step", None)
    units = stepped_units(optimizer)
    for runtime in each_runtime(units):
        check_stepped(runtime)
    _stepping[optimizer] = [unit.ref for unit in units]
    for unit in units:
        if unit.shown is not None and unit.is_idle and not unit.user_unshards and not runtime_of(unit).busy:
            unit.reshard()  # what users have written to what they saw is stepped


def _take_sharded(optimizer: Optimizer) -> None:
    """Replace unsharded parameters, and those that sharding has replaced, by the sharded ones: they get the gradients.

    It depends on what the optimizer was given and on its state, which are the same on all ranks.

    Raises:
        FullshardError: If it is not certain that the optimizer would have been given the sharded ones.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = set(map(id, every))
    found = {
        id(p): (p, managed)
        for p in every
        if (managed := superseding(p)) is not None and id(managed.optimized) not in ids  # else the old one is idle
    }
    if not found:
        return
    names = [managed.describe() for _, managed in found.values()]
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    what = (
        f"{type(optimizer).__name__} was given parameters that get no gradients: {some}. They were taken before "
        "sharding has replaced them, or while they were unsharded"
    )
    targets = {id(managed.optimized) for _, managed in found.values()}
    for parameter, managed in found.values():
        if optimizer.state.get(parameter):
            why = f"it has state for {managed.fqn} already"
        elif managed.optimized is not managed.sharded or parameter.shape != managed.placement.shape:
            why = f"{managed.fqn} is a part of a flat parameter (use_orig_params=False)"
        elif parameter.grad is not None:
            why = f"{managed.fqn} has a gradient of its own, from before sharding or from a module that is not sharded"
        elif len(targets) < len(found):
            why = "it was given several objects in place of one"
        else:
            continue
        raise FullshardError(
            f"{what}. The sharded ones cannot take their place: {why}. Build the optimizer from the parameters of the "
            "sharded model, outside of its forward"
        )
    for group in optimizer.param_groups:
        group["params"] = [found[id(p)][1].sharded if id(p) in found else p for p in group["params"]]
    warnings.warn(
        f"{what}. The optimizer steps the sharded parameters instead, which it should have been built from: lists of "
        "parameters that you have made elsewhere, such as for clipping, hold the old ones still",
        stacklevel=4,
    )


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Mark units out of date after a step of an optimizer that has their parameters.

    Only steps are seen, not other writes to sharded parameters, and so all ranks see the same ones; with a version
    counter they would not (an optimizer does not touch empty shards).
    """
    PROGRESS.leave("optimizer step")
    units = [unit for unit in (ref() for ref in _stepping.pop(optimizer, ())) if unit is not None]
    _count(units)
    for unit in units:
        unit.mark_out_of_date()
        if unit.inner_backward is InnerBackward.ENDED:  # its forward goes on, with what the step has made
            unit.reshard()
            runtime_of(unit).unshard(unit)


def _count(units: list[Unit]) -> None:
    stepped = {unit.ref for unit in units}
    for runtime in each_runtime(units):
        largest, by_log = _largest.get(runtime) or _largest.setdefault(runtime, _largest_units(runtime.units()))
        if largest in stepped:
            runtime.steps.optimizer_stepped()
        for log, largest_of_group in by_log.items():
            if largest_of_group in stepped:
                log.stepped()


def _largest_units(units: list[Unit]) -> tuple[_UnitRef, dict[LaunchLog, _UnitRef]]:
    """Return the unit with most elements that are trained, and that of those that communicate in each process group.

    The first may be another one on other ranks, as an expert; the others, by the log of the group, are not.
    """
    sizes = {unit.ref: sum(p.shape.numel for p in unit.parameters if p.requires_grad) for unit in units}
    by_log: dict[LaunchLog, list[_UnitRef]] = {}
    for unit in units:
        for log in (unit.mesh.transport.log, unit.mesh.replica_transport.log):
            if log is not None:
                by_log.setdefault(log, []).append(unit.ref)
    return max(sizes, key=sizes.__getitem__), {log: max(refs, key=sizes.__getitem__) for log, refs in by_log.items()}


def watch_optimizers() -> None:
    """Have unsharded parameters marked out of date by the steps of all optimizers, by a hook on those of the process.

    Called whenever modules are sharded. ``FULLSHARD_WATCH_OPTIMIZERS=0`` in the environment leaves it out. Units whose
    parameters are still unsharded when an optimizer steps then compute with those from before the step until the user
    calls ``reshard()``.
    """
    global _sharded  # as the hooks are the process's
    _sharded += 1
    _add_hooks()


@functools.cache
def _add_hooks() -> None:
    if os.environ.get("FULLSHARD_WATCH_OPTIMIZERS", "1") != "0":
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
