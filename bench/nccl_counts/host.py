"""Calls of functions in a step: Python's, and C's that Python calls."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

# What a read of the host is called in C.
READS = ("item", "tolist", "numpy", "synchronize", "__bool__", "__int__", "__float__", "__index__")


class Calls:
    """How often each function was called.

    Args:
        outside: Code of functions whose calls, with all that they call, do not count.
    """

    def __init__(self, outside: set[CodeType]) -> None:
        self.python: Counter[str] = Counter()
        self.c: Counter[str] = Counter()
        self._outside, self._frame = outside, None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._frame is not None:
            if event == "return" and frame is self._frame:
                self._frame = None
        elif event == "call" and frame.f_code in self._outside:
            self._frame = frame
        elif event == "call":
            self.python[frame.f_code.co_name] += 1
        elif event == "c_call":
            self.c[getattr(argument, "__name__", str(argument))] += 1


@contextlib.contextmanager
def calls_counted(outside: set[CodeType]) -> Iterator[Calls]:
    """Count the calls of this thread as long as the block lasts."""
    calls = Calls(outside)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)
