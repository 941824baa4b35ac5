"""The ranks that save and load together, and a communicator of their own for what they tell each other meanwhile."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullshard.checkpoint.entry import STEP_PATIENCE_S, STEP_PATIENCE_VARIABLE
from fullshard.errors import CheckpointError

__all__ = ["coordination_group", "resolved"]

_made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def resolved(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that None stands for; None without process groups."""
    if group is None and dist.is_initialized():
        return dist.group.WORLD
    return group


def coordination_group(group: dist.ProcessGroup | None, *, background: bool = False) -> dist.ProcessGroup | None:
    """The same ranks with a gloo communicator of their own. All of them call it; it is made in the first call.

    Training may go on in the other one meanwhile; plans are no business of an accelerator; and its time limit is that
    of saving, where one rank may have much more to write than another, and not that of a collective in a step. Of a
    part of the ranks one is made only for the ``background``, where it has to be: see below.

    Raises:
        CheckpointError: On all ranks, if torch cannot make one.
    """
    found = resolved(group)
    if found is None:
        return None
    world = dist.distributed_c10d._world.pg_map
    for old in [old for old, new in _made.items() if new not in world]:  # destroyed since
        del _made[old]
    if found in _made:
        return _made[found]
    limit = timedelta(seconds=float(os.environ.get(STEP_PATIENCE_VARIABLE, STEP_PATIENCE_S)))
    if found is dist.group.WORLD:
        _made[found] = dist.new_group(backend="gloo", timeout=limit)
    elif background:
        _made[found] = _of_some_ranks(found, limit)
    else:
        return found
    return _made[found]


def _of_some_ranks(group: dist.ProcessGroup, limit: timedelta) -> dist.ProcessGroup:
    # Made by its own ranks only, a group is named by the number of groups that a rank is in. Where that differs, the
    # ranks would wait for groups of different names.
    numbers: list[Any] = [None] * group.size()
    dist.all_gather_object(numbers, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(numbers)) > 1:
        raise CheckpointError(
            "the ranks of this process_group are in different numbers of process groups, so torch cannot make them "
            "another one for saving in the background; use save()"
        )
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=limit, use_local_synchronization=True)
    return made
