"""Start the ranks of one machine under torch's elastic agent, and report how they ended.

The agent starts the workers anew when one fails, and passes signals on to them. See [Note: Stopping all ranks] for what
the workers make of that.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.group import OWN_STORE
from fullshard.train.run_folder import ERROR
from fullshard.train.stop import CODE_FILE_VARIABLE, FAILURE, GRACE, LAUNCHER_VARIABLE


def launch(folder: Path, ranks: int, max_restarts: int) -> int:
    """Start workers on this machine with this process's own command line, and wait for them.

    Ctrl-C raises KeyboardInterrupt after the agent has ended the workers with SIGTERM, which is no traceback while they
    start.

    Args:
        folder: of the run.
        ranks: number of workers.
        max_restarts: how often the agent may start all workers anew after a failure.

    Returns:
        The code that the workers have left (see [Note: Exit codes]), 128 and the number of the signal that stopped the
        run, or 1 if a rank failed and is not started again. Then the others have been ended, and standard error says
        which.
    """
    for name in list(logging.root.manager.loggerDict):  # levels are set per module
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        code_file = Path(scratch, "exit-code")
        # With the agent's store, ranks that were started anew find addresses of killed ones in it (torch 2.13), and
        # could not save a checkpoint once the agent is gone.
        os.environ.update({OWN_STORE: "1", LAUNCHER_VARIABLE: str(os.getpid()), CODE_FILE_VARIABLE: str(code_file)})
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGTERM",  # nohup stays in force; a launcher that SIGHUP ends is missed by its workers
            shutdown_timeout=GRACE,
        )
        try:
            elastic_launch(settings, sys.executable)("-m", "fullshard", "train", "--name", folder.name, *sys.argv[2:])
        except ChildFailedError as error:
            _report(error, folder / ERROR)
            return FAILURE
        except SignalException as error:
            return 128 + int(error.sigval)
        return int(code_file.read_text()) if code_file.exists() else 0


def _report(error: ChildFailedError, traceback: Path) -> None:
    """Name the rank that failed, and why, in a line on standard error; write its traceback to a file."""
    rank, failure = min(error.failures.items(), key=lambda item: _cause_order(item[1]))
    message, trace = failure.message, ""
    if isinstance(message, dict):
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    if failure.exitcode < 0:
        message = f"ended by {signal.Signals(-failure.exitcode).name}"
    lines = str(message).strip().splitlines() or [f"exit code {failure.exitcode}"]
    print(f"fullshard train: rank {rank} failed: {lines[0]}", file=sys.stderr)
    if trace:
        traceback.write_text(trace, encoding="utf-8")
        print(f"fullshard train: traceback written to {traceback}", file=sys.stderr)


def _cause_order(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key of failures, with the likeliest cause of the others first.

    A rank that a signal ended did not lose its peers; the others fail soon after the first, for want of it; and the
    agent ends with SIGTERM those that are left when it sees a failure. Its own timestamps are in whole seconds, so the
    times of error files decide.
    """
    if failure.exitcode < 0:
        return (2 if failure.exitcode == -signal.SIGTERM else 0), 0.0
    written = Path(failure.error_file)
    return 1, written.stat().st_mtime if written.is_file() else math.inf
