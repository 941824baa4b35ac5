"""``fullshard.save`` and ``async_save``: every rank writes its own shards, without gathering.

A save is ``snapshot`` (of this rank), ``compare_ranks``, and ``write_checkpoint`` (plan, write, commit). Ranks wait for
each other in ``coordination_group``; what commits the save is that rank 0 renames the index, see [Note: Commit].
``async_save`` does the last part in a thread.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.writer import write_checkpoint
from fullshard.checkpoint.saving_ranks import SavingRanks
from fullshard.checkpoint.state.snapshot import Snapshot, StagingMemory, compare_ranks, snapshot
from fullshard.ranks.agreement import resolve_group
from fullshard.ranks.barrier import rank_barrier
from fullshard.ranks.groups import coordination_group

__all__ = ["SaveFuture", "async_save", "describe_call", "save", "wait_for_pending_save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> None:
    """Save a checkpoint of a model and optimizer. All ranks call it; each writes its own shards.

    Saving is atomic: whenever the process is killed, ``path`` holds either the previous checkpoint or the new one. The
    checkpoint can be loaded on another number of ranks, into a model of the other front end (``fully_shard`` or
    ``FullyShardedDataParallel``), or with different wrapping.

    Args:
        path: Folder, or URL that fsspec supports. An existing checkpoint is replaced.
        model: A model of ``fully_shard`` or ``FullyShardedDataParallel``, DistributedDataParallel or plain; not in the
            middle of a step. Its parameters, persistent buffers and extra state are saved.
        optimizer: Optimizer of the model's parameters. Its state and the options of its groups are saved.
        process_group: Ranks that save together. None: all ranks.
        **extra: Further values by name: numbers, tensors, or objects with a state dict, such as a learning rate
            scheduler. Where ranks differ, the values of rank 0 are saved. The states of the random number generators
            are always saved, for each rank.

    Raises:
        CheckpointError: On all ranks if one of them cannot write; on the others if one of them ends during the save.
        TypeError: On all ranks, if a value cannot be read back without running code.
        FullshardError: On the ranks that have called ``save``, if others do not call it.

    Example:
        ```python
        import torch
        from torch import nn
        import fullshard

        model = fullshard.fully_shard(nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fullshard.save("checkpoints/step-100", model, optimizer, step=100)
        ```
    """
    wait_for_pending_save(process_group)
    with rank_barrier(describe_call("save", path, optimizer, extra), process_group) as barrier:
        folder, state = barrier.run_on_all(
            "collecting", lambda: (Folder(path), snapshot(model, optimizer, extra, process_group))
        )
        group = coordination_group(process_group)
        compare_ranks(state.fingerprint, group)
        _write(folder, state, group)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep_memory: bool = True,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> SaveFuture:
    """Save a checkpoint in the background: return as soon as this rank's shards are copied. All ranks call it.

    The shards are copied to CPU memory, pinned if they come from an accelerator. The next save, asynchronous or not,
    first waits for this one.

    Args:
        path: As for ``save``.
        model: As for ``save``.
        optimizer: As for ``save``.
        keep_memory: Keep the memory of the copy for the next call, as long as the model exists: the first use of new
            memory takes longer than the copy. False: free it when the checkpoint is written.
        process_group: As for ``save``.
        **extra: As for ``save``.

    Returns:
        A future. ``result()`` waits until the checkpoint is complete, and raises the errors of ``save``.

    Raises:
        CheckpointError: On all ranks, if the ranks hold different models.
        TypeError: On all ranks, if a value cannot be read back without running code.
        FullshardError: On the ranks that have called ``async_save``, if others do not call it.

    Example:
        ```python
        import torch
        from torch import nn
        import fullshard

        model = fullshard.fully_shard(nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        saving = fullshard.async_save("checkpoints/step-200", model, optimizer, step=200)
        # ... training continues ...
        saving.result()
        ```
    """
    wait_for_pending_save(process_group)
    with rank_barrier(describe_call("save", path, optimizer, extra), process_group) as barrier:
        folder, state = barrier.run_on_all(
            "collecting", lambda: (Folder(path), snapshot(model, optimizer, extra, process_group))
        )
        group = coordination_group(process_group, background=True)
        compare_ranks(state.fingerprint, group)
        memory = _memory.pop(model, {})
        staged = barrier.run_on_all("copying", lambda: state.stage(memory))
    owner = weakref.ref(model)

    def write() -> None:
        try:
            _write(folder, staged, group)
        finally:
            staged.entries.clear()  # an error, which the future keeps, holds on to this function
            alive = owner() if keep_memory else None
            if alive is None:
                memory.clear()
            else:
                _memory[alive] = memory

    return _save_in_background(write, process_group)


def describe_call(
    what: str, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]
) -> str:
    """Return a description of the call, which must be equal on all ranks: they communicate about these objects."""
    objects = [f"{name} ({type(value).__name__})" if _is_object(value) else name for name, value in extra.items()]
    parts = ["model", *(["optimizer"] if optimizer is not None else []), *objects]
    return f"{what} {os.fspath(path)} ({', '.join(parts)})"


def _is_object(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def _write(folder: Folder, state: Snapshot, group: dist.ProcessGroup | None) -> None:
    write_checkpoint(
        folder,
        state.entries,
        SavingRanks(group, f"cannot save the checkpoint {folder.path}"),
        aliases=state.aliases,
        about=state.about,
        wait=state.wait,
    )


# ---------------------------------------------------------------- in the background

_pending: dict[dist.ProcessGroup | None, SaveFuture] = {}
_memory: weakref.WeakKeyDictionary[nn.Module, StagingMemory] = weakref.WeakKeyDictionary()  # in no save's use


class SaveFuture(Future[None]):
    """Future of a background save.

    If the save fails and neither ``result()`` nor ``exception()`` was called, the next save or load of the same ranks
    warns.
    """

    observed: bool = False

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: Seconds to wait. None: no limit.

        Raises:
            TimeoutError: If the save is not over in time.
            CheckpointError: If the save failed, with all other errors of ``save``.
        """
        self.observed = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save is over, and return its error.

        Args:
            timeout: Seconds to wait. None: no limit.

        Returns:
            The error; None if the checkpoint is complete.

        Raises:
            TimeoutError: If the save is not over in time.
        """
        self.observed = True
        return super().exception(timeout)


def wait_for_pending_save(group: dist.ProcessGroup | None) -> None:
    """Wait for the background save of these ranks, if there is one."""
    key = resolve_group(group)
    pending = _pending.get(key)
    if pending is None:
        return
    observed, failure = pending.observed, pending.exception()
    _pending.pop(key, None)
    if failure is not None and not observed:
        warnings.warn(f"the previous async_save failed: {failure}", stacklevel=3)


def _save_in_background(body: Callable[[], None], group: dist.ProcessGroup | None) -> SaveFuture:
    future = SaveFuture()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            body()
        except BaseException as error:
            _clear_frames(error)
            future.set_exception(error)
        else:
            future.set_result(None)

    _pending[resolve_group(group)] = future
    # Not a daemon: the interpreter waits for the save before it exits.
    threading.Thread(target=run, name="fullshard-save", daemon=False).start()
    return future


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that led to it: they keep the staged copy alive."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
