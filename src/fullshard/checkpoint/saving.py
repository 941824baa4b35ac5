"""``fullshard.save`` and ``async_save``: every rank writes what it holds, and nothing is gathered."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.storage import StorageWriter

from fullshard.checkpoint.dcp import on_ranks
from fullshard.checkpoint.entry import entered
from fullshard.checkpoint.optimizer_state import agree_on_state
from fullshard.checkpoint.planner import ALL, SavePlanner
from fullshard.checkpoint.snapshot import Snapshot, snapshot
from fullshard.checkpoint.storage import CheckpointWriter

__all__ = ["async_save", "save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_writer: StorageWriter | None = None,
    **extra: Any,
) -> None:
    """Save a checkpoint. All ranks call it; each writes the shards that it holds.

    It becomes valid at once, at the very end: whenever the process is killed, ``path`` holds the checkpoint that was
    there before, or this one. It can be loaded on another number of ranks, into a model of the other front end, or
    wrapped otherwise.

    Args:
        path: A folder, or a URL that fsspec knows. A checkpoint that is there is replaced.
        model: Of either front end, DistributedDataParallel or plain; between steps. Saved are its parameters,
            persistent buffers and extra state.
        optimizer: On its parameters. Saved are its state and the options of its groups.
        process_group: The ranks. None: all.
        storage_writer: Writes instead of fullshard's own writer, in a format of its own; ``path`` is passed to it.
        extra: What else to save, by name: values, tensors, or objects with a state dict such as a learning rate
            scheduler. Equal on all ranks. The states of random number generators are saved anyway, for each rank.

    Raises:
        CheckpointError: On all ranks, if one of them cannot write, or a value could not be read again.
        FullshardError: On the ranks that wait, if others do not save.
    """
    wait_for_last(process_group)
    with entered(f"save {os.fspath(path)}", process_group) as entry:
        taken = entry.together("collecting", lambda: snapshot(model, optimizer, extra, process_group))
        _agree(taken, process_group)
        _write(path, taken, process_group, storage_writer)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_writer: StorageWriter | None = None,
    **extra: Any,
) -> Future[None]:
    """As :func:`save`, but return as soon as this rank's shards are copied; they are written while training goes on.

    One copy of the shards is held in CPU memory until they are written, pinned if they come from an accelerator. A
    later save, asynchronous or not, first waits for this one.

    Returns:
        Its ``result()`` waits until the checkpoint is valid, and raises what :func:`save` would.
    """
    wait_for_last(process_group)
    with entered(f"save {os.fspath(path)}", process_group) as entry:
        taken = entry.together("collecting", lambda: snapshot(model, optimizer, extra, process_group))
        _agree(taken, process_group)
        staged = entry.together("copying", taken.staged)
        group = _group_for_writing(process_group)
    return _start(lambda: _write(path, staged, group, storage_writer), process_group)


def _agree(taken: Snapshot, group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        for state in taken.states:
            agree_on_state(state, group)


def _write(
    path: str | os.PathLike[str],
    taken: Snapshot,
    group: dist.ProcessGroup | None,
    writer: StorageWriter | None,
) -> None:
    if writer is None:
        writer = CheckpointWriter(path, aliases=taken.aliases, about=taken.about)
    else:
        writer.reset(path)
    entries: dict[str, Any] = dict(taken.entries)
    if not isinstance(writer, CheckpointWriter):  # others know nothing of further names
        entries.update({name: entries[first] for name, first in taken.aliases.items()})
    with on_ranks(group, f"cannot save the checkpoint {os.fspath(path)}") as where:
        state_dict_saver.save({ALL: entries}, storage_writer=writer, planner=SavePlanner(), **where)


# ---------------------------------------------------------------- in the background

_pending: dict[dist.ProcessGroup | None, Future[None]] = {}
_writing_groups: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}


def wait_for_last(group: dist.ProcessGroup | None) -> None:
    """Wait for the save of these ranks that is still under way. Its failure is for whoever holds its future."""
    last = _pending.pop(group, None)
    if last is not None:
        last.exception()


def _start(body: Callable[[], None], group: dist.ProcessGroup | None) -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            body()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    # Not a daemon: a program that ends waits for its checkpoint.
    threading.Thread(target=run, name="fullshard-save", daemon=False).start()
    _pending[group] = future
    return future


def _group_for_writing(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The same ranks with a communicator of their own: training goes on in the other one meanwhile."""
    if not dist.is_initialized():
        return None
    known = _writing_groups.get(group)
    # After destroy_process_group and a new start, a group of old is no group any more.
    if known is None or known not in dist.distributed_c10d._world.pg_map:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        known = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _writing_groups[group] = known
    return known
