"""A process is seen to run while it holds its lock, and to be gone as soon as it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.ranks import liveness
from fullshard.ranks.liveness import GONE, RUNS, STOPPED, hold_lock, locks_seen, release_lock, state_of

HOLD = """
import os, time
from fullshard.ranks.liveness import hold_lock
lock = hold_lock()
if os.fork():  # the child has its open files, as workers of data loaders have
    print(lock, flush=True)
time.sleep(60)
"""


def wait_until(state: str, lock: str) -> None:
    limit = time.monotonic() + 10
    while state_of(lock) != state:
        assert time.monotonic() < limit, (state, state_of(lock))
        time.sleep(0.01)


def test_states_of_a_process() -> None:
    """It runs, is stopped, goes on, and is killed; its children may live on."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        lock = process.stdout.readline().strip()
        assert lock in locks_seen()
        wait_until(RUNS, lock)
        process.send_signal(signal.SIGSTOP)
        wait_until(STOPPED, lock)
        process.send_signal(signal.SIGCONT)
        wait_until(RUNS, lock)
        process.kill()
        process.wait()
        wait_until(GONE, lock)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        release_lock(lock)


def test_own_locks_are_kept() -> None:
    """Looking at its own locks does not release them; what was released, or is elsewhere, cannot be seen."""
    lock = hold_lock()
    assert {each: state_of(each) for each in locks_seen()}[lock] == RUNS
    seen = "from fullshard.ranks.liveness import state_of; import sys; print(state_of(sys.argv[1]))"
    told = subprocess.run([sys.executable, "-c", seen, lock], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == RUNS
    release_lock(lock)
    assert [state_of(each) for each in (lock, "", "../passwd", "fullshard-rank-0-none")] == [""] * 4


def test_where_nothing_can_be_locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody can look for the process then."""
    monkeypatch.setattr(liveness, "_FOLDER", tmp_path / "missing")
    assert hold_lock() == "" and state_of("") == ""
