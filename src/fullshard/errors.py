"""Exceptions for errors at run time; invalid arguments raise ``ValueError`` or ``TypeError`` instead."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "FullshardError",
    "NonFiniteError",
    "PhaseError",
    "ReplicaError",
    "TiedParameterError",
    "UnmaterializedParameterError",
]


class FullshardError(RuntimeError):
    """Base class of all errors at run time."""


class CheckpointError(FullshardError):
    """Raised when a checkpoint or weight file cannot be written or read, or does not match the model."""


class NonFiniteError(FullshardError):
    """Raised when a norm is NaN or infinite.

    Attributes:
        names: Names of the gradients or other tensors that are not finite. Empty if all are finite and only their norm
            overflows.
    """

    names: tuple[str, ...]

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class PhaseError(FullshardError):
    """Raised when an operation on a unit is not allowed in its current phase, such as in the middle of a step."""


class ReplicaError(FullshardError):
    """Raised when replicas that should hold the same bits do not.

    Attributes:
        names: FQNs of the parameters or buffers; empty on ranks that agree with their own replicas.
    """

    names: tuple[str, ...]

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class TiedParameterError(FullshardError):
    """Raised when a parameter is shared by units that have no common ancestor unit."""


class UnmaterializedParameterError(FullshardError):
    """Raised when a model runs while parameters are still on the meta device."""
