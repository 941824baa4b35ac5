"""Save a run in the background while it trains, and load a checkpoint to resume it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard import async_save
from fullshard import load as load_checkpoint
from fullshard.errors import CheckpointError
from fullshard.train.config import ConfigError
from fullshard.train.run_folder import complete_checkpoints, keep_newest, remove_incomplete


@dataclass
class Checkpoints:
    """The checkpoints of a run, on one of its ranks. All ranks call the same methods at the same steps."""

    folder: Path  # of the checkpoints, which every rank sees
    every: int  # steps; 0: never
    keep: int  # number of complete checkpoints
    is_rank0: bool  # this rank removes old files
    say: Callable[[str], None]  # told of every complete checkpoint
    step: int  # of the last checkpoint that was begun or resumed from; 0: there is none
    _pending: Future[None] | None = None
    _began: float = 0.0

    def are_due(self, step: int, *, last: bool = False) -> bool:
        """Return True if a checkpoint is due after optimizer step `step`, which may be the last of this process."""
        return self.every > 0 and self.step != step and (last or step % self.every == 0)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **position: Any) -> None:
        """Start to save; return as soon as this rank's shards are copied. Waits for the previous save.

        If that failed, for want of space for example, the run goes on, and this one is the next attempt.
        `load_position` returns step and position.

        Raises:
            CheckpointError: on all ranks, if this checkpoint cannot be begun.
        """
        try:
            self.wait()
        except CheckpointError as error:  # on all ranks
            self.say(f"warning: the checkpoint after step {self.step} was not written: {error}")
            if self.is_rank0:
                remove_incomplete(self.folder)  # what it has left takes up space
        self._began, self.step = time.perf_counter(), step
        path = self.folder / f"step-{step:08d}"
        self._pending = async_save(path, model, optimizer, position={"step": step, **position})

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete, and remove old ones.

        Raises:
            CheckpointError: on all ranks, if it cannot be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            self.say(f"step {self.step}: checkpoint saved in {time.perf_counter() - self._began:.1f} s")
            if self.is_rank0:
                keep_newest(self.folder, self.keep)

    def poll(self) -> None:
        """Report the pending checkpoint and remove old ones if it is complete, which ranks may see at different steps.

        This is no collective: failures are raised by `wait`.
        """
        if self._pending is not None and self._pending.done() and self._pending.exception() is None:
            self.wait()


def load_position(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer. All ranks call it and get the same result or error.

    Options of the optimizer's groups stay those of the settings.

    Returns:
        The position that was saved: `step`, and what else `save` was given as `position`.

    Raises:
        ConfigError: the checkpoint is damaged, does not fit, or is not one of `fullshard train`. The message names the
            older complete checkpoints: which of them is good enough is the user's choice.
    """
    options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    try:
        extra = load_checkpoint(checkpoint, model, optimizer)
    except CheckpointError as error:
        complete = complete_checkpoints(checkpoint.parent)
        older = ", ".join(str(path) for path in itertools.takewhile(lambda path: path != checkpoint, complete))
        advice = (
            f"Older checkpoints: {older}. Start from one of them with --resume PATH and another --name"
            if older
            else "There is no older checkpoint: choose another --name to start from the beginning"
        )
        raise ConfigError(f"cannot resume: {error}. {advice}") from error
    if "position" not in extra:
        raise ConfigError(f"cannot resume: {checkpoint} was not written by fullshard train")
    for parameters, own in zip(optimizer.param_groups, options, strict=True):
        parameters.update(own)
    return dict(extra["position"])
