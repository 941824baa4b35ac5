"""Stop requests to a run, so that all its ranks stop at the same step and save.

[Note: Stopping all ranks]
If a rank left the loop alone, the others would hang in a collective. So a request only sets a code in this process;
the codes of all ranks are gathered with the losses of each step, and all ranks stop when one of them is not 0. Requests
are signals, which torch's elastic agent passes on to its workers, and the end of the agent itself. Until the training
loop begins there is nothing to save, and signals simply end the process. If collectives fail after a request, as when
another rank was killed, this rank does not wait for the reason: the agent starts workers again only when all have
ended.

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
from pathlib import Path

from fullshard.progress import PROGRESS

FAILURE = 1  # exit code of a rank that raised, and of a run that is not started again
WRONG_INPUT = 2  # exit code of workers that have said what is wrong with their input
NOT_FINITE = 3  # exit code of workers that have said which of their numbers became NaN or infinite
LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER"  # environment of a launcher's worker: the launcher's process id, and
CODE_FILE_VARIABLE = "FULLSHARD_EXIT_CODE"  # the file of [Note: Exit codes]
GRACE = 30  # seconds that a worker may take to save and end without its launcher; the elastic agent gives it as many
POLL = 0.25  # seconds between looks at the launcher


class StopRequest:
    """Stop request to this process. See [Note: Stopping all ranks]."""

    code: int  # exit code of a run that stops now; 0: there is no request

    def __init__(self) -> None:
        self.code = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.code = self.code or 128 + number
        PROGRESS.ends = True


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher ends, and kill it if it has not ended after a while.

    Call it before torch is imported: ranks may wait for others that the launcher can no longer start.
    """
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="fullshard-launcher", daemon=True).start()


def exit_code(code: int) -> int:
    """Return what a worker exits with that has ended in order with `code`. See [Note: Exit codes]."""
    file = os.environ.get(CODE_FILE_VARIABLE)
    if file is None:
        return code
    with contextlib.suppress(OSError):  # the launcher is gone
        Path(file).write_text(str(code))
    return 0
