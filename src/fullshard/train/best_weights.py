"""`best.safetensors`: the weights of the best validation so far, consistent with the run's checkpoints.

[Note: Best weights and checkpoints]
A run that is killed resumes from its last checkpoint, with the best validation of that checkpoint. If a better one came
after the checkpoint, its file must not stay: those steps are repeated, perhaps on other ranks and with another result.
So a file that is replaced stays beside the new one, named by its step, as long as the newest checkpoint, or the one
that is being written, refers to it. Otherwise it is removed at once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Set
from pathlib import Path

from fullshard.train.model import GPT
from fullshard.train.position import BestValidation
from fullshard.train.run_folder import BEST
from fullshard.train.weights import read_notes, save_full

STEP_KEY = "fullshard.train.step"  # in the file's metadata, as is
LOSS_KEY = "fullshard.train.validation_loss"  # nats per byte
REPLACED = re.compile(r"best-(\d+)\.safetensors")


def export(folder: Path, model: GPT, best: BestValidation, needed: Set[int] = frozenset(), *, leads: bool) -> None:
    """Write the weights of a new best validation. A collective, see `save_full`.

    Args:
        folder: the run's folder.
        model: sharded or not.
        best: step and loss, kept in the file.
        needed: steps of the best weights that checkpoints refer to; other replaced files are removed.
        leads: True on rank 0.
    """
    if leads:
        before = step_of(folder / BEST)
        if before is not None and before in needed and before != best.step:
            os.replace(folder / BEST, _replaced(folder, before))
        remove_replaced(folder, needed)
    notes = {STEP_KEY: str(best.step), LOSS_KEY: repr(best.loss)}
    save_full(folder / BEST, model, notes, leads=leads)


def restore(folder: Path, best: BestValidation | None) -> BestValidation | None:
    """Make the files consistent with the checkpoint that a run resumes from.

    Args:
        folder: the run's folder.
        best: best validation of the checkpoint.

    Returns:
        `best`, or None if its file is gone, so that the next validation is the best.
    """
    if best is not None and step_of(folder / BEST) != best.step:
        kept = _replaced(folder, best.step)
        if step_of(kept) == best.step:
            os.replace(kept, folder / BEST)
        else:
            best = None
    if best is None:
        (folder / BEST).unlink(missing_ok=True)
    remove_replaced(folder)
    return best


def copy_from(source: Path, folder: Path, best: BestValidation | None) -> None:
    """Copy the best weights of a checkpoint of the run in `source` to another run's folder."""
    if best is None:
        return
    for path in (source / BEST, _replaced(source, best.step)):
        if step_of(path) == best.step:
            shutil.copyfile(path, folder / BEST)
            return


def remove_replaced(folder: Path, needed: Set[int] = frozenset()) -> None:
    """Remove replaced files, except those of the steps in `needed`, which checkpoints refer to."""
    for path in folder.iterdir():
        match = REPLACED.fullmatch(path.name)
        if match and int(match[1]) not in needed:
            path.unlink()


def step_of(path: Path) -> int | None:
    """Return the step of the weights in a file; None if there is no such file."""
    step = read_notes(path).get(STEP_KEY, "")
    return int(step) if step.isdecimal() else None


def _replaced(folder: Path, step: int) -> Path:
    return folder / f"best-{step:08d}.safetensors"
