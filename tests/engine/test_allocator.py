"""The setting of the C allocator: what is set, when it is left alone, and that it can be undone."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Iterator

import pytest

from fullshard import allocator
from fullshard.allocator import KEPT_BLOCK_BYTES, keep_freed_memory, keep_freed_memory_by_default

MMAP, TRIM = -3, -1
MEBIBYTE = 2**20


class Glibc:
    """In place of the C library: notes its settings."""

    def __init__(self, largest: int = 2**31) -> None:
        self.settings: list[tuple[int, int]] = []
        self.trims, self._largest = 0, largest

    def mallopt(self, parameter: int, value: int) -> int:
        """As in malloc.h: 1 if it was taken."""
        if parameter == MMAP and value > self._largest:
            return 0
        self.settings.append((parameter, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        """As in malloc.h."""
        self.trims += 1
        return 1


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Glibc]:
    """A process in which nothing is set."""
    library = Glibc()
    for name in ("FULLSHARD_KEEP_FREED_MEMORY", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator, "_settings", allocator._AllocatorSettings())
    monkeypatch.setattr(allocator, "_glibc", lambda: library)
    return library


@pytest.mark.parametrize("undo", [None, False])
def test_settings_of_the_allocator(glibc: Glibc, monkeypatch: pytest.MonkeyPatch, undo: bool | None) -> None:
    """Larger blocks are mapped on their own; the rest stays with the process. The last call counts."""
    assert keep_freed_memory(undo) is True and glibc.settings == [] and glibc.trims == 0
    for size in (2 * MEBIBYTE, MEBIBYTE):
        assert keep_freed_memory(size) is True
        assert glibc.settings[-2:] == [(MMAP, size), (TRIM, -1)] and glibc.trims == 0
    assert len(glibc.settings) == 4
    assert keep_freed_memory(undo) is True
    assert glibc.settings[4:] == [(MMAP, 128 * 1024), (TRIM, 128 * 1024)] and glibc.trims == 1


def test_an_old_allocator(glibc: Glibc, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts 32 MiB at most gets that, by default and if asked for more; if none is accepted, it says so."""
    for ask in (keep_freed_memory_by_default, keep_freed_memory, lambda: keep_freed_memory(33 * MEBIBYTE)):
        old = Glibc(largest=32 * MEBIBYTE)
        monkeypatch.setattr(allocator, "_settings", allocator._AllocatorSettings())
        monkeypatch.setattr(allocator, "_glibc", lambda old=old: old)
        assert ask() in (None, True)
        assert old.settings == [(MMAP, 32 * MEBIBYTE), (TRIM, -1)]
    monkeypatch.setattr(allocator, "_glibc", lambda: Glibc(largest=0))
    assert keep_freed_memory() is False


@pytest.mark.parametrize("chosen", [None, MEBIBYTE])
def test_front_ends_set_it_once(glibc: Glibc, chosen: int | None) -> None:
    """However many units are made; but they leave what the user chose, whether more, less or nothing is kept."""
    for _ in range(3):
        keep_freed_memory_by_default()
    assert glibc.settings == [(MMAP, KEPT_BLOCK_BYTES), (TRIM, -1)]
    allocator._settings = allocator._AllocatorSettings()
    keep_freed_memory(chosen)
    glibc.settings.clear()
    keep_freed_memory_by_default()
    assert glibc.settings == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FULLSHARD_KEEP_FREED_MEMORY", "0"),
        ("MALLOC_TRIM_THRESHOLD_", "1000"),
        ("MALLOC_TOP_PAD_", "1000"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1"),
    ],
)
def test_front_ends_leave_what_the_environment_says(
    glibc: Glibc, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Our own switch, which is stronger than the program, and glibc's variables."""
    monkeypatch.setenv(name, value)
    keep_freed_memory_by_default()
    assert glibc.settings == []
    assert keep_freed_memory() is (name != "FULLSHARD_KEEP_FREED_MEMORY")


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        *((bad, TypeError, "number of bytes or None") for bad in (True, 1.5, "16")),  # True would be one byte
        *((bad, ValueError, "expected 1 to 2147483647") for bad in (0, -1, 2**31)),  # C would cut larger ones off
    ],
)
def test_only_numbers_of_bytes_are_taken(glibc: Glibc, bad: object, error: type[Exception], words: str) -> None:
    """Undoing is None, not 0."""
    with pytest.raises(error, match=words):
        keep_freed_memory(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("platform", "symbols"),
    [
        ("darwin", None),
        ("win32", None),
        ("linux", {"mallopt"}),
        ("linux", {"mallopt", "gnu_get_libc_version", "mallctl"}),
        ("linux", {"mallopt", "gnu_get_libc_version", "tc_version"}),
    ],
    ids=["darwin", "win32", "musl", "jemalloc", "tcmalloc"],
)
def test_other_allocators_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, platform: str, symbols: set[str] | None
) -> None:
    """Where malloc is not glibc's, mallopt would change an allocator that nobody uses: the call says so."""
    monkeypatch.setattr(allocator, "_settings", allocator._AllocatorSettings())
    monkeypatch.setattr(sys, "platform", platform)
    if symbols is not None:
        library = type("Library", (), dict.fromkeys(symbols, lambda *_: 1))()
        monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: library)
    allocator._glibc.cache_clear()
    try:
        assert keep_freed_memory() is False
        assert keep_freed_memory(None) is False
    finally:
        allocator._glibc.cache_clear()


def count_faults(libc: ctypes.CDLL) -> int:
    """Page faults of taking, filling and freeing a block of 2,048 pages ten times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        block = ctypes.c_void_p(libc.malloc(8 * MEBIBYTE))
        libc.memset(block, 1, 8 * MEBIBYTE)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def fill_the_heap(libc: ctypes.CDLL) -> None:
    """Take all free blocks of that size that other tests have left in the heap."""
    mapped = 2  # a flag that glibc keeps before each block
    while not ctypes.c_size_t.from_address((block := libc.malloc(8 * MEBIBYTE)) - 8).value & mapped:
        pass
    libc.free(block)


def measure_faults() -> list[int]:
    """Faults with blocks of this size not kept, kept, and with that undone."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    allocator._settings = allocator._AllocatorSettings()
    found = []
    for block_bytes in (MEBIBYTE, 16 * MEBIBYTE, None):
        assert keep_freed_memory(block_bytes)
        if not found:
            fill_the_heap(libc)
        count_faults(libc)  # the first block of a kept size is mapped
        found.append(count_faults(libc))
    return found


@pytest.mark.skipif(allocator._glibc() is None, reason="the allocator is not glibc's")
def test_kept_blocks_cause_no_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages are faulted in each time if blocks are not kept, none if they are, and all again once undone."""
    monkeypatch.delenv("FULLSHARD_KEEP_FREED_MEMORY", raising=False)
    readable, writable = os.pipe()
    child = os.fork()  # a process of its own for the setting, without importing torch once more
    if child == 0:
        try:
            os.write(writable, json.dumps(measure_faults()).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        returned, kept, undone = json.loads(answer.read())
    os.waitpid(child, 0)
    assert min(returned, undone) >= 10 * 2048 > 1000 > kept
