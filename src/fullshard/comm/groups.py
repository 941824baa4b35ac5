"""State kept per process group: groups made from it, and a count of its exchanges.

Kept here and not on meshes or transports: those may be collected on one rank earlier than on another, and
ranks that start a count or a group anew would no longer match the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.torch_version import TorchVersion

from fullshard.comm.hosts import RelayThread, Routes

__all__ = ["GroupRecord", "device_for", "part_of", "record_of"]

Part = tuple[tuple[int, ...], str]  # ranks and purpose


@dataclass
class GroupRecord:
    """The state that all ranks of one process group keep alike.

    Args:
        exchanges: Number of exchanges on the group so far.
        parts: Groups made from it, by ranks and purpose.
        routes: Which ranks of it share a host; None: not known yet.
        relays: The threads that pass messages of other hosts on: of launches, and of what waiting sends.
        made: Attempts per part. They are in its name, so that a second meets nothing that the first left in the store.
    """

    exchanges: int = 0
    parts: dict[Part, dist.ProcessGroup] = field(default_factory=dict)
    routes: Routes | None = None
    relays: dict[str, RelayThread] = field(default_factory=dict)
    made: Counter[Part] = field(default_factory=Counter)


_records: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()


def record_of(group: dist.ProcessGroup) -> GroupRecord:
    """Return the record of ``group``."""
    return _records.setdefault(group, GroupRecord())


def device_for(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """Return a device that ``group`` has a back end for: ``preferred`` if it does."""
    kinds = sorted(device.type for device in group._device_types)
    if preferred.type in kinds:
        return preferred
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def part_of(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    purpose: str,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Return a group of some ranks of ``group`` with separate communicators; the existing one if there is one.

    Args:
        group: The whole group. Only the ranks of the part have to call this function.
        ranks: Global ranks of the part, sorted, because a new group sorts them.
        purpose: Distinguishes parts of the same ranks.
        backend: Backend of the part. None: that of the default group.
        timeout: Timeout of collectives. None: that of ``group``.

    Returns:
        The process group of the part.
    """
    record, key = record_of(group), (tuple(ranks), purpose)
    if key not in record.parts or record.parts[key] not in distributed_c10d._world.pg_map:  # destroyed since
        world = dist.group.WORLD
        assert world is not None
        # A world bound to a device splits communicators off its own, in which all of its ranks have to take part.
        bound, world.bound_device_id = world.bound_device_id, None
        record.made[key] += 1  # also if that fails: what it left in the store is not met again
        try:
            with _name_of_next_group(f"{group.group_name} {key} {record.made[key]}"):
                record.parts[key] = dist.new_group(
                    ranks,
                    timeout or _timeout_of(group),
                    backend,
                    use_local_synchronization=True,
                    group_desc=f"fullshard {purpose}",
                )
        finally:
            world.bound_device_id = bound
    return record.parts[key]


# [Note: Names of groups]
# A group that only its members make is found by its name, which c10d makes of its ranks and of how many groups a rank
# is in. So ranks that are in different numbers of groups, because one of them logs or holds an expert, would wait for
# each other under different names. Parts are named after the group that they are a part of, which all members know.
# From torch 2.14 on c10d counts groups that only members make, too, and the count names the program's groups. Parts,
# which some ranks may make and others not, are taken out of it again.
_COUNTED = TorchVersion(torch.__version__) >= "2.14"
_name: ContextVar[str | None] = ContextVar("fullshard_name_of_next_group", default=None)


@contextlib.contextmanager
def _name_of_next_group(name: str) -> Iterator[None]:
    """Have c10d name a group that this thread makes within the block by ``name``, see [Note: Names of groups]."""
    if not hasattr(distributed_c10d._hash_ranks_to_str, "by_fullshard"):
        usual = distributed_c10d._hash_ranks_to_str

        def hashed(ranks: list[int]) -> str:
            wanted = _name.get()
            if wanted is None:
                return usual(ranks)
            distributed_c10d._world.group_count -= _COUNTED  # c10d adds one right after this
            return hashlib.sha1(wanted.encode(), usedforsecurity=False).hexdigest()

        hashed.by_fullshard = True  # type: ignore[attr-defined]
        distributed_c10d._hash_ranks_to_str = hashed
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of ``group``; None if none of its backends reports one."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
