"""Stop requests to a run, so that all its ranks stop at the same step and save.

[Note: Stopping all ranks]
If a rank left the loop alone, the others would hang in a collective. So a request only sets a code in this process;
that there is one is part of a sum that every rank computes anyway (with the loss of the step), and all ranks stop when
the sum shows that any rank was asked to. Requests are the signals that torch's elastic agent passes on to its workers,
the end of the agent itself, and a reader that has closed the pipe which rank 0 prints to. Until the training loop
begins there is nothing to save, and signals simply end the process.

[Note: Exit codes]
To the elastic agent any exit code but 0 is a failure, after which it starts the workers anew. A worker that has ended
in order, whatever its code, therefore exits with 0 and leaves the code to the launcher in a file. Under torchrun,
which knows of no such file, it exits with the code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType

WRONG_INPUT = 2  # exit code of workers that have said what is wrong with their input
NOT_FINITE = 3  # exit code of workers that have said which of their numbers became NaN or infinite
LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER"  # environment of a launcher's worker: the launcher's process id, and
CODE_FILE_VARIABLE = "FULLSHARD_EXIT_CODE"  # the file of [Note: Exit codes]
GRACE = 120  # seconds that a worker may take to save and end once it is asked to
AGAIN = 2.0  # seconds after which a further signal means now; schedulers send one to agent and workers at once
FAREWELL = 2.0  # seconds for a rank without peers to fail by itself with an error
POLL = 0.25  # seconds between looks at other processes


class StopRequest:
    """Stop request to this process. See [Note: Stopping all ranks]."""

    code: int  # exit code of a run that stops now; 0: there is no request
    _since: float

    def __init__(self) -> None:
        self.code = 0
        self._since = 0.0
        for number in handled_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def ask(self, number: int) -> None:
        """Ask to stop, as signal `number` does."""
        if not self.code:
            self.code, self._since = 128 + number, time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.code and time.monotonic() - self._since > AGAIN:
            os._exit(128 + number)
        self.ask(number)


def handled_signals(*wanted: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore, as `nohup` ignores SIGHUP."""
    return [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]


def end_with_launcher() -> None:
    """From now on, send this process SIGTERM when its launcher has ended, and end it if it has not ended after a while.

    Call it before torch is imported: ranks may wait for others that the launcher did not live to start.
    """
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="fullshard-launcher", daemon=True).start()


@contextlib.contextmanager
def ending_with_peers(processes: Collection[int]) -> Iterator[None]:
    """Within the context, end this process soon after one of `processes` has ended.

    A rank that lost another on its machine cannot make progress. If it waits in a collective of gloo, that raises; in
    one of NCCL, or for a key of a store, it would hang until the agent kills it.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL):
            if any(map(_is_gone, processes)) and not over.wait(FAREWELL):
                os._exit(1)

    threading.Thread(target=watch, name="fullshard-peers", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def exit_code(code: int) -> int:
    """Return what a worker exits with that has ended in order with `code`. See [Note: Exit codes]."""
    file = os.environ.get(CODE_FILE_VARIABLE)
    if file is None:
        return code
    with contextlib.suppress(OSError):  # the launcher is gone
        Path(file).write_text(str(code))
    return 0
