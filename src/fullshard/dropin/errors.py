"""What programs meet where fullshard cannot stand in."""

from __future__ import annotations

from fullshard.errors import FullshardError

__all__ = ["MixedEnginesError", "MixedEnginesWarning", "NotOfferedError"]


class NotOfferedError(FullshardError, ImportError):
    """A name of torch's FSDP was touched that fullshard does not have.

    An ``ImportError``, so that programs that can do without the name go on without it.
    """


class MixedEnginesError(FullshardError):
    """torch's FSDP was about to shard something while fullshard stands in for it."""


class MixedEnginesWarning(UserWarning):
    """Modules were sharded by torch's FSDP before fullshard was installed in its place."""
