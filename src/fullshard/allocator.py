"""The C allocator of CPU hosts: whether memory that is freed stays with the process."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

__all__ = ["KEPT_BLOCK_BYTES", "keep_freed_memory", "keep_freed_memory_by_default"]

# Blocks of up to this size are kept: docs/memory.md has what was measured. Older versions of glibc take no more.
KEPT_BLOCK_BYTES = 32 * 1024 * 1024

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_GLIBC_THRESHOLD = 128 * 1024  # what both are in a new process
_C_INT_MAX = 2**31 - 1
_SWITCH = "FULLSHARD_KEEP_FREED_MEMORY"
_OWN_TUNING = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


class _Kept:
    """What the allocator of this process was told."""

    block_bytes: int = 0  # 0: nothing, or it was undone
    chosen: bool = False  # by the user; fullshard leaves it at that


_kept = _Kept()


def keep_freed_memory(block_bytes: int | None = KEPT_BLOCK_BYTES) -> bool:
    """Have the C allocator keep freed memory for the next allocation, or stop it from doing so. Whole process, CPU.

    [Note: Freed memory that stays mapped]
    Every unit's full buffer and gradients are freed and allocated again in every step. glibc takes large blocks from
    the kernel and returns them there, which then maps and zeroes every page anew: a fault per 4 KiB. Told to keep them,
    it serves blocks from memory that stays with the process. What it keeps is not lost: it is the memory of the next
    block. But a heap has gaps, so the resident memory of a process may be some percent higher; and memory
    that was needed once (to build a model, say) stays with the process until ``malloc_trim``.

    On CPU, ``fully_shard`` and ``FullyShardedDataParallel`` set it unless the user has decided: with this function,
    with ``FULLSHARD_KEEP_FREED_MEMORY=0`` in the environment, or with glibc's own variables
    (``MALLOC_TRIM_THRESHOLD_`` and others). See docs/memory.md for what it gains and costs.

    Args:
        block_bytes: Blocks of up to so many bytes are kept; larger ones go back to the kernel unless they happened to
            come from memory that is kept. Older versions of glibc take at most 32 MiB. None (or False): undo. Both
            thresholds go back to 128 KiB, as they are in a new process, and memory that nobody uses is returned at
            once. One thing glibc cannot undo: in an untouched process the thresholds adapt to the blocks that are
            freed, and after any setting they do so no more.

    Returns:
        Whether the allocator took it. False, and nothing has changed: the allocator is not glibc's (musl, macOS,
        Windows, jemalloc, tcmalloc), ``FULLSHARD_KEEP_FREED_MEMORY`` is 0, or ``block_bytes`` is more than it takes.

    Raises:
        TypeError: If ``block_bytes`` is not an integer.
        ValueError: If it is not positive, or more than a C ``int`` holds.
    """
    if block_bytes is None or block_bytes is False:
        block_bytes = 0
    elif isinstance(block_bytes, bool) or not isinstance(block_bytes, int):
        raise TypeError(f"keep_freed_memory: block_bytes must be a number of bytes or None, got {block_bytes!r}")
    elif not 0 < block_bytes <= _C_INT_MAX:
        raise ValueError(
            f"keep_freed_memory: block_bytes must be from 1 to {_C_INT_MAX}, or None to undo it, got {block_bytes}"
        )
    _kept.chosen = True
    return _tell_allocator(block_bytes)


def keep_freed_memory_by_default() -> None:
    """The same with :data:`KEPT_BLOCK_BYTES`, unless the user has decided. For front ends, on CPU."""
    if _kept.chosen or _kept.block_bytes:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _OWN_TUNING) or "glibc.malloc." in tunables:
        return
    _tell_allocator(KEPT_BLOCK_BYTES)


def _tell_allocator(block_bytes: int) -> bool:
    glibc = _glibc()
    if glibc is None or os.environ.get(_SWITCH, "1") == "0":
        return False
    if not block_bytes and not _kept.block_bytes:
        return True  # never told: its thresholds still adapt
    threshold, trim = (block_bytes, -1) if block_bytes else (_GLIBC_THRESHOLD, _GLIBC_THRESHOLD)
    if not (glibc.mallopt(_M_MMAP_THRESHOLD, threshold) and glibc.mallopt(_M_TRIM_THRESHOLD, trim)):
        return False
    _kept.block_bytes = block_bytes
    if not block_bytes:
        glibc.malloc_trim(0)
    return True


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if its allocator is what ``malloc`` calls."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or any(
        hasattr(library, name) for name in ("mallctl", "tc_version")
    ):
        return None
    return library
