"""States of a unit: what computes with it, where its parameters are, and what its gradients wait for.

Phases and states of parameters have a table of legal moves each, and ``Unit`` makes no other.
"""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fullshard.engine import hooks

__all__ = ["GradientState", "InnerBackward", "OpenForward", "ParameterState", "Phase"]


class Phase(enum.Enum):
    """The computation that a unit takes part in."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    # Reached through the gradients of its inputs; it ends with the pass, see [Note: Double backward].
    DOUBLE_BACKWARD = "double backward"

    is_backward: bool  # of either kind
    legal_moves: tuple[Phase, ...]


class ParameterState(enum.Enum):
    """State of the parameters of a unit in memory."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"  # or their all-gather is in flight
    KEPT = "kept for backward"  # still unsharded after a forward; the next forward all-gathers again
    OUT_OF_DATE = "out of date"  # unsharded, and an optimizer has stepped the shards since
    SUMMONED = "summoned"  # sharded, and the modules hold copies of the unsharded ones

    is_unsharded: bool  # the unsharded parameters have memory
    legal_moves: tuple[ParameterState, ...]


class GradientState(enum.Enum):
    """State of a unit's unsharded gradients: none, unreduced, or reduced."""

    NONE = "none"
    UNREDUCED = "unreduced"  # a backward left some: one without gradient sync, or the first of several calls
    REDUCED = "reduced"  # their reduction has begun in the backward pass that runs


_PHASES = {
    Phase.IDLE: (Phase.FORWARD, Phase.BACKWARD, Phase.DOUBLE_BACKWARD),
    # Back to backward: checkpointed activations are recomputed inside of it.
    Phase.FORWARD: (Phase.IDLE, Phase.BACKWARD, Phase.DOUBLE_BACKWARD),
    Phase.BACKWARD: (Phase.IDLE, Phase.FORWARD, Phase.DOUBLE_BACKWARD),
    Phase.DOUBLE_BACKWARD: (Phase.IDLE, Phase.FORWARD),
}
_PARAMETER_STATES = {
    ParameterState.SHARDED: (ParameterState.UNSHARDED, ParameterState.SUMMONED),
    ParameterState.UNSHARDED: (ParameterState.SHARDED, ParameterState.KEPT, ParameterState.OUT_OF_DATE),
    ParameterState.KEPT: (ParameterState.SHARDED, ParameterState.UNSHARDED, ParameterState.OUT_OF_DATE),
    ParameterState.OUT_OF_DATE: (ParameterState.SHARDED,),
    ParameterState.SUMMONED: (ParameterState.SHARDED,),
}
# On the members: a dictionary would call the hash function of enums, which is slow, several times per unit and step.
for _phase, _next_phases in _PHASES.items():
    _phase.legal_moves = _next_phases
    _phase.is_backward = _phase in (Phase.BACKWARD, Phase.DOUBLE_BACKWARD)
for _state, _next_states in _PARAMETER_STATES.items():
    _state.legal_moves = _next_states
    _state.is_unsharded = _state not in (ParameterState.SHARDED, ParameterState.SUMMONED)


class InnerBackward(enum.Enum):
    """The backward pass inside of an open forward, see [Note: Steps inside a forward]."""

    NONE = enum.auto()
    RUNS = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class OpenForward:
    """A forward of a unit that has begun and not returned."""

    resumes: Phase  # the phase that the unit goes back to
    first_node: int  # autograd nodes that there were when it began
    call: hooks.Call | None = None  # sees the end of its backward; None: no input requires a gradient
    inner_backward: InnerBackward = InnerBackward.NONE
    context: AbstractContextManager[object] | None = None  # around what the module itself computes

    def enter(self, context: AbstractContextManager[object]) -> None:
        """Enter the context that is around what the module itself computes."""
        context.__enter__()
        self.context = context

    def leave(self) -> None:
        """Leave that context, if it was entered and not left."""
        context, self.context = self.context, None
        if context is not None:
            context.__exit__(None, None, None)
