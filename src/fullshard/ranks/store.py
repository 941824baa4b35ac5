"""Coordination of the ranks of a group through the process groups' key-value store, which works while collectives hang.

[Note: Rendezvous]
A rendezvous is three keys of the store. Ranks *report* to the first, to which each appends a line, so that one request
reads the reports of all ranks. The second counts reports: who counts 1 was the first rank, and who counts the size of
the group the last. The third is the *result*. Any rank may propose one, the first proposal counts, and it is valid for
all ranks, also for one that looks later. So ranks never disagree on how a rendezvous ended.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from fullshard.errors import FullshardError
from fullshard.progress import PROGRESS
from fullshard.ranks.agreement import digest_of

__all__ = ["GroupStore", "Rendezvous", "seconds_from"]

_KEYS = _REPORTS, _COUNT, _RESULT, _LEFT = "reports", "count", "result", "left"
_UNSET = "unset"  # not JSON
_CHECK_S = 0.5  # without an answer, until it is looked whether the run has been ended

_T = TypeVar("_T")


class GroupStore:
    """The rendezvous of a group of ranks for one purpose, numbered; each rank counts for itself.

    Args:
        group: The ranks. Kept only by name. None: this process alone.
        purpose: Prefix that separates the keys of one group.
    """

    ranks: Sequence[int]  # global ranks of the group
    rank: int  # in the group
    global_rank: int
    lock: threading.RLock  # for threads that use it in turns
    name: str  # the prefix of its keys
    _default: Any
    _count: int

    def __init__(self, group: dist.ProcessGroup | None, purpose: str) -> None:
        self.ranks, self.rank, self.global_rank, self.name, self._default = [0], 0, 0, purpose, None
        self.lock, self._count = threading.RLock(), 0
        if group is not None:
            self.ranks, self.rank = dist.get_process_group_ranks(group), group.rank()
            self.global_rank = self.ranks[self.rank]
            self.name = f"fullshard/{purpose}/{digest_of((group.group_name, self.ranks)).hex()}"
            # Looked up here: ranks that are threads have separate default stores, and other threads may use this.
            self._default = dist.distributed_c10d._get_default_store()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, purpose: str) -> GroupStore:
        """Return the store of a group for a purpose, which continues to count."""
        if group is None:
            return cls(None, purpose)
        with _lock:
            stores = _stores.setdefault(group, {})
            if purpose not in stores:
                stores[purpose] = cls(group, purpose)
            return stores[purpose]

    @functools.cached_property
    def keys(self) -> Store:
        """The store, on a separate connection: a store is locked while a thread waits on it."""
        return PrefixStore(self.name, HashStore() if self._default is None else self._default.clone())

    def ask(self, request: Callable[[Any], _T]) -> _T:
        """Make a request on ``keys``, by a thread: where the machine of the store is gone, it never ends.

        Raises:
            FullshardError: If the watchdog has ended the run before there was an answer.
        """
        if self._default is None:
            return request(self.keys)
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(request(self.keys))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="fullshard request", daemon=True).start()
        while not concurrent.futures.wait([answer], _CHECK_S).done:
            if PROGRESS.failure is not None:
                raise FullshardError(PROGRESS.failure)
        return answer.result()

    def next_rendezvous(self) -> Rendezvous:
        """Return the next rendezvous. All ranks of the group call it for the same ones, in the same order."""
        self._count += 1
        return Rendezvous(self, self._count)


_lock = threading.Lock()
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupStore]] = weakref.WeakKeyDictionary()


class Rendezvous:
    """Reports of ranks, and one result for all of them; values are JSON. See [Note: Rendezvous].

    Args:
        store: The store of the ranks.
        number: Prefix that separates the keys of one store.
    """

    _store: GroupStore
    number: int

    def __init__(self, store: GroupStore, number: int) -> None:
        self._store, self.number = store, number

    def report(self, value: Any) -> int:
        """Add a report of this rank, and return how many there are."""
        line = json.dumps([self._store.global_rank, value]) + "\n"

        def add(keys: Any) -> int:
            keys.append(self._key(_REPORTS), line)
            return int(keys.add(self._key(_COUNT), 1))

        return self._store.ask(add)

    def reports(self) -> dict[int, Any]:
        """Return the last report of each rank that has made one, by global rank."""
        reports = [json.loads(line) for line in self._read(_REPORTS).splitlines()]
        return dict(sorted(reports, key=lambda report: report[0]))

    def propose(self, result: Any) -> Any:
        """Make ``result`` the result unless there is one, and return the one that counts."""
        return json.loads(self._store.ask(lambda keys: keys.compare_set(self._key(_RESULT), "", json.dumps(result))))

    def result(self) -> Any:
        """Return the result; None if there is none yet."""
        return json.loads(self._read(_RESULT) or "null")

    def leave(self) -> None:
        """Record that this rank needs no more of it; when all ranks have left, the keys are removed."""

        def leave(keys: Any) -> None:
            if keys.add(self._key(_LEFT), 1) == len(self._store.ranks):
                for key in _KEYS:
                    keys.delete_key(self._key(key))

        self._store.ask(leave)

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    def _read(self, name: str) -> bytes:
        # One request that never waits, which get() would if the key is not there.
        found: bytes = self._store.ask(lambda keys: keys.compare_set(self._key(name), _UNSET, _UNSET))
        return b"" if found == _UNSET.encode() else found


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
