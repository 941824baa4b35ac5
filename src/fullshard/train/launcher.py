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
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.group import OWN_STORE
from fullshard.train.run_folder import ERROR, RunLocation
from fullshard.train.stop import CODE_FILE_VARIABLE, FAILURE, GRACE, LAUNCHER_VARIABLE


class _Interrupted(SignalException):
    """Ctrl-C. Workers get SIGTERM instead: it ends them without a traceback while they start."""

    def __init__(self) -> None:
        super().__init__("interrupted", signal.SIGTERM)


def launch(location: RunLocation, ranks: int, max_restarts: int) -> int:
    """Start workers on this machine with this process's own command line, and wait for them.

    Args:
        location: the run's folder, with its name settled.
        ranks: number of workers.
        max_restarts: how often the agent may start all workers anew after a failure.

    Returns:
        0, the code of workers that ended in order, 128 and the number of the signal that stopped the run, or 1 if a
        rank failed and is not started again. Then the others have been ended, and standard error says which.
    """
    for name in list(logging.root.manager.loggerDict):  # levels are set per module
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # With the agent's store, ranks that were started anew find addresses of killed ones in it (torch 2.13), and could
    # not save a checkpoint once the agent is gone.
    os.environ[OWN_STORE] = "1"
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    previous = signal.signal(signal.SIGINT, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
            return _run_agent(location, _settings(ranks, scratch, max_restarts), Path(scratch, "exit-code"))
    except _Interrupted:
        return 128 + signal.SIGINT
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        signal.signal(signal.SIGINT, previous)


def _run_agent(location: RunLocation, settings: LaunchConfig, code_file: Path) -> int:
    """Run the agent until its workers have ended, and return the code that they left. See [Note: Exit codes]."""
    assert location.name is not None
    os.environ[CODE_FILE_VARIABLE] = str(code_file)
    try:
        elastic_launch(settings, sys.executable)("-m", "fullshard", "train", "--name", location.name, *sys.argv[2:])
    except ChildFailedError as error:
        _report(error, location.folder / ERROR)
        return FAILURE
    return int(code_file.read_text()) if code_file.exists() else 0


def _settings(ranks: int, scratch: str, max_restarts: int) -> LaunchConfig:
    return LaunchConfig(
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


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted


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

    A rank that a signal ended did not lose its peers; the others fail soon after the first, for want of it; and what
    SIGTERM ended, the agent did when it saw a failure. Its own timestamps are in whole seconds, so the times of error
    files decide.
    """
    if failure.exitcode < 0:
        return (2 if failure.exitcode == -signal.SIGTERM else 0), 0.0
    written = Path(failure.error_file)
    return 1, written.stat().st_mtime if written.is_file() else math.inf
