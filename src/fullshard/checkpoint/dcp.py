"""Call torch.distributed.checkpoint on a process group and report its failures per rank as CheckpointError."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.errors import CheckpointError

__all__ = ["dcp_arguments"]


@contextlib.contextmanager
def dcp_arguments(group: dist.ProcessGroup | None, what: str) -> Iterator[dict[str, Any]]:
    """Yield the process-group arguments of a torch.distributed.checkpoint call and translate its failures.

    Args:
        group: The ranks; None: no process groups, this process alone.
        what: Beginning of the error message.

    Raises:
        CheckpointError: On all ranks, with the error of each rank that failed.
    """
    alone = group is None
    if group is not None and not dist.is_initialized():
        raise CheckpointError(
            f"{what}: the process group has been destroyed; call result() of async_save before destroying it"
        )
    size = 1 if group is None else group.size()
    try:
        # Warning filters are global to the process: only the main thread may change and restore them.
        quiet = alone and threading.current_thread() is threading.main_thread()
        with warnings.catch_warnings() if quiet else contextlib.nullcontext():
            if quiet:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield {"process_group": group, "no_dist": alone}
    except CheckpointException as error:
        raise CheckpointError(f"{what}: {_failure_reports(error, size)}") from error


def _failure_reports(error: CheckpointException, size: int) -> str:
    """Return the failure of each rank as text; a failure that all ranks share appears once."""
    ranks: dict[str, list[int]] = {}
    for rank, (failure, *_) in error.failures.items():
        text = str(failure) or type(failure).__name__
        plain = isinstance(failure, (CheckpointError, ValueError, TypeError))
        ranks.setdefault(text if plain else f"{type(failure).__name__}: {text}", []).append(rank)
    if len(ranks) == 1 and len(error.failures) == size:
        return next(iter(ranks))
    return "; ".join(f"rank {', '.join(map(str, at))}: {report}" for report, at in ranks.items())
