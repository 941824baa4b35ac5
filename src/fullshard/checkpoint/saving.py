"""``fullshard.save`` and ``async_save``: every rank writes what it holds, and nothing is gathered."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.storage import StorageWriter

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.dcp import on_ranks
from fullshard.checkpoint.entry import entered
from fullshard.checkpoint.groups import coordination_group, resolved
from fullshard.checkpoint.planner import ALL, SavePlanner
from fullshard.checkpoint.snapshot import Snapshot, snapshot
from fullshard.checkpoint.storage import CheckpointWriter
from fullshard.checkpoint.together import DividingPlanner, DividingWriter

__all__ = ["SaveFuture", "async_save", "purpose", "save", "wait_for_last"]


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
            scheduler. Rank 0's count, where ranks differ. The states of random number generators are saved anyway,
            for each rank.

    Raises:
        CheckpointError: On all ranks, if one of them cannot write, or a value could not be read again.
        FullshardError: On the ranks that wait, if others do not save.
    """
    wait_for_last(process_group)
    with entered(purpose("save", path, optimizer, extra), process_group) as entry:
        taken = entry.together("collecting", lambda: snapshot(model, optimizer, extra, process_group))
        group = coordination_group(process_group)
        alike = agree(taken.common, group)
        _write(path, taken, group, storage_writer, alike=alike)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    storage_writer: StorageWriter | None = None,
    **extra: Any,
) -> SaveFuture:
    """As :func:`save`, but return as soon as this rank's shards are copied; they are written while training goes on.

    One copy of the shards is held in CPU memory until they are written, pinned if they come from an accelerator. A
    later save, asynchronous or not, first waits for this one.

    Returns:
        Its ``result()`` waits until the checkpoint is valid, and raises what :func:`save` would.
    """
    wait_for_last(process_group)
    with entered(purpose("save", path, optimizer, extra), process_group) as entry:
        taken = entry.together("collecting", lambda: snapshot(model, optimizer, extra, process_group))
        group = coordination_group(process_group, background=True)
        alike = agree(taken.common, group)
        staged = entry.together("copying", taken.staged)
    return _start(lambda: _write(path, staged, group, storage_writer, alike=alike), process_group)


def purpose(
    what: str, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]
) -> str:
    """What a rank enters for, in words: what ranks would communicate about has to be the same on all."""
    objects = [f"{name} ({type(value).__name__})" if _is_object(value) else name for name, value in extra.items()]
    parts = ["model", *(["optimizer"] if optimizer is not None else []), *objects]
    return f"{what} {os.fspath(path)} ({', '.join(parts)})"


def _is_object(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def _write(
    path: str | os.PathLike[str],
    taken: Snapshot,
    group: dist.ProcessGroup | None,
    writer: StorageWriter | None,
    *,
    alike: bool,
) -> None:
    planner = SavePlanner()
    if writer is None:
        planner = dividing = DividingPlanner(alike=alike)
        size = 1 if group is None else group.size()
        writer = DividingWriter(path, dividing, aliases=taken.aliases, about=taken.about, ranks=size)
    else:
        writer.reset(path)
    entries: dict[str, Any] = dict(taken.entries)
    if not isinstance(writer, CheckpointWriter):  # others know nothing of further names
        entries.update({name: entries[first] for name, first in taken.aliases.items()})
    with on_ranks(group, f"cannot save the checkpoint {os.fspath(path)}") as where:
        state_dict_saver.save({ALL: entries}, storage_writer=writer, planner=planner, **where)


# ---------------------------------------------------------------- in the background

_pending: dict[dist.ProcessGroup | None, SaveFuture] = {}


class SaveFuture(Future[None]):
    """A save in the background. Whoever waits for it hears of its failure, else the next save tells."""

    asked: bool = False

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is valid, and raise what went wrong."""
        self.asked = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, once it is over."""
        self.asked = True
        return super().exception(timeout)


def wait_for_last(group: dist.ProcessGroup | None) -> None:
    """Wait for the save of these ranks that is still under way."""
    key = resolved(group)
    last = _pending.get(key)
    if last is None:
        return
    asked, failure = last.asked, last.exception()
    _pending.pop(key, None)
    if failure is not None and not asked:
        warnings.warn(f"the last checkpoint was not saved: {failure}", stacklevel=3)


def _start(body: Callable[[], None], group: dist.ProcessGroup | None) -> SaveFuture:
    future = SaveFuture()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            body()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the copy
            future.set_exception(error)
        else:
            future.set_result(None)

    _pending[resolved(group)] = future
    # Not a daemon: a program that ends waits for its checkpoint.
    threading.Thread(target=run, name="fullshard-save", daemon=False).start()
    return future
