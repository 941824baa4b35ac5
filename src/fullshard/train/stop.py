"""How a run is asked to stop, so that all its ranks stop at the same step.

[Note: Stopping all ranks]
A rank that leaves the loop alone leaves the others in a collective that never ends. So a request only marks
this process; the mark travels in a sum that every rank takes part in anyway (with the loss of the step), and
a rank stops when the sum says that any rank was asked. Requests come from three places: SIGINT (torchrun
forwards Ctrl-C), a file that `fullshard train`'s launcher creates on Ctrl-C (its workers live in sessions of
their own, which the terminal's signal does not reach; a file cannot be lost while a worker still imports
torch), and the launcher's death.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

INTERRUPTED = 130  # exit code that shells know for a process that Ctrl-C ended
STOP_FILE_VARIABLE = "FULLSHARD_STOP_FILE"  # environment of a launcher's worker: the file, and
LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER"  # the launcher's process id
GRACE = 30.0  # seconds that a worker may outlive its launcher


class StopRequest:
    """Whether this process was asked to stop. See [Note: Stopping all ranks]."""

    _signalled: bool
    _file: Path | None
    _parent: int

    def __init__(self) -> None:
        self._signalled = False
        name = os.environ.get(STOP_FILE_VARIABLE)
        self._file = Path(name) if name else None
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        signal.signal(signal.SIGINT, self._on_signal)

    def __bool__(self) -> bool:
        if self._signalled or os.getppid() != self._parent:
            return True
        return self._file is not None and self._file.exists()

    def end_with_launcher(self) -> None:
        """Make sure that this process ends when its launcher is gone, even from within a collective that hangs."""
        threading.Thread(target=self._watch, name="fullshard-launcher-watch", daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(1.0)
        time.sleep(GRACE)
        os._exit(1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
