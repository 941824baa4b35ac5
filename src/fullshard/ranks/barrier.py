"""A barrier that names missing ranks: saves and loads are collective, and begin when all ranks have called the same
one.

[Note: Rank barrier]
Ranks synchronize through the key-value store of the process group and not in a collective of its back end: a collective
that a rank never joins ends in a timeout that names no rank, and a broken group. Barriers are numbered; each rank
counts for itself. A rank that arrives sets the name of its operation and increments a counter; the last one publishes
the result, and the others wait for it. A rank that has waited too long publishes a failure that names the missing
ranks. There is one result per barrier, the first one published, and it is valid for all ranks, also for one that
arrives late. So all ranks leave a barrier with the same result, and stay synchronized for the next.

A rank makes a handful of requests to the store per barrier, independent of the number of ranks; the names of operations
are read, by one rank, only in case of an error. The last rank that leaves a barrier removes its keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullshard import errors
from fullshard.errors import FullshardError

__all__ = [
    "BARRIER_TIMEOUT_VARIABLE",
    "STEP_TIMEOUT_S",
    "STEP_TIMEOUT_VARIABLE",
    "RankBarrier",
    "load_timeout",
    "rank_barrier",
]

T = TypeVar("T")

BARRIER_TIMEOUT_VARIABLE = "FULLSHARD_BARRIER_TIMEOUT_S"
STEP_TIMEOUT_VARIABLE = "FULLSHARD_STEP_TIMEOUT_S"
_BARRIER_TIMEOUT_S = 30.0  # a rank may be delayed by an evaluation, or by the end of another save
_LOAD_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 3600.0  # between steps, ranks read and write different amounts
_REPORT_S = 10.0  # for one rank to collect the names
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_REQUESTS_PER_S = 20_000  # to the store while all ranks wait
_MAX_PARTS_SHOWN = 12
_VOTE = 1 << 32  # added to the counter by a rank that votes yes
_KEYS = ("name", "mismatch", "arrived", "text", "leader", "result", "left")

_RAISED: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
_RAISED |= {name: getattr(errors, name) for name in errors.__all__}


class _BarrierResult(NamedTuple):
    """Result of a barrier, equal on all ranks."""

    kind: str  # "met", "missing", or the name of the exception to raise
    text: str = ""
    vote: bool = False  # True if any rank voted yes
    text_of_first: str = ""  # text from the first rank
    names: tuple[str, ...] = ()  # if ranks are missing: the operations of the others

    @property
    def error(self) -> Exception | None:
        """The exception that all ranks raise."""
        return None if self.kind == "met" else _RAISED.get(self.kind, FullshardError)(self.text)


class _StoreBarrier:
    """The numbered barriers of one group on one channel.

    Args:
        group: The ranks.
        store: Store with a prefix for this channel.
    """

    lock: threading.RLock
    _group: weakref.ref[dist.ProcessGroup]
    _store: Store
    _rank: int
    _size: int
    _next: int

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self.lock, self._group, self._store = threading.RLock(), weakref.ref(group), store
        self._rank, self._size, self._next = group.rank(), group.size(), 0

    def wait(
        self, name: str, timeout: float, hint: str, *, vote: bool = False, text_of_first: str = ""
    ) -> _BarrierResult:
        """Wait until all ranks have arrived.

        Args:
            name: Name of the operation: the same on all ranks, or all raise.
            timeout: Seconds to wait for the others.
            hint: Advice for the error if ranks are missing.
            vote: This rank's vote.
            text_of_first: Text to send to all ranks, if this rank is the first.

        Raises:
            FullshardError: If a rank did not arrive, arrived too late, or for another operation.
        """
        is_late = True
        with self._store_errors(name):
            while is_late:
                number, self._next = self._next, self._next + 1
                closed = self._store.check([f"{number}/result"])
                if text_of_first:
                    self._store.set(f"{number}/text", text_of_first)
                self._register(number, name, vote=vote)
                result = self._wait_for_result(number, name, timeout, hint)
                self._remove_keys(number)
                is_late = closed and result.kind == "missing"
                if is_late and name in result.names:
                    break  # else that was an operation that this rank skipped: try the next barrier
        if is_late:
            raise FullshardError(
                f"{name}: rank {self._global_rank} arrived after the others had timed out: {result.text}"
            )
        if result.error is not None:
            raise result.error
        return result

    def fail(self, name: str, error: BaseException) -> Exception:
        """Make the next barrier fail on all ranks with this rank's error, without waiting.

        Returns:
            The exception that all ranks raise: this error, or an earlier one.
        """
        kind, words = _describe_error(error)
        with self._store_errors(name):
            number, self._next = self._next, self._next + 1
            result = self._publish(number, _BarrierResult(kind, f"{name}: rank {self._global_rank}: {words}"))
            self._remove_keys(number)
        return result.error or FullshardError(f"{name}: rank {self._global_rank}: {words}")

    def clear(self) -> None:
        """Remove this rank's key from the store."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"rank/{self._rank}")

    # ---------------------------------------------------------------- one barrier

    def _register(self, number: int, name: str, *, vote: bool) -> None:
        store = self._store
        if store.compare_set(f"{number}/name", "", name).decode() != name:
            store.set(f"{number}/mismatch", "1")
        store.set(f"rank/{self._rank}", json.dumps([number, name]))
        names = store.add(f"{number}/arrived", 1 + (_VOTE if vote else 0))
        if names % _VOTE != self._size:
            return
        if store.check([f"{number}/mismatch"]):
            who = _list_names({what: ranks for what, ranks in self._ranks_by_name(number).items() if what})
            text = f"ranks called different functions: {who}. Call the same functions on all ranks, in the same order"
            self._publish(number, _BarrierResult("FullshardError", text))
        else:
            text_of_first = store.get(f"{number}/text").decode() if store.check([f"{number}/text"]) else ""
            self._publish(number, _BarrierResult("met", vote=names >= _VOTE, text_of_first=text_of_first))

    def _wait_for_result(self, number: int, name: str, timeout: float, hint: str) -> _BarrierResult:
        found = self._poll(number, timeout)
        if found is None and self._store.compare_set(f"{number}/leader", "", str(self._rank)).decode() == str(
            self._rank
        ):
            by_name = self._ranks_by_name(number)
            missing = by_name.pop("", [])
            if missing:  # else the last rank has just arrived, and publishes the result
                who = _list_names(by_name) if len(by_name) > 1 else f"{name}: reached by {_ranks(*by_name.values())}"
                text = f"{who}, but not by {_ranks(missing)} within {timeout:g} s. {hint}"
                return self._publish(number, _BarrierResult("missing", text, names=tuple(by_name)))
        if found is None:
            found = self._poll(number, _REPORT_S)
        if found is None:  # the rank that collects the names has ended
            text = f"{name}: not reached by all ranks within {timeout:g} s. {hint}"
            return self._publish(number, _BarrierResult("missing", text, names=(name,)))
        return found

    def _poll(self, number: int, seconds: float) -> _BarrierResult | None:
        # Not store.wait(): that locks the store, blocks signal handlers, and logs its timeouts.
        key, deadline, pause = f"{number}/result", time.monotonic() + seconds, _FIRST_POLL_S
        longest = max(_LAST_POLL_S, self._size / _REQUESTS_PER_S)
        while not self._store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, longest)
        return _parse_result(self._store.get(key))

    def _publish(self, number: int, result: _BarrierResult) -> _BarrierResult:
        """Publish a result unless there is one, and return the result that counts."""
        return _parse_result(self._store.compare_set(f"{number}/result", "", json.dumps(result)))

    def _ranks_by_name(self, number: int) -> dict[str, list[int]]:
        """Return ranks by the names of their operations; missing ranks are under ""."""
        by_name: dict[str, list[int]] = {}
        for rank in range(self._size):
            key, name = f"rank/{rank}", ""
            if self._store.check([key]):
                last, what = json.loads(self._store.get(key))
                name = what if last == number else ""
            by_name.setdefault(name, []).append(self._to_global(rank))
        return by_name

    def _remove_keys(self, number: int) -> None:
        if self._store.add(f"{number}/left", 1) == self._size:
            for key in _KEYS:
                self._store.delete_key(f"{number}/{key}")

    @property
    def _global_rank(self) -> int:
        return self._to_global(self._rank)

    def _to_global(self, rank: int) -> int:
        group = self._group()
        return rank if group is None else dist.get_global_rank(group, rank)

    @contextlib.contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise FullshardError(
                f"{name}: rank {self._global_rank} cannot reach the store of the process group; did the process that "
                f"serves it, usually rank 0, end? ({error})"
            ) from error


class RankBarrier:
    """A collective operation, divided into steps with a barrier after each; made by :func:`rank_barrier`.

    Args:
        name: Name of the operation, for errors.
        store_barrier: Barriers of the group; None: there is one rank.
        rank: Rank of this process in the group.
    """

    name: str
    rank: int
    _store_barrier: _StoreBarrier | None
    _failed: bool  # all ranks have raised

    def __init__(self, name: str, store_barrier: _StoreBarrier | None = None, rank: int = 0) -> None:
        self.name, self.rank, self._store_barrier, self._failed = name, rank, store_barrier, False

    def run_on_all(self, step: str, function: Callable[[], T], *, timeout: float | None = None) -> T:
        """Run a step on all ranks and wait until it is done on all. If it fails on one, it fails on all.

        Args:
            step: Name of the step, the same on all ranks.
            function: This rank's work. It must not call collectives, in which others would hang if it failed here.
            timeout: Seconds to wait for other ranks. None: the environment variable ``FULLSHARD_STEP_TIMEOUT_S``, or an
                hour.

        Returns:
            The result of ``function`` on this rank.

        Raises:
            ValueError, TypeError, FullshardError: The error of any rank's ``function``, with that rank's number; other
                exceptions as FullshardError.
        """
        value = self._run_step(step, function)
        self._wait(step, timeout)
        return value

    def any_rank(self, step: str, function: Callable[[], bool]) -> bool:
        """Return True on all ranks if ``function`` returns True on any rank. Raises as :meth:`run_on_all`."""
        value = self._run_step(step, function)
        result = self._wait(step, vote=value)
        return value if result is None else result.vote

    def from_first_rank(self, step: str, function: Callable[[], str]) -> str:
        """Run ``function`` on the group's first rank only, and return its result on all ranks.

        The text is sent through the store, so it must be small. Raises as :meth:`run_on_all`.
        """
        value = self._run_step(step, function) if self.rank == 0 else ""
        result = self._wait(step, text_of_first=value)
        return value if result is None else result.text_of_first

    def _run_step(self, step: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:
            self._failed = True
            if self._store_barrier is not None:
                raise self._store_barrier.fail(f"{self.name}, {step}", error) from error
            if type(error).__name__ in _RAISED:
                raise
            raise FullshardError(f"{self.name}, {step}: {_describe_error(error)[1]}") from error

    def _wait(
        self, step: str, timeout: float | None = None, *, vote: bool = False, text_of_first: str = ""
    ) -> _BarrierResult | None:
        if self._store_barrier is None:
            return None
        hint = (
            "If they are still working, raise the timeout with the environment variable "
            f"{STEP_TIMEOUT_VARIABLE} (seconds); if they hang or have ended, see their own output"
        )
        seconds = _timeout_s(timeout, STEP_TIMEOUT_VARIABLE, STEP_TIMEOUT_S)
        try:
            return self._store_barrier.wait(
                f"{self.name}, {step}", seconds, hint, vote=vote, text_of_first=text_of_first
            )
        except BaseException as error:
            self._failed = isinstance(error, Exception)
            raise

    def close(self, error: BaseException | None) -> None:
        """Wait until all ranks are done, or fail the operation on all ranks if this one has raised."""
        if self._store_barrier is None or self._failed:
            return
        if error is None:
            self._wait("done")
        else:
            self._store_barrier.fail(self.name, error)


_lock = threading.Lock()
_store_barriers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _StoreBarrier]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def rank_barrier(
    name: str, group: dist.ProcessGroup | None = None, *, channel: str = "", timeout: float | None = None
) -> Iterator[RankBarrier]:
    """Run a block on all ranks of a group together, with a barrier at its beginning and end.

    Barriers use the store, not a collective of the back end. If the block raises on one rank, the others raise at the
    next step of the :class:`RankBarrier`, or at the end::

        with rank_barrier(f"save {path}", group) as barrier:
            plan = barrier.run_on_all("plan", make_plan)    # fails on all ranks if it fails on one
            barrier.run_on_all("write", lambda: write(plan))

    Args:
        name: Name of the operation with its arguments, such as "save /runs/7": the same on all ranks.
        group: The ranks. None: the default group, or this process alone if there is none.
        channel: Separates concurrent operations, such as background saves in other threads.
        timeout: Seconds to wait for the other ranks. None: the environment variable ``FULLSHARD_BARRIER_TIMEOUT_S``, or
            30.

    Raises:
        FullshardError: On all ranks that have arrived, if others are missing after the timeout (with the ranks of
            both); on these others when they arrive; on all, if they have called different functions.
        ValueError: If this process is not in the group, or the timeout is invalid.
    """
    seconds = _timeout_s(timeout, BARRIER_TIMEOUT_VARIABLE, _BARRIER_TIMEOUT_S)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        yield RankBarrier(name)
        return
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not in the process group; call it only on the group's ranks"
        )
    found = dist.group.WORLD if group is None else group
    assert found is not None
    if found.size() == 1:
        yield RankBarrier(name)
        return
    store_barrier = _store_barrier_of(found, channel)
    with store_barrier.lock:
        barrier = RankBarrier(name, store_barrier, found.rank())
        hint = (
            "All ranks must call it, in the same order; look for control flow that depends on the rank, and for ranks "
            "that have failed. If they are only slow, raise the timeout with the environment variable "
            f"{BARRIER_TIMEOUT_VARIABLE} (seconds)"
        )
        try:
            store_barrier.wait(name, seconds, hint)
            try:
                yield barrier
            except BaseException as error:
                barrier.close(error)
                raise
            barrier.close(None)
        finally:
            store_barrier.clear()


def load_timeout() -> float:
    """Return the timeout of loading, in seconds: it is longer because start-up times of ranks differ."""
    return _timeout_s(None, BARRIER_TIMEOUT_VARIABLE, _LOAD_TIMEOUT_S)


def _store_barrier_of(group: dist.ProcessGroup, channel: str) -> _StoreBarrier:
    with _lock:
        known = _store_barriers.setdefault(group, {})
        if channel not in known:
            store = dist.distributed_c10d._get_default_store()
            if hasattr(store, "clone"):  # a separate connection: a store is locked while a thread waits on it
                store = store.clone()
            ranks = ",".join(str(rank) for rank in dist.get_process_group_ranks(group))
            digest = hashlib.blake2b(f"{group.group_name}\0{ranks}".encode(), digest_size=8).hexdigest()
            known[channel] = _StoreBarrier(group, PrefixStore(f"fullshard/barrier/{digest}/{channel}", store))
        return known[channel]


def _describe_error(error: BaseException) -> tuple[str, str]:
    """Return the name of the exception to raise on other ranks, and its message."""
    kind = type(error).__name__
    return (kind, str(error)) if kind in _RAISED else (FullshardError.__name__, f"{kind}: {error}")


def _parse_result(result: bytes) -> _BarrierResult:
    kind, text, vote, text_of_first, names = json.loads(result)
    return _BarrierResult(kind, text, vote, text_of_first, tuple(names))


def _list_names(text_of_first: Mapping[str, Sequence[int]]) -> str:
    parts = [
        f"{name!r} on {_ranks(ranks)}" for name, ranks in itertools.islice(text_of_first.items(), _MAX_PARTS_SHOWN)
    ]
    more = len(text_of_first) - len(parts)
    return "; ".join(parts) + (f"; and {more} others on other ranks" if more else "")


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks such as "ranks 0, 3-7", with at most a few spans."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans[:_MAX_PARTS_SHOWN]]
    more = sum(b - a + 1 for a, b in spans[_MAX_PARTS_SHOWN:])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts) + (f" and {more} more" if more else "")


def _timeout_s(seconds: float | None, variable: str, default: float) -> float:
    value = os.environ.get(variable, default) if seconds is None else seconds
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        what = f"the environment variable {variable}" if seconds is None else "timeout"
        raise ValueError(f"{what}: expected a positive number of seconds, found {value!r}")
    return number
