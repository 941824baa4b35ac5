"""Support for zero-bubble schedules of torch.distributed.pipelining.

[Note: Split backward]
Zero-bubble schedules compute the gradients of a stage's inputs and of its weights separately. torch finds the weights
in the graph through ``module.parameters()``, and accumulates their gradients itself, outside of autograd. On fullshard
these are sharded parameters between forward and backward, which are not in the graph: weights would silently get no
gradient. (The same happens on torch's own engine with ``reshard_after_forward=True``.) So the unsharded parameters are
registered during these calls, and gradients accumulate in the reduce dtype.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fullshard
from fullshard.dropin.patches import replace
from fullshard.engine.ownership import nested_units
from fullshard.engine.runtime import runtime_of
from fullshard.engine.unit import Unit

__all__ = ["SCHEDULES", "STAGE", "patch_stages"]

STAGE = "torch.distributed.pipelining.stage"
SCHEDULES = "torch.distributed.pipelining.schedules"  # imports names of FSDP, and STAGE before that


def patch_stages(undo: contextlib.ExitStack, *, load: bool = False) -> bool:
    """Patch pipeline stages to see the unsharded parameters, see [Note: Split backward].

    Args:
        undo: Restores them when it is closed.
        load: Import torch's module if it is not loaded.

    Returns:
        True if they were patched: the module is loaded, and has such a method.
    """
    module = importlib.import_module(STAGE) if load else sys.modules.get(STAGE)
    stage: Any = getattr(module, "_PipelineStageBase", None)
    original = getattr(stage, "backward_maybe_with_nosync", None)
    if original is None:
        return False

    @functools.wraps(original)
    def backward_maybe_with_nosync(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        return _backward(self, original, kind, *args, **kwargs)

    replace(undo, stage, "backward_maybe_with_nosync", backward_maybe_with_nosync)
    return True


def _backward(stage: Any, original: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    module = stage.submod
    if kind not in ("input", "weight") or not isinstance(module, fullshard.FSDPModule):
        return original(stage, kind, *args, **kwargs)
    units = nested_units(module)
    with _unsharded_registered(units), _accumulating(units) if kind == "weight" else contextlib.nullcontext():
        return original(stage, kind, *args, **kwargs)


@contextlib.contextmanager
def _unsharded_registered(units: list[Unit]) -> Iterator[None]:
    """Register the unsharded parameters, all-gathered: torch needs their identity, and nodes of weights read others."""
    changed = [(unit, unit.is_unsharded) for unit in units if not unit.registration.unsharded]
    for unit, _ in changed:
        runtime_of(unit).begin_unshard([unit])
        unit.wait_for_unshard()
    try:
        yield
    finally:
        for unit, was_unsharded in changed:
            if was_unsharded:
                unit.register_sharded()
            elif unit.is_idle:
                unit.reshard()


@contextlib.contextmanager
def _accumulating(units: list[Unit]) -> Iterator[None]:
    """Accumulate gradients that torch assigns to unsharded parameters inside, as backward without sync does."""
    parameters = [p for unit in units for p in unit.parameters]
    for parameter in parameters:
        parameter.unsharded.grad_dtype = parameter.unsharded.dtype
    try:
        yield
    finally:
        for parameter in parameters:
            gradient, parameter.unsharded.grad = parameter.unsharded.grad, None
            parameter.accumulate_in_reduce_dtype()
            parameter.unsharded.grad = None if gradient is None else gradient.to(parameter.unsharded.grad_dtype)
            parameter.collect_gradient()
    for unit in units:  # all of them: which units are reduced must not depend on the gradients of this rank
        unit.gradients.expect_more()
