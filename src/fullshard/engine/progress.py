"""What a unit is in the middle of."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from fullshard.engine import hooks

__all__ = ["LEGAL_MOVES", "Phase", "Progress"]


class Phase(enum.Enum):
    """Resting, or in which kind of computation."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


LEGAL_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.RESTING: frozenset({Phase.FORWARD, Phase.BACKWARD}),
    # Back to backward: recomputation of checkpointed activations runs forwards inside the backward.
    Phase.FORWARD: frozenset({Phase.RESTING, Phase.BACKWARD}),
    Phase.BACKWARD: frozenset({Phase.RESTING, Phase.FORWARD}),
}


@dataclass(slots=True)
class Progress:
    """Where a unit stands between two moments of rest."""

    # Open ones: the phase that each returns to, and how many autograd nodes there were when it began.
    forwards: list[tuple[Phase, int]] = field(default_factory=list)
    calls: list[hooks.Call] = field(default_factory=list)  # forwards whose backward may still come
    ran: dict[int, bool] = field(default_factory=dict)  # which of several modules, by id, ran in this forward with grad
    kept: bool = False  # whether the full parameters stay from a forward whose backward may still come
    unreduced: bool = False  # whether a backward without sync, or the first part of one, left gradients
    reduced: bool = False  # whether its gradients were reduced in this backward
    awaits: bool = False  # whether a forward has ended whose backward has not begun
    guarded: bool = False  # whether an input of the last forward tells when its backward is over
    open_ended: bool = False  # whether a forward with a backward had no such input
    in_double_backward: bool = False  # whether the pass that runs came through gradients of its inputs
    encloses: bool = False  # whether a backward pass that fills gradients runs inside of its open forward
    stepped: bool = False  # whether one has ended there
    summoned: bool = False  # whether the modules hold copies, see FullCopies
    copied: bool = False  # and this rank's do: with rank0_only others hold their shards
    held: int = 0  # how often `hold` was called more than `release`
