"""Calls of torch.distributed.checkpoint: on which ranks, and their failures as errors of ours."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.errors import CheckpointError

__all__ = ["on_ranks"]


@contextlib.contextmanager
def on_ranks(group: dist.ProcessGroup | None, what: str) -> Iterator[dict[str, Any]]:
    """Call torch.distributed.checkpoint inside of it, with the arguments that it gives.

    Args:
        group: The ranks; None: there are no process groups, and it is this process alone.
        what: What could not be done if that fails, for the error.

    Raises:
        CheckpointError: On all ranks, with what each of those that failed reported.
    """
    alone = group is None
    if group is not None and not dist.is_initialized():
        raise CheckpointError(f"{what}: the process group was destroyed before; call result() of async_save first")
    size = 1 if group is None else group.size()
    try:
        # The filters are those of the process: a thread that puts them back may do so when others have changed them.
        quiet = alone and threading.current_thread() is threading.main_thread()
        with warnings.catch_warnings() if quiet else contextlib.nullcontext():
            if quiet:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as the caller knows
            yield {"process_group": group, "no_dist": alone}
    except CheckpointException as error:
        raise CheckpointError(f"{what}: {_reports(error, size)}") from error


def _reports(error: CheckpointException, size: int) -> str:
    """What the ranks said; what all of them said, once."""
    ranks: dict[str, list[int]] = {}
    for rank, (failure, *_) in error.failures.items():
        text = str(failure) or type(failure).__name__
        plain = isinstance(failure, (CheckpointError, ValueError, TypeError))
        ranks.setdefault(text if plain else f"{type(failure).__name__}: {text}", []).append(rank)
    if len(ranks) == 1 and len(error.failures) == size:
        return next(iter(ranks))
    return "; ".join(f"rank {', '.join(map(str, at))}: {report}" for report, at in ranks.items())
