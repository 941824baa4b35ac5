"""Patches of torch for the whole process, and their ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["SharedPatch", "replace"]

_MISSING = object()


def replace(undo: contextlib.ExitStack, holder: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or class until ``undo`` is closed, which restores it or removes it again."""
    undo.callback(_restore, holder, name, vars(holder).get(name, _MISSING))
    setattr(holder, name, value)


def _restore(holder: Any, name: str, before: Any) -> None:
    if before is not _MISSING:
        setattr(holder, name, before)
    elif name in vars(holder):  # programs may have deleted it
        delattr(holder, name)


class SharedPatch:
    """A patch of torch that stays as long as any of the calls that asked for it is in effect.

    Args:
        patch: Patches torch, and adds what undoes it to an exit stack.
    """

    _patch: Callable[[contextlib.ExitStack], None]
    _undo: contextlib.ExitStack
    _calls: set[object]  # those in effect
    _lock: threading.Lock

    def __init__(self, patch: Callable[[contextlib.ExitStack], None]) -> None:
        self._patch, self._undo, self._calls, self._lock = patch, contextlib.ExitStack(), set(), threading.Lock()

    def enable(self) -> contextlib.ExitStack:
        """Patch torch unless it is patched already, and return a context manager that ends this call."""
        call, end = object(), contextlib.ExitStack()
        with self._lock:
            if not self._calls:
                self._patch(self._undo)
            self._calls.add(call)
        end.callback(self._end, call)
        return end

    def _end(self, call: object) -> None:
        with self._lock:
            self._calls.discard(call)
            if not self._calls:
                self._undo.close()
