"""Exceptions for errors at run time.

Invalid arguments raise ``ValueError`` or ``TypeError`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "FullshardError",
    "NonFiniteError",
    "PhaseError",
    "TiedParameterError",
    "UnmaterializedParameterError",
]


class FullshardError(RuntimeError):
    """Base class of all errors at run time."""


class CheckpointError(FullshardError):
    """A checkpoint or file of weights cannot be written or read, or does not match the model."""


class NonFiniteError(FullshardError):
    """A norm is NaN or infinite.

    Attributes:
        names: The gradients or other tensors that are not finite; empty if all are, and only their norm overflows.
    """

    names: tuple[str, ...]

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class PhaseError(FullshardError):
    """An operation on a unit is not allowed in its current phase."""


class TiedParameterError(FullshardError):
    """A parameter is shared by units that have no common ancestor unit."""


class UnmaterializedParameterError(FullshardError):
    """Parameters were still on the meta device when the model was run."""
