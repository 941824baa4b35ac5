"""Stop requests to a run, so that all its ranks stop at the same step.

[Note: Stopping all ranks]
If a rank left the loop alone, the others would hang in a collective. So a request only sets a flag in this process; the
flag is part of a sum that every rank computes anyway (with the loss of the step), and all ranks stop when the sum shows
that any rank was asked to. Requests come from three sources: SIGINT, SIGTERM and SIGHUP (torchrun forwards them;
SIGTERM precedes preemption; SIGHUP follows a closed terminal, and is as urgent), a file that `fullshard train`'s
launcher writes on any of them (its workers are in separate sessions, which the terminal's signal does not reach; a file
cannot be lost while a worker still imports torch), and the launcher's death.

[Note: Lost peers]
A rank that is killed leaves the others in a collective. Over gloo that raises at once; over NCCL it may hang for
minutes. The launcher, which sees its process end, sends SIGTERM to the others, so that a preemption and a lost peer
send the same signal. They are distinguished as follows: each rank knows the processes of its node, and a rank that was
asked to stop while another is gone cannot save anything, and ends at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from types import FrameType

WRONG_INPUT = 2  # exit code of workers that have said what is wrong with their input
NOT_FINITE = 3  # exit code of workers that have said which of their numbers became NaN or infinite
INTERRUPTED = 128 + int(signal.SIGINT)  # exit code of a process that Ctrl-C ended
TERMINATED = 128 + int(signal.SIGTERM)  # exit code after preemption
# SIGHUP is handled as SIGTERM: without a terminal there is no user to show results to.
_CODES = {int(signal.SIGINT): INTERRUPTED, int(signal.SIGTERM): TERMINATED}
if hasattr(signal, "SIGHUP"):
    _CODES[int(signal.SIGHUP)] = TERMINATED
STOP_FILE_VARIABLE = "FULLSHARD_STOP_FILE"  # environment of a launcher's worker: the file, and
LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER"  # the launcher's process id
GRACE = 120.0  # seconds that a worker may outlive its launcher: enough for a large checkpoint
FAREWELL = 1.0  # seconds for a rank without peers to fail by itself with an error
POLL = 0.25  # seconds between polls of the other processes


class StopRequest:
    """Stop request to this process. See [Note: Stopping all ranks]."""

    _signalled: int  # exit code that belongs to the signal; 0 for none
    _file: Path | None
    _parent: int
    _handled: Set[int]  # signals
    _peers: Sequence[int]  # process ids, see [Note: Lost peers]

    def __init__(self) -> None:
        self._signalled = 0
        name = os.environ.get(STOP_FILE_VARIABLE)
        self._file = Path(name) if name else None
        self._parent = launcher_process()
        self._peers = ()
        self._handled = {number for number in _CODES if not _is_nohup(number)}
        for number in self._handled:
            signal.signal(number, self._on_signal)

    @property
    def code(self) -> int:
        """Exit code of a run that stops now: 130 on Ctrl-C, 143 if it was terminated, 0 without a request."""
        if self._signalled:
            return self._signalled
        if self._file is not None and self._file.exists():
            return INTERRUPTED if self._file.read_text() == str(INTERRUPTED) else TERMINATED
        return TERMINATED if os.getppid() != self._parent else 0

    @property
    def marks(self) -> tuple[float, float]:
        """Flags for the sum over ranks: 1 if this rank was interrupted, 1 if it was terminated."""
        code = self.code
        return float(code == INTERRUPTED), float(code == TERMINATED)

    def watch(self, peers: Sequence[int]) -> None:
        """End this process when it cannot make progress, even from within a collective that hangs.

        Args:
            peers: process ids of the ranks on this node. See [Note: Lost peers].
        """
        self._peers = peers
        # A handler runs once the main thread returns from C++, which it never does from a collective that hangs.
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(heard,), name="fullshard-watch", daemon=True).start()

    def allow_peers_to_exit(self) -> None:
        """Declare that no further collective follows, so that other ranks may exit."""
        self._peers = ()

    def _watch(self, heard: int) -> None:
        since = time.monotonic()
        while True:
            if select.select([heard], [], [], POLL)[0]:
                for number in set(os.read(heard, 64)) & self._handled:
                    self._on_signal(number, None)
            orphan = os.getppid() != self._parent
            if not orphan:
                since = time.monotonic()
            elif time.monotonic() - since > GRACE:
                os._exit(1)
            if (orphan or self._signalled) and any(map(_is_gone, self._peers)):
                time.sleep(FAREWELL)
                if self._peers:
                    os._exit(1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = max(self._signalled, _CODES[number])


@contextlib.contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Within the context, end this process soon after its launcher has ended: there is nothing to save yet, and a rank
    may wait for others that were never started.
    """
    launcher, over = launcher_process(), threading.Event()

    def watch() -> None:
        while os.getppid() == launcher:
            if over.wait(POLL):
                return
        remove_scratch_of_dead_launcher()
        os._exit(1)

    threading.Thread(target=watch, name="fullshard-start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def remove_scratch_of_dead_launcher() -> None:
    """On rank 0, remove the folder of the stop file if the launcher did not live to do it."""
    stop_file = os.environ.get(STOP_FILE_VARIABLE)
    if stop_file and os.environ.get("RANK") == "0" and os.getppid() != launcher_process():
        shutil.rmtree(Path(stop_file).parent, ignore_errors=True)


def launcher_process() -> int:
    """Return the id of the process that has started this one."""
    return int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))


def agreed_exit_code(interrupted: float, terminated: float) -> int:
    """Return the exit code with which all ranks stop, from the sums of their `marks`; 0: continue."""
    return TERMINATED if terminated else INTERRUPTED if interrupted else 0


def _is_nohup(number: int) -> bool:
    """Return True if a signal is a SIGHUP that this process was started to ignore."""
    return number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) is signal.SIG_IGN


def _is_gone(process: int) -> bool:
    """Return True if a process has ended, also if it has not been waited for."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # no /proc, or ended since
        return False
    return state == b"Z"
