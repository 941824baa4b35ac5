"""Schedules of torch.distributed.pipelining that run backward in two parts.

[Note: Split backward]
Zero-bubble schedules compute the gradients of a stage's inputs and those of its weights apart. torch finds the weights'
places in the graph through ``module.parameters()``, and adds their gradients up by hand, outside of autograd. Between
forward and backward these are sharded parameters on fullshard, which no graph knows: without a word, no weight would
have a gradient. (The same happens on torch's own engine with ``reshard_after_forward=True``.) So the modules hold the
full ones while torch looks, and gradients are added up in the dtype that they are reduced in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fullshard
from fullshard.engine.ownership import nested_units
from fullshard.engine.unit import Unit

__all__ = ["SCHEDULES", "STAGE", "serve"]

STAGE = "torch.distributed.pipelining.stage"
SCHEDULES = "torch.distributed.pipelining.schedules"  # asks for names of FSDP while it is imported; needs STAGE


def serve(*, load: bool = False) -> Callable[[], None] | None:
    """Have stages find the full parameters, see [Note: Split backward].

    Args:
        load: Import torch's module if nobody has.

    Returns:
        What takes it back; None if the module is not there.
    """
    module = importlib.import_module(STAGE) if load else sys.modules.get(STAGE)
    stage: Any = getattr(module, "_PipelineStageBase", None)
    original = getattr(stage, "backward_maybe_with_nosync", None)
    if original is None:
        return None

    @functools.wraps(original)
    def backward_maybe_with_nosync(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        return _backward(self, original, kind, *args, **kwargs)

    stage.backward_maybe_with_nosync = backward_maybe_with_nosync
    return lambda: setattr(stage, "backward_maybe_with_nosync", original)


def _backward(stage: Any, original: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    module = stage.submod
    if kind not in ("input", "weight") or not isinstance(module, fullshard.FSDPModule):
        return original(stage, kind, *args, **kwargs)
    units = nested_units(module)
    with _full_registered(units), _added_up(units) if kind == "weight" else contextlib.nullcontext():
        return original(stage, kind, *args, **kwargs)


@contextlib.contextmanager
def _full_registered(units: list[Unit]) -> Iterator[None]:
    """``parameters()`` are the full ones, gathered or not: which they are is all that torch asks."""
    changed = [unit for unit in units if not unit.registration.full]
    for unit in changed:
        unit.settle_parameters()
        unit.registration.use_full()
    try:
        yield
    finally:
        for unit in changed:
            unit.use_sharded()


@contextlib.contextmanager
def _added_up(units: list[Unit]) -> Iterator[None]:
    """Gradients that are assigned to full parameters inside are added to those of earlier microbatches."""
    parameters = [p for unit in units for p in unit.parameters]
    for parameter in parameters:
        parameter.full.grad_dtype = parameter.full.dtype
    try:
        yield
    finally:
        for parameter in parameters:
            gradient, parameter.full.grad = parameter.full.grad, None
            parameter.keep_gradient()
            parameter.full.grad = None if gradient is None else gradient.to(parameter.full.grad_dtype)
            parameter.collect_gradient()
    for unit in units:  # of all of them: what is reduced must not depend on which gradients this rank has
        unit.progress.unreduced = True
        unit.gradients.note_trainable()
