"""The part of the process groups' key-value store that belongs to one group of ranks and one purpose."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from fullshard.ranks.agreement import digest_of

__all__ = ["GroupStore", "seconds_from"]

_UNSET = "unset"  # not JSON


class GroupStore:
    """Keys of a group of ranks: each rank posts its state, and a value that is decided once is valid for all ranks.

    Args:
        group: The ranks. Kept only by name. None: this process alone.
        purpose: Prefix that separates the keys of one group.
    """

    rank: int
    ranks: Sequence[int]  # global ranks of the group
    lock: threading.RLock  # for threads that use it in turns
    _prefix: str
    _default: Any
    _count: int

    def __init__(self, group: dist.ProcessGroup | None, purpose: str) -> None:
        self.rank, self.ranks, self._prefix, self._default = 0, [0], purpose, None
        self.lock, self._count = threading.RLock(), 0
        if group is not None:
            self.rank, self.ranks = group.rank(), dist.get_process_group_ranks(group)
            self._prefix = f"fullshard/{purpose}/{digest_of((group.group_name, self.ranks)).hex()}"
            # Looked up here: ranks that are threads have separate default stores, and other threads may use this.
            self._default = dist.distributed_c10d._get_default_store()

    @functools.cached_property
    def keys(self) -> Store:
        """The store, on a separate connection: a store is locked while a thread waits on it."""
        return PrefixStore(self._prefix, HashStore() if self._default is None else self._default.clone())

    @property
    def global_rank(self) -> int:
        """This process."""
        return self.ranks[self.rank]

    def next_number(self) -> int:
        """Count, from 0, what all ranks do in the same order."""
        self._count += 1
        return self._count - 1

    def post(self, state: Any) -> None:
        """Replace this rank's state, a JSON value."""
        self.keys.set(f"rank/{self.rank}", json.dumps(state))

    def posted(self) -> dict[int, Any]:
        """Return the states of all ranks that have posted one, by global rank."""
        found = {rank: self.decision(f"rank/{index}") for index, rank in enumerate(self.ranks)}
        return {rank: state for rank, state in found.items() if state is not None}

    def decide(self, key: str, value: Any) -> Any:
        """Set ``key`` unless another rank has, and return its value."""
        return json.loads(self.keys.compare_set(key, "", json.dumps(value)))

    def decision(self, key: str) -> Any:
        """Return the value of ``key``; None if it is not set."""
        # One request: after a check, another rank may remove the key, and get() would wait for it.
        found = self.keys.compare_set(key, _UNSET, _UNSET)
        return None if found == _UNSET.encode() else json.loads(found)

    def clear(self, *keys: str) -> None:
        """Remove this rank's state and ``keys``."""
        with contextlib.suppress(RuntimeError):
            for key in (f"rank/{self.rank}", *keys):
                self.keys.delete_key(key)


def seconds_from(variable: str, default: float, *, allow_zero: bool = False) -> float:
    """Return a number of seconds from an environment variable.

    Raises:
        ValueError: If it is not a positive number, or zero if that is allowed.
    """
    value = os.environ.get(variable, default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (seconds >= 0 if allow_zero else seconds > 0) or seconds == math.inf:
        expected = "a number of seconds, or 0 to disable it" if allow_zero else "a positive number of seconds"
        raise ValueError(f"the environment variable {variable}: expected {expected}, found {value!r}")
    return seconds
