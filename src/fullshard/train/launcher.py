"""Start the ranks of one machine under torch's elastic agent, and report how they ended.

The agent starts the workers anew when one fails, and passes signals on to them. See [Note: Stopping all ranks] for what
the workers make of that.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.group import OWN_STORE
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
        how each of them has ended.
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
            for rank, failure in sorted(error.failures.items()):
                how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
                print(f"fullshard train: rank {rank} ended {how}", file=sys.stderr)
            return FAILURE
        except SignalException as error:
            return 128 + int(error.sigval)
        return int(code_file.read_text()) if code_file.exists() else 0
