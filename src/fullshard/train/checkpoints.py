"""Save a run in the background while it trains, and resume it from the newest checkpoint that is whole."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fullshard import async_save
from fullshard import load as load_checkpoint
from fullshard.checkpoint.tools.offline import open_checkpoint
from fullshard.errors import CheckpointError
from fullshard.train import checkpoint_folder
from fullshard.train.checkpoint_folder import CHECKPOINTS
from fullshard.train.config import ConfigError, TrainConfig
from fullshard.train.group import Group
from fullshard.train.setting import check_setting, setting_of


@dataclass(frozen=True)
class Position:
    """Progress of a run. The batches of later steps are a function of the seed and the step's number.

    Attributes:
        step: optimizer steps done.
        elapsed: seconds in the training loop, over all parts of the run.
    """

    step: int = 0
    elapsed: float = 0.0


@dataclass
class Checkpoints:
    """The checkpoints of a run, on one of its ranks. All ranks call the same methods at the same steps."""

    run: Path  # the run's folder, which every rank sees
    config: TrainConfig  # with known ranks and digest of the text
    leads: bool  # this rank removes old files and reports
    say: Callable[[str], None]  # told on rank 0 of every complete checkpoint
    saved_step: int | None = None  # of the last checkpoint that was begun or resumed from
    _pending: Future[None] | None = None
    _began: float = 0.0

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return self.run / CHECKPOINTS

    def are_due(self, step: int, *, last: bool = False) -> bool:
        """Return True if a checkpoint is due after optimizer step `step`, which may be the last of this process."""
        every = self.config.checkpoints.interval(self.config.training.steps)
        return every > 0 and self.saved_step != step and (last or step % every == 0)

    @property
    def newest_step(self) -> int:
        """Step of the run's own newest complete checkpoint; 0 if there is none."""
        newest = checkpoint_folder.newest(self.folder)
        return 0 if newest is None else checkpoint_folder.step_of(newest)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Start to save; return as soon as this rank's shards are copied. Waits for the previous save.

        If that failed, for want of space for example, the run goes on, and this one is the next attempt.

        Raises:
            CheckpointError: on all ranks, if this checkpoint cannot be begun.
        """
        try:
            self.wait()
        except CheckpointError as error:  # on all ranks
            if self.leads:
                self.say(f"warning: the checkpoint after step {self.saved_step} was not written: {error}")
                checkpoint_folder.remove_incomplete(self.folder)  # what it has left takes up space
        self._began = time.perf_counter()
        self.saved_step = position.step
        self._pending = async_save(
            checkpoint_folder.path_of(self.folder, position.step),
            model,
            optimizer,
            position=dataclasses.asdict(position),
            setting=setting_of(self.config),
        )

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete.

        Raises:
            CheckpointError: on all ranks, if it cannot be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            self._finish()

    def poll(self) -> None:
        """If the pending checkpoint is complete, report it and remove old ones.

        Ranks may see that at different steps, so this is no collective; failures are raised by `wait`.
        """
        if self._pending is not None and self._pending.done() and self._pending.exception() is None:
            self.wait()

    def _finish(self) -> None:
        if self.leads:
            took = time.perf_counter() - self._began
            self.say(f"step {self.saved_step}: checkpoint saved in {took:.1f} s")
            checkpoint_folder.keep(self.folder, self.config.checkpoints.keep)


def resume(
    checkpoint: Path | None,
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    group: Group,
) -> tuple[Path | None, Position, list[str]]:
    """Load a checkpoint into model and optimizer. All ranks call it and get the same result or error.

    If it is damaged and the run's own, it is set aside, and the one before it is loaded.

    Args:
        checkpoint: what to load; None to start from the beginning.
        run: the run's folder.
        model: sharded.
        optimizer: of the model; options of its groups stay those of the settings.
        config: the settings to resume with.
        group: the ranks.

    Returns:
        The checkpoint that was loaded, the position, and notes for the user.

    Raises:
        ConfigError: the checkpoint cannot be loaded, does not fit, or has done all steps.
    """
    notes: list[str] = []
    options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    while checkpoint is not None:
        try:
            extra = load_checkpoint(checkpoint, model, optimizer)
            break
        except CheckpointError as error:
            fall_back = functools.partial(_fall_back, checkpoint, run, str(error))
            checkpoint, note = group.from_rank0(fall_back)
            notes.append(note)
    if checkpoint is None:
        return None, Position(), notes
    if not {"position", "setting"} <= extra.keys():
        raise ConfigError(f"cannot resume: {checkpoint} was not written by fullshard train")
    for parameters, own in zip(optimizer.param_groups, options, strict=True):
        parameters.update(own)
    position = Position(extra["position"]["step"], extra["position"]["elapsed"])
    changed = check_setting(extra["setting"], config, checkpoint)
    is_own = checkpoint.parent.parent == run
    if position.step >= config.training.steps and not (is_own and position.step == config.training.steps):
        raise ConfigError(f"{checkpoint} is already at step {position.step}: to train further, raise --steps")
    return checkpoint, position, [*notes, f"resumed from step {position.step} ({checkpoint})", *changed]


def _fall_back(bad: Path, run: Path, problem: str) -> tuple[Path, str]:
    """After a checkpoint could not be loaded, return the previous one, and a note, if it is damaged.

    Raises:
        ConfigError: the checkpoint is whole (but does not fit), another run's, or the only one.
    """
    previous = checkpoint_folder.before(bad)
    text = f"cannot resume: {problem}"
    if not find_corruption(bad):
        raise ConfigError(text)
    if previous is None:
        raise ConfigError(f"{text}. There is no checkpoint before it; --fresh starts from the beginning")
    if bad.parent.parent != run:
        raise ConfigError(f"{text}. The one before it is {previous}: name that with --resume")
    aside = checkpoint_folder.set_aside(bad)
    return previous, f"{bad} is corrupted, and was renamed to {aside.name}: {problem}"


def find_corruption(checkpoint: Path) -> str:
    """Return an error if a checkpoint that could not be loaded is corrupted; empty if it is whole but does not fit.

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
