"""How a run is asked to stop, so that all its ranks stop at the same step.

[Note: Stopping all ranks]
A rank that leaves the loop alone leaves the others in a collective that never ends. So a request only marks
this process; the mark travels in a sum that every rank takes part in anyway (with the loss of the step), and
a rank stops when the sum says that any rank was asked. Requests come from three places: SIGINT, SIGTERM and
SIGHUP (torchrun forwards them; whoever takes a machine back sends the second to all; the third is what a closed
terminal sends, and as urgent), a file that `fullshard train`'s launcher writes on any of them (its workers live
in sessions of their own, which the terminal's signal does not reach; a file cannot be lost while a worker still
imports torch), and the launcher's death.

[Note: Lost peers]
A rank that is killed leaves the others in a collective. Over gloo that raises at once; over NCCL it may hang for
minutes. The launcher, which sees its process end, sends SIGTERM to the others, so that the signal of a preemption
and that of a lost peer are the same. They are told apart by looking: each rank knows the processes of its node,
and one that was asked to stop while another is gone can save nothing, and ends at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Sequence, Set
from pathlib import Path
from types import FrameType

INTERRUPTED = 128 + int(signal.SIGINT)  # exit code that shells know for a process that Ctrl-C ended
TERMINATED = 128 + int(signal.SIGTERM)  # and for one that its machine was taken from
# SIGHUP is handled as SIGTERM: without a terminal there is nobody to show results to.
_CODES = {int(signal.SIGINT): INTERRUPTED, int(signal.SIGTERM): TERMINATED}
if hasattr(signal, "SIGHUP"):
    _CODES[int(signal.SIGHUP)] = TERMINATED
STOP_FILE_VARIABLE = "FULLSHARD_STOP_FILE"  # environment of a launcher's worker: the file, and
LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER"  # the launcher's process id
GRACE = 120.0  # seconds that a worker may outlive its launcher: enough for a large checkpoint
FAREWELL = 1.0  # seconds that a rank without peers has to fail by itself, which says why
POLL = 0.25  # seconds between looks at the other processes


class StopRequest:
    """Whether this process was asked to stop. See [Note: Stopping all ranks]."""

    _signalled: int  # exit code that belongs to the signal; 0 for none
    _file: Path | None
    _parent: int
    _handled: Set[int]  # signals
    _peers: Sequence[int]  # process ids, see [Note: Lost peers]

    def __init__(self) -> None:
        self._signalled = 0
        name = os.environ.get(STOP_FILE_VARIABLE)
        self._file = Path(name) if name else None
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        self._peers = ()
        self._handled = {number for number in _CODES if not _is_nohup(number)}
        for number in self._handled:
            signal.signal(number, self._on_signal)

    @property
    def code(self) -> int:
        """The exit code of a run that stops now: 130 on Ctrl-C, 143 if it must be quick, 0 if nobody asked."""
        if self._signalled:
            return self._signalled
        if self._file is not None and self._file.exists():
            return INTERRUPTED if self._file.read_text() == str(INTERRUPTED) else TERMINATED
        return TERMINATED if os.getppid() != self._parent else 0

    @property
    def marks(self) -> tuple[float, float]:
        """What travels in a sum over ranks: whether this one was interrupted, and whether it was terminated."""
        code = self.code
        return float(code == INTERRUPTED), float(code == TERMINATED)

    def watch(self, peers: Sequence[int]) -> None:
        """End this process when it can do no more good, even from within a collective that hangs.

        Args:
            peers: process ids of the ranks on this node. See [Note: Lost peers].
        """
        self._peers = peers
        # A handler runs once the main thread is back from C++, which from a collective that hangs it never is.
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(heard,), name="fullshard-watch", daemon=True).start()

    def let_peers_go(self) -> None:
        """From here on no collective is to come: other ranks may end."""
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


def agreed(interrupted: float, terminated: float) -> int:
    """The exit code that all ranks stop with, from the sums of their `marks`; 0: they go on."""
    return TERMINATED if terminated else INTERRUPTED if interrupted else 0


def _is_nohup(number: int) -> bool:
    """Whether a signal is a SIGHUP that this process was started to ignore."""
    return number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) is signal.SIG_IGN


def _is_gone(process: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
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
