"""Save a run while it trains: one checkpoint at a time, in the background, keeping only the newest few."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn

from fullshard import async_save
from fullshard import load as load_checkpoint
from fullshard.checkpoint.tools.offline import open_checkpoint
from fullshard.errors import CheckpointError
from fullshard.train import best_weights
from fullshard.train.checkpoint_folder import CHECKPOINTS, CheckpointFolder, step_of
from fullshard.train.position import Position, Setting


class Checkpoints:
    """The checkpoints of a run, on one of its ranks. All ranks call the same methods at the same steps."""

    every: int  # steps between checkpoints; 0: there are none
    _run: Path
    _folder: CheckpointFolder
    _keep: int
    _setting: Setting
    _leads: bool  # this rank removes old files and reports
    _say: Callable[[str], None]
    _pending: Future[None] | None
    _position: Position  # of the pending save, or the last one
    _complete: Position  # of the newest complete checkpoint
    _began: float

    def __init__(
        self, run: Path, *, every: int, keep: int, setting: Setting, leads: bool, say: Callable[[str], None]
    ) -> None:
        """Initialize without saving.

        Args:
            run: the run's folder, which every rank sees.
            every: steps between checkpoints; 0: none are saved.
            keep: number of checkpoints to keep.
            setting: the run's setting, saved with each checkpoint.
            leads: True on rank 0.
            say: called on rank 0 with a message about every complete checkpoint.
        """
        self.every = every
        self._run = run
        self._folder = CheckpointFolder(run / CHECKPOINTS)
        self._keep = keep
        self._setting = setting
        self._leads = leads
        self._say = say
        self._pending = None
        self._position = self._complete = Position()
        self._began = 0.0

    def are_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after optimizer step `step`."""
        return self.every > 0 and step % self.every == 0

    def resume_from(self, position: Position) -> None:
        """Set the position of the checkpoint that the run resumes from; its best weights are kept until there is a
        newer one.
        """
        self._position = self._complete = position

    @property
    def best_steps(self) -> Set[int]:
        """Steps of the best weights in the newest checkpoint, and in the one that is being written."""
        return {position.best.step for position in (self._complete, self._position) if position.best}

    @property
    def newest_step(self) -> int:
        """Step of the run's own newest complete checkpoint; 0 if there is none."""
        newest = self._folder.newest()
        return 0 if newest is None else step_of(newest)

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._pending is not None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Start to save; return as soon as this rank's shards are copied. Waits for the previous save.

        If that failed, for want of space for example, the run goes on, and this one is the next attempt.

        Raises:
            CheckpointError: on all ranks, if this checkpoint cannot be begun.
        """
        try:
            self.wait()
        except CheckpointError as error:  # on all ranks
            if self._leads:
                self._say(f"warning: the checkpoint after step {self._position.step} was not written: {error}")
                self._folder.remove_incomplete()  # all ranks have ended that save; what it has left takes up space
            self._pending, self._position = None, self._complete
        self._began = time.perf_counter()
        self._position = position
        self._pending = async_save(
            self._folder.of_step(position.step),
            model,
            optimizer,
            position=position.to_dict(),
            setting=self._setting.to_dict(),
        )

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete.

        Raises:
            CheckpointError: on all ranks, if it cannot be written.
        """
        if self._pending is not None:
            self._pending.result()
            self._finish()

    def poll(self) -> None:
        """If the pending checkpoint is complete, report it and remove files that are no longer needed.

        Ranks may see that at different steps, so this is no collective; failures are raised by `wait`.
        """
        if self._pending is not None and self._pending.done() and self._pending.exception() is None:
            self._finish()

    def _finish(self) -> None:
        self._pending, self._complete = None, self._position
        if self._leads:
            took = time.perf_counter() - self._began
            self._say(f"step {self._position.step}: checkpoint saved in {took:.1f} s")
            self._folder.keep(self._keep)
            best_weights.remove_replaced(self._run, self.best_steps)


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Position, Setting]:
    """Load a checkpoint of a run into model and optimizer with `fullshard.load`. All ranks call it.

    Raises:
        CheckpointError: on all ranks, if it cannot be read or does not match; nothing has changed then.
    """
    extra = load_checkpoint(checkpoint, model, optimizer)
    if not {"position", "setting"} <= extra.keys():
        raise CheckpointError(f"{checkpoint} was not written by fullshard train: it has no position of a run")
    return Position.from_dict(extra["position"]), Setting.from_dict(extra["setting"])


def find_corruption(checkpoint: Path) -> str:
    """Return an error if a checkpoint that could not be loaded is corrupted; empty if it is intact but does not match.

    Reads the whole checkpoint. Files that cannot be read, for lack of permission or of a server, are not corrupted.
    """
    try:
        for path in checkpoint.iterdir():
            with path.open("rb") as file:
                file.read(1)
        with open_checkpoint(checkpoint) as opened:
            return next(iter(opened.verify()), "")
    except OSError:
        return ""
    except CheckpointError as error:
        return str(error)
