"""Resident memory of this process, and what the machine has left, as the kernel counts them (Linux; None elsewhere)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path


def now() -> int | None:
    return _kernel_bytes("/proc/self/status", "VmRSS")


def peak() -> int | None:
    return _kernel_bytes("/proc/self/status", "VmHWM")


def available() -> int | None:
    """Bytes the machine can still give out."""
    return _kernel_bytes("/proc/meminfo", "MemAvailable")


def reset_peak() -> None:
    """From here on ``peak`` is the highest value since now; 5 resets the mark, see proc(5)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def forget_freed() -> None:
    """Give memory that the allocator holds but nobody uses back to the kernel (glibc), and measure the peak from here.

    To be called on a model just built: the unsharded one was the benchmark's own way to initialize.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    reset_peak()


def _kernel_bytes(file: str, field: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
