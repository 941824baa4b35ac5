"""Locks by which a process on a machine sees whether that of another rank runs.

Each rank holds a lock on a file of its own in the memory of its machine, which the kernel releases when the process
ends, however it ends. Numbers of processes prove nothing: they mean other things in other containers, machines may be
clones of each other, and ``/proc`` may be another container's. Who does not find the file is on another machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["GONE", "RUNS", "STOPPED", "hold_lock", "locks_seen", "release_lock", "state_of"]

GONE, RUNS, STOPPED = "gone", "runs", "stopped"
_FOLDER = Path("/dev/shm")
_PREFIX = "fullshard-rank-"
_NEW_S = 600.0
_LOCK = "hhqqi"  # as Linux declares it: kind, whence, start, length, process
_own: dict[str, int] = {}  # locks of this process, which it must never open again: closing a file releases its locks


def hold_lock() -> str:
    """Lock a new file until this process ends, or until ``release_lock``.

    Returns:
        Its name; empty where that cannot be done.
    """
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError):
        for name in locks_seen():  # of processes that were killed; one that is new may not be locked yet
            if state_of(name) == GONE and time.time() - (_FOLDER / name).stat().st_mtime > _NEW_S:
                release_lock(name)
    name = f"{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
    try:
        _own[name] = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.lockf(_own[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        release_lock(name)
        return ""
    return name


def release_lock(name: str) -> None:
    """Remove a file of ``hold_lock``."""
    with contextlib.suppress(OSError):
        (_FOLDER / name).unlink()
    if name in _own:
        os.close(_own.pop(name))


def locks_seen() -> Iterator[str]:
    """Yield the names of this user's files, of processes on this machine."""
    with contextlib.suppress(OSError):
        yield from (path.name for path in _FOLDER.glob(f"{_PREFIX}{os.getuid()}-*"))


def state_of(name: str) -> str:
    """Return ``GONE``, ``RUNS`` or ``STOPPED`` for the process that has locked a file; empty if it is not here."""
    if name in _own:
        return RUNS
    if not name.startswith(_PREFIX) or "/" in name:
        return ""
    try:
        file = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return GONE
        with contextlib.suppress(OSError, IndexError):  # the process is of another container
            if os.readlink("/proc/self") == str(os.getpid()):
                stat = Path(f"/proc/{process}/stat").read_text()
                return STOPPED if stat.rpartition(")")[2].split()[0] in "Tt" else RUNS
        return RUNS
    except OSError:
        return ""
    finally:
        os.close(file)
