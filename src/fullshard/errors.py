"""Exceptions for what goes wrong at run time.

What a user passed wrongly raises ``ValueError`` or ``TypeError``; these are for the rest.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "FullshardError", "PhaseError", "TiedParameterError", "UnmaterializedParameterError"]


class FullshardError(RuntimeError):
    """Base class of everything that goes wrong at run time."""


class CheckpointError(FullshardError):
    """A checkpoint or file of weights cannot be written, or cannot be read, or does not fit the model."""


class PhaseError(FullshardError):
    """A unit was asked to make a move that its phase does not allow."""


class TiedParameterError(FullshardError):
    """A parameter is shared by units that have no common unit above them."""


class UnmaterializedParameterError(FullshardError):
    """Parameters were still on the meta device when the model was run."""
