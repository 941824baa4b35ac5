"""What is kept per process group: groups made from it, and a count of what was exchanged.

Kept here and not on meshes or transports: those may be collected on one rank earlier than on another, and a group, or a
count, that only some ranks start anew does not match the others'.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

__all__ = ["GroupRecord", "part_of", "record_of"]


@dataclass
class GroupRecord:
    """See the module docstring.

    Args:
        exchanges: Number of exchanges on the group so far.
        parts: Groups made from it, by ranks and purpose.
    """

    exchanges: int = 0
    parts: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(default_factory=dict)


_records: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()


def record_of(group: dist.ProcessGroup) -> GroupRecord:
    """The record of ``group``."""
    return _records.setdefault(group, GroupRecord())


def part_of(group: dist.ProcessGroup, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """A group of some ranks of ``group``, with communicators of its own and the same timeout; the one made before if
    there is one.

    Args:
        group: Every rank of the part calls this, others need not.
        ranks: Global ranks, sorted: a new group sorts them.
        purpose: Keeps parts of the same ranks apart.
    """
    parts, key = record_of(group).parts, (tuple(ranks), purpose)
    if key not in parts:
        world = dist.group.WORLD
        assert world is not None
        # A world bound to a device splits communicators off its own, in which all of its ranks have to take part.
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            parts[key] = dist.new_group(
                ranks, _timeout_of(group), use_local_synchronization=True, group_desc=f"fullshard {purpose}"
            )
        finally:
            world.bound_device_id = bound
    return parts[key]


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of ``group``; None if no back end of it tells."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
