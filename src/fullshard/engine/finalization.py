"""Gradients that the caller waits for, as torch 2.15 has it: ``set_manual_backward_finalization``."""

from __future__ import annotations

from fullshard.engine.runtime import Runtime, last_forward_first
from fullshard.errors import FullshardError, PhaseError

__all__ = ["awaits_finalization", "begin_finalization", "check_stepped", "end_finalization"]


def begin_finalization(runtime: Runtime) -> object:
    """Issue all reductions that backwards have left.

    Returns:
        What ``end_finalization`` is to be called with, once.
    """
    if runtime.has_failed:
        runtime.recover()
    runtime.check_finalized("finalize backward")
    if runtime.busy:
        raise PhaseError("finalize_backward: a forward or backward has not ended; call it after backward")
    left = [unit for unit in last_forward_first(runtime) if unit.gradients.unreduced]
    for unit in left:
        if unit.settings.requires_gradient_sync and not unit.settings.requires_all_reduce:
            raise FullshardError(
                f"finalize_backward: gradients of unit {unit.described} would not be all-reduced over the "
                "replicate axis; call set_requires_all_reduce(True) before"
            )
    try:
        for unit in left:
            runtime.finish_backward_of(unit, ran=False)
    except BaseException:  # of a collective
        runtime.recover()
        raise
    runtime.finalization = object()
    return runtime.finalization


def end_finalization(runtime: Runtime, begun: object) -> None:
    """Wait for the gradients, and end the backwards before.

    Raises:
        FullshardError: If a failure, or ``reset_iter_state``, has dropped the gradients since.
    """
    if runtime.finalization is not begun:
        raise FullshardError(
            "GradientReductionHandle.wait: the gradients were dropped since finalize_backward, by "
            "reset_iter_state or after an exception; repeat the step"
        )
    runtime.finalization, runtime.reached = None, True
    try:
        runtime.end_backwards()
    except BaseException:  # of a collective
        runtime.recover()
        raise


def awaits_finalization(runtime: Runtime) -> bool:
    """True if a backward runs, or what it has left was not waited for."""
    return runtime.busy or runtime.finalization is not None or runtime.reductions.in_flight


def check_stepped(runtime: Runtime) -> None:
    """Raise PhaseError if an optimizer steps before the caller has finalized a backward."""
    runtime.check_finalized("step the optimizer")
    root = runtime.root()
    finalized_by_caller = root is not None and root.settings.finalized_by_caller
    if finalized_by_caller and runtime.backward is None and runtime.reductions.in_flight:
        raise PhaseError(
            "cannot step the optimizer: gradients of a backward are in flight, and manual finalization is on; call "
            "finalize_backward() first"
        )
