"""Limits of time in tests, which grow with how long the machine takes for a known piece of work."""

from __future__ import annotations

import time

WORK_S = 0.05  # of a processor


def patient(seconds: float) -> float:
    """Return a limit: so many seconds on an idle machine, more where other work takes turns with this process."""
    begun, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < WORK_S:
        pass
    return seconds * max(1.0, (time.perf_counter() - begun) / WORK_S)
