"""Python's cyclic garbage collector while many units are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector in the ``with`` block, unless the program has disabled it.

    What units are made of stays, so a collection finds nothing; but so many new objects start several, and each goes
    through all objects of the process.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
