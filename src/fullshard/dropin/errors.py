"""Errors and warnings of the drop-in."""

from __future__ import annotations

from fullshard.errors import FullshardError

__all__ = ["MixedEnginesError", "MixedEnginesWarning", "NotOfferedError"]


class NotOfferedError(FullshardError, ImportError):
    """Raised if a program uses a name of torch's FSDP that fullshard does not have.

    An ``ImportError``, so that programs with a fallback use that.
    """


class MixedEnginesError(FullshardError):
    """Raised if torch's own FSDP is called while fullshard replaces it."""


class MixedEnginesWarning(UserWarning):
    """Warning of modules that torch's FSDP has sharded before fullshard was installed."""
