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
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.config import TrainConfig
from fullshard.train.group import choose
from fullshard.train.run_folder import CONFIG, RunLocation
from fullshard.train.stop import CODE_FILE_VARIABLE, GRACE, LAUNCHER_VARIABLE, handled_signals


class WorkerError(RuntimeError):
    """A rank failed more often than it may. The message is one line that names the rank and the exception."""

    traceback: str  # of the failed rank; empty if it left none

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class _Interrupted(SignalException):
    """Ctrl-C. Workers get SIGTERM instead: it ends them without a traceback while they start."""

    def __init__(self) -> None:
        super().__init__("interrupted", signal.SIGTERM)


def resolve_ranks(config: TrainConfig) -> TrainConfig:
    """Choose number and device of this machine's ranks where `config` leaves them open.

    Raises:
        ConfigError: the config asks for accelerators that this machine has not, or for more than there are.
    """
    device, ranks = choose(config.device, config.ranks)
    return replace(config, ranks=ranks, device=device)


def launch(config: TrainConfig, location: RunLocation, max_restarts: int) -> int:
    """Start workers on this machine and wait for them.

    Args:
        config: the run's settings, ranks and device settled.
        location: the run's folder, with its name settled.
        max_restarts: how often the agent may start all workers anew after a failure.

    Returns:
        0, the code of workers that ended in order, or 128 and the number of the signal that stopped the run.

    Raises:
        WorkerError: a rank failed and is not started again; the others have been ended.
    """
    _only_errors_of_elastic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Rank 0 of each start serves a store of its own. With the agent's, ranks that were started anew find addresses of
    # killed ones in it (torch 2.13), and could not save a checkpoint once the agent is gone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    previous = signal.signal(signal.SIGINT, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
            return _run_agent(config, location, max_restarts, Path(scratch))
    except _Interrupted:
        return 128 + signal.SIGINT
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        signal.signal(signal.SIGINT, previous)


def _run_agent(config: TrainConfig, location: RunLocation, max_restarts: int, scratch: Path) -> int:
    """Run the agent until its workers have ended, and return the code that they left. See [Note: Exit codes]."""
    code_file, config_file = scratch / "exit-code", scratch / CONFIG
    os.environ[CODE_FILE_VARIABLE] = str(code_file)
    config_file.write_text(config.to_toml(), encoding="utf-8")
    words = ["-m", "fullshard", "train", "--config", str(config_file), *location.words()]
    try:
        elastic_launch(_settings(config.ranks, str(scratch), max_restarts), sys.executable)(*words)
    except ChildFailedError as error:
        raise _explain(error) from None
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
        signals_to_handle=",".join(each.name for each in handled_signals(signal.SIGTERM, signal.SIGHUP)),
        shutdown_timeout=GRACE,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted


def _only_errors_of_elastic() -> None:
    """Leave of elastic's logs, whose levels are set per module, the line that says which worker failed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _explain(error: ChildFailedError) -> WorkerError:
    """Describe the likeliest cause of a failure in a line."""
    rank, failure = min(error.failures.items(), key=lambda item: _cause_rank(item[1]))
    message, traceback = failure.message, ""
    if isinstance(message, dict):
        traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    if failure.exitcode < 0:
        message = f"ended by {signal.Signals(-failure.exitcode).name}"
    lines = str(message).strip().splitlines() or [f"exit code {failure.exitcode}"]
    return WorkerError(f"rank {rank} failed: {lines[0]}", traceback)


def _cause_rank(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key of failures, with the likeliest cause of the others first.

    A rank that a signal ended did not lose its peers; the others fail soon after the first, for want of it; and what
    SIGTERM ended, the agent did when it saw a failure. Its own timestamps are in whole seconds, so the times of error
    files decide.
    """
    if failure.exitcode < 0:
        return (2 if failure.exitcode == -signal.SIGTERM else 0), 0.0
    try:
        return 1, os.stat(failure.error_file).st_mtime
    except OSError:
        return 1, math.inf
