"""Tuning of the C allocator on CPU hosts: keep freed memory mapped."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

__all__ = ["KEPT_BLOCK_BYTES", "keep_freed_memory", "keep_freed_memory_by_default"]

# Blocks of up to this size are kept, see docs/how_to/memory.md for measurements.
KEPT_BLOCK_BYTES = 256 * 1024 * 1024

_OLD_GLIBC_BYTES = 32 * 1024 * 1024  # older versions accept no larger size
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_GLIBC_THRESHOLD = 128 * 1024  # both thresholds in a new process
_C_INT_MAX = 2**31 - 1
_SWITCH = "FULLSHARD_KEEP_FREED_MEMORY"
_OWN_TUNING = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


class _AllocatorSettings:
    """Settings that the allocator of this process was given."""

    block_bytes: int = 0  # 0: not set
    chosen: bool = False  # by the user; not changed by fullshard


_settings = _AllocatorSettings()


# [Note: Freed memory that stays mapped]
# Every unit's unsharded buffer and gradients are freed and allocated again in every step. glibc maps large blocks from
# the kernel and unmaps them, so every page is mapped and zeroed again: a page fault per 4 KiB. With this setting, freed
# blocks stay in the process and are reused; in the heaps of other threads than the main one up to 64 MiB. But a heap
# has gaps, so the resident memory of a process may be some percent higher; and memory that was needed once (to build a
# model, say) stays with the process until ``malloc_trim``.
def keep_freed_memory(block_bytes: int | None = KEPT_BLOCK_BYTES) -> bool:
    """Make the C allocator keep freed memory for later allocations, or undo it. Whole process, CPU only.

    Every unit's unsharded buffer and gradients are freed and allocated again in every step. With this setting, freed
    blocks stay in the process and are reused, instead of being unmapped and mapped again page by page. The resident
    memory of a process may be some percent higher.

    On CPU, ``fully_shard`` and ``FullyShardedDataParallel`` call it unless the user has chosen: with this function,
    with ``FULLSHARD_KEEP_FREED_MEMORY=0`` in the environment, or with glibc's own variables (``MALLOC_TRIM_THRESHOLD_``
    and others). docs/how_to/memory.md has gains and costs.

    Args:
        block_bytes: Keep blocks of up to this many bytes; larger ones are returned to the kernel unless they were taken
            from kept memory. Older versions of glibc support at most 32 MiB, and get that if it is more. None (or
            False): undo it. Both thresholds are then set to 128 KiB, as in a new process, and free memory is returned
            at once. glibc's automatic adaptation of the thresholds to freed blocks cannot be restored.

    Returns:
        True if the allocator accepted it. False, without any change, if the allocator is not glibc's (musl, macOS,
        Windows, jemalloc, tcmalloc), or ``FULLSHARD_KEEP_FREED_MEMORY`` is 0.

    Raises:
        TypeError: If ``block_bytes`` is not an integer.
        ValueError: If ``block_bytes`` is not positive, or more than a C ``int`` holds.

    Example:
        ```python
        from fullshard import keep_freed_memory

        keep_freed_memory(8 * 1024 * 1024)  # keep blocks of up to 8 MiB
        keep_freed_memory(None)  # the settings of a new process
        keep_freed_memory()  # the default: blocks of up to 256 MiB
        ```
    """
    if block_bytes is None or block_bytes is False:
        block_bytes = 0
    elif isinstance(block_bytes, bool) or not isinstance(block_bytes, int):
        raise TypeError(f"keep_freed_memory: block_bytes: expected a number of bytes or None, found {block_bytes!r}")
    elif not 0 < block_bytes <= _C_INT_MAX:
        raise ValueError(
            f"keep_freed_memory: block_bytes: expected 1 to {_C_INT_MAX}, or None to undo it, found {block_bytes}"
        )
    _settings.chosen = True
    return _set_allocator(block_bytes)


def keep_freed_memory_by_default() -> None:
    """Call the same with ``KEPT_BLOCK_BYTES`` unless the user has decided. For front ends, on CPU."""
    if _settings.chosen or _settings.block_bytes:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _OWN_TUNING) or "glibc.malloc." in tunables:
        return
    _set_allocator(KEPT_BLOCK_BYTES)


def _set_allocator(block_bytes: int) -> bool:
    glibc = _glibc()
    if glibc is None or os.environ.get(_SWITCH, "1") == "0":
        return False
    if not block_bytes and not _settings.block_bytes:
        return True  # never set: its thresholds still adapt
    threshold, trim = (block_bytes, -1) if block_bytes else (_GLIBC_THRESHOLD, _GLIBC_THRESHOLD)
    if not glibc.mallopt(_M_MMAP_THRESHOLD, threshold):
        threshold = min(threshold, _OLD_GLIBC_BYTES)
        if not glibc.mallopt(_M_MMAP_THRESHOLD, threshold):
            return False
    glibc.mallopt(_M_TRIM_THRESHOLD, trim)  # it accepts any
    _settings.block_bytes = threshold if block_bytes else 0
    if not block_bytes:
        glibc.malloc_trim(0)
    return True


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if ``malloc`` is glibc's; None otherwise."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or any(
        hasattr(library, name) for name in ("mallctl", "tc_version")
    ):
        return None
    return library
