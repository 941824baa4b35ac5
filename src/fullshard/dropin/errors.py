"""Errors and warnings of the drop-in."""

from __future__ import annotations

from fullshard.errors import FullshardError

__all__ = ["MixedEnginesError", "MixedEnginesWarning", "NotOfferedError"]


class NotOfferedError(FullshardError, ImportError):
    """A program uses a name of torch's FSDP that fullshard does not have.

    A subclass of ``ImportError``, so that programs with a fallback use it.
    """


class MixedEnginesError(FullshardError):
    """Torch's own FSDP is called while fullshard replaces it."""


class MixedEnginesWarning(UserWarning):
    """Modules were sharded by torch's FSDP before fullshard was installed."""
