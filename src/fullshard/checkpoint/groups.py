"""The ranks that save and load together, and a communicator of their own for what they tell each other meanwhile."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from fullshard.checkpoint.entry import STEP_PATIENCE_S, STEP_PATIENCE_VARIABLE
from fullshard.transport import part_of

__all__ = ["coordination_group", "resolved"]


def resolved(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that None stands for; None without process groups."""
    if group is None and dist.is_initialized():
        return dist.group.WORLD
    return group


def coordination_group(group: dist.ProcessGroup | None, *, background: bool = False) -> dist.ProcessGroup | None:
    """The same ranks with a gloo communicator of their own. All of them call it; it is made in the first call.

    Training may go on in the other one meanwhile; plans are no business of an accelerator; and its time limit is that
    of saving, where one rank may have much more to write than another, and not that of a collective in a step. Of a
    part of the ranks one is made only for the ``background``, where it has to be.
    """
    found = resolved(group)
    if found is None:
        return None
    if found is not dist.group.WORLD and not background:
        return found
    limit = timedelta(seconds=float(os.environ.get(STEP_PATIENCE_VARIABLE, STEP_PATIENCE_S)))
    return part_of(found, dist.get_process_group_ranks(found), "checkpoint", backend="gloo", timeout=limit)
