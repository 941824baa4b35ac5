"""Starting the ranks of one machine with torch's elastic launcher, stopping them, naming what failed."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.stop import INTERRUPTED, LAUNCHER_VARIABLE, STOP_FILE_VARIABLE

CPU_RANKS = 2  # ranks on a machine without GPUs
OTHER_SIGNALS = "SIGTERM,SIGHUP,SIGQUIT"  # those that torch elastic handles; SIGINT is handled here


class WorkerError(RuntimeError):
    """A rank ended with an error. The message is one line that names the rank and the exception."""

    traceback: str  # of the failed rank; empty if it left none

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


def settle(config: TrainConfig) -> TrainConfig:
    """Decide number and device of this machine's ranks where `config` leaves them open.

    Raises:
        ConfigError: the config asks for more GPUs than there are.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and config.device != "cpu" else 0
    if config.device == "cuda" and gpus < max(1, config.ranks):
        raise ConfigError(
            f"--device cuda needs one GPU per rank: found {gpus} GPUs for {max(1, config.ranks)} ranks. "
            f"Use fewer --ranks, or --device cpu"
        )
    ranks = config.ranks or gpus or CPU_RANKS
    return dataclasses.replace(config, ranks=ranks, device="cuda" if gpus >= ranks else "cpu")


def launch(config_file: Path, folder: Path, ranks: int) -> int:
    """Start `ranks` workers on this machine and wait for them.

    Args:
        config_file: the run's config, which the workers read.
        folder: the run's folder.
        ranks: number of workers.

    Returns:
        0, or 130 if Ctrl-C stopped the run.

    Raises:
        WorkerError: a rank failed; the others have been ended.
    """
    _silence_elastic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        stop_file = Path(scratch, "stop")
        os.environ[STOP_FILE_VARIABLE] = str(stop_file)
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle=OTHER_SIGNALS,
        )
        previous = signal.signal(signal.SIGINT, _Interrupt(stop_file))
        try:
            elastic_launch(settings, sys.executable)("-m", "fullshard.train.worker", config_file, folder)
        except ChildFailedError as error:
            raise _explain(error) from None
        except SignalException as error:
            return INTERRUPTED if stop_file.exists() else 128 + int(error.sigval)
        finally:
            signal.signal(signal.SIGINT, previous)
        return INTERRUPTED if stop_file.exists() else 0


def _silence_elastic() -> None:
    """Elastic logs a failure at length, each of its modules at a level of its own; `WorkerError` says it in a line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


class _Interrupt:
    """Handles Ctrl-C: the first asks the workers to stop, the second ends them.

    See [Note: Stopping all ranks].
    """

    _stop_file: Path

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._stop_file.exists():
            raise SignalException("interrupted twice", signal.SIGTERM)  # elastic passes it on to the workers
        self._stop_file.touch()


def _explain(error: ChildFailedError) -> WorkerError:
    """What failed first, in a line."""
    rank, failure = min(error.failures.items(), key=lambda item: _suspicion(item[1]))
    message: object = failure.message
    extra: dict[str, object] = {}
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        message = message.get("message", "")
    if failure.exitcode < 0:
        message = f"ended by {signal.Signals(-failure.exitcode).name}"
    lines = str(message).strip().splitlines() or [f"exit code {failure.exitcode}"]
    return WorkerError(f"rank {rank} failed: {lines[0]}", str(extra.get("py_callstack", "")))


def _suspicion(failure: ProcessFailure) -> tuple[int, float]:
    """Sorts failures by how likely they are the cause of the others, the likeliest first.

    A rank that a signal ended did not lose its peers; the others fail soon after the first, for want of it;
    and what SIGTERM ended, elastic did when it saw a failure. Elastic's own timestamps are in whole seconds,
    so the times of error files decide.
    """
    if failure.exitcode < 0:
        return (2 if failure.exitcode == -signal.SIGTERM else 0), 0.0
    try:
        return 1, os.stat(failure.error_file).st_mtime
    except OSError:
        return 1, math.inf
