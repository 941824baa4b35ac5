"""Start, stop and restart the ranks of one machine with torch's elastic launcher, and report failures.

[Note: Restarts]
torch elastic can restart workers itself, whatever ended them. Here each start is a separate launch, because not every
failure should be retried: workers killed by the system are restarted, but after an exception only if the run made
progress since the last failure. A bug in the code or the data would fail again at the same step, and so would a loss
that is not finite.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train import run_folder
from fullshard.train.atomic_file import replace_text
from fullshard.train.config import TrainConfig
from fullshard.train.group import choose
from fullshard.train.metrics import last_step
from fullshard.train.stop import LAUNCHER_VARIABLE, NOT_FINITE, STOP_FILE_VARIABLE, WRONG_INPUT

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask the workers to stop
OTHER_SIGNALS = "SIGQUIT"  # handled by torch elastic, which ends the workers
SHUTDOWN = 5  # seconds until workers that lost a peer, and hang for it, are killed


class WorkerError(RuntimeError):
    """A rank ended with an error. The message is one line that names the rank and the exception."""

    traceback: str  # of the failed rank; empty if it left none
    code: int  # its exit code; negative: the signal that ended it

    def __init__(self, message: str, traceback: str, code: int) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.code = code


@dataclass(frozen=True)
class Job:
    """Task of the workers of this machine.

    Attributes:
        config: the run's settings, ranks and device settled.
        folder: the run's folder.
        resume: another run, or a checkpoint, to start from if the run has none; None for none.
        max_restarts: how often the workers may be started anew, see [Note: Restarts].
    """

    config: TrainConfig
    folder: Path
    resume: Path | None = None
    max_restarts: int = 3


def resolve_ranks(config: TrainConfig) -> TrainConfig:
    """Choose number and device of this machine's ranks where `config` leaves them open.

    Raises:
        ConfigError: the config asks for accelerators that this machine has not, or for more than there are.
    """
    device, ranks = choose(config.device, config.ranks)
    return dataclasses.replace(config, ranks=ranks, device=device)


def launch(job: Job, say: Callable[[str], None]) -> int:
    """Start workers on this machine and wait for them.

    Args:
        job: what they are to do.
        say: told of every restart.

    Returns:
        0, 2 or 3 if the workers reported wrong input or numbers that are not finite, or 128 and the number of the
        signal that stopped the run.

    Raises:
        WorkerError: a rank failed, and is not started again; the others have been ended.
    """
    _silence_elastic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.config.ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    metrics = job.folder / run_folder.METRICS
    furthest, restarts = last_step(metrics), 0
    with (
        tempfile.TemporaryDirectory(prefix="fullshard-") as scratch,
        _stop_on_signals(Path(scratch, "stop")) as stop_file,
    ):
        config_file = Path(scratch, run_folder.CONFIG)
        config_file.write_text(job.config.to_toml(), encoding="utf-8")
        words = ["-m", "fullshard.train.worker", str(config_file), str(job.folder)]
        words += [str(job.resume)] if job.resume else []
        while True:
            try:
                elastic_launch(_settings(job.config.ranks, scratch), sys.executable)(*words)
                return int(stop_file.read_text()) if stop_file.exists() else 0
            except SignalException as error:
                return int(stop_file.read_text()) if stop_file.exists() else 128 + int(error.sigval)
            except ChildFailedError as error:
                failure = _explain(error)
                if failure.code in (WRONG_INPUT, NOT_FINITE):
                    return failure.code
                if stop_file.exists() and any(each.exitcode < 0 for each in error.failures.values()):
                    return int(stop_file.read_text())  # killed after the request to stop, before they could finish
                reached = last_step(metrics)
                if restarts == job.max_restarts or (failure.code >= 0 and reached <= furthest):
                    raise failure from None
            furthest = max(furthest, reached)
            restarts += 1
            say(f"{failure}; restart {restarts} of {job.max_restarts}")


def _settings(ranks: int, scratch: str) -> LaunchConfig:
    return LaunchConfig(
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
        shutdown_timeout=SHUTDOWN,
    )


@contextmanager
def _stop_on_signals(stop_file: Path) -> Iterator[Path]:
    """Within the context, have signals ask the workers to stop, through a file whose name they know."""
    os.environ[STOP_FILE_VARIABLE] = str(stop_file)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    previous = {number: signal.signal(number, _StopSignals(stop_file)) for number in handled}
    try:
        yield stop_file
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _silence_elastic() -> None:
    """Silence elastic's long logs of a failure, which are set per module; `WorkerError` reports it in a line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


class _StopSignals:
    """Handler of Ctrl-C and similar signals: the first asks the workers to stop, the second ends them.

    See [Note: Stopping all ranks].
    """

    _stop_file: Path

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._stop_file.exists():
            raise SignalException("asked twice", signal.SIGTERM)  # elastic passes it on to the workers
        replace_text(self._stop_file, str(128 + number))


def _explain(error: ChildFailedError) -> WorkerError:
    """Describe the first failure in a line."""
    rank, failure = min(error.failures.items(), key=lambda item: _cause_rank(item[1]))
    message: object = failure.message
    extra: dict[str, object] = {}
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        message = message.get("message", "")
    if failure.exitcode < 0:
        message = f"ended by {signal.Signals(-failure.exitcode).name}"
    lines = str(message).strip().splitlines() or [f"exit code {failure.exitcode}"]
    return WorkerError(f"rank {rank} failed: {lines[0]}", str(extra.get("py_callstack", "")), failure.exitcode)


def _cause_rank(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key of failures, with the likeliest cause of the others first.

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
