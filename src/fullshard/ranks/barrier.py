"""A barrier that raises on all ranks what one raises: saves and loads begin when all ranks have called the same one.

[Note: Rank barrier]
Ranks synchronize through the key-value store of the process group and not in a collective of its backend: on an
accelerator that would be one of training, which the collectives of a rank that did not come match by chance, and a
group for it has to be made by all ranks. A barrier is four keys of the store. Each rank that arrives appends the name
of its operation to the first, so that one request reads the reports of all ranks, and counts itself in the second. The
third is the result: a rank that fails proposes its error, and the last rank to arrive proposes what the names say. The
first proposal counts for all ranks, also for one that looks later. So all ranks leave a barrier with the same result,
and stay synchronized for the next. The fourth counts those that have left, of which the last removes the keys. A rank
makes a handful of requests per barrier, whatever the number of ranks.

Whether the others will come is for the watchdog to find out, as for every wait of the training thread: a rank that
evaluates or writes for long is waited for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fullshard.errors import FullshardError
from fullshard.progress import PROGRESS
from fullshard.ranks.agreement import describe_error, error_from, list_ranks, list_values, own_rank, resolve_group
from fullshard.ranks.store import prefix_of, read, seconds_from
from fullshard.ranks.watchdog import watch

__all__ = ["STEP_TIMEOUT_VARIABLE", "RankBarrier", "rank_barrier", "step_timeout"]

T = TypeVar("T")
_Result = tuple[str, str]  # exception or "", and its message

STEP_TIMEOUT_VARIABLE = "FULLSHARD_STEP_TIMEOUT_S"
_STEP_TIMEOUT_S = 3600.0  # ranks read and write different amounts
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_REQUESTS_PER_S = 20_000  # to the store while all ranks wait
_CHECK_S = 0.5  # without an answer, until it is looked whether the run has been ended
_KEYS = ("reports", "count", "result", "left")  # see [Note: Rank barrier]


class _BarrierStore:
    """The keys of a group's barriers, numbered; each rank counts for itself.

    Args:
        group: The ranks. Kept only by name.
    """

    ranks: Sequence[int]  # global ranks of the group
    name: str  # the prefix of its keys
    lock: threading.RLock  # for threads that use it in turns
    count: int  # of the barriers that this rank has come to
    _default: Any

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.name = dist.get_process_group_ranks(group), prefix_of(group, "barrier")
        self.lock, self.count = threading.RLock(), 0
        # Looked up here: ranks that are threads have separate default stores, and other threads may use this.
        self._default = dist.distributed_c10d._get_default_store()

    @functools.cached_property
    def keys(self) -> Store:
        """The store, on a separate connection: a store is locked while a thread waits on it."""
        return PrefixStore(self.name, self._default.clone())

    def meet(self, number: int, rank: int, name: str, result: _Result | None, seconds: float) -> _Result:
        """Report to a barrier, and return its result when it has one.

        Args:
            number: The barrier.
            rank: Global number of this rank.
            name: Name of its operation and step.
            result: Its error; None: it has none, and waits for the others.
            seconds: Limit of the wait.
        """
        keys: Any = self.keys
        own_keys = [f"{number}/{key}" for key in _KEYS]
        reports, count, decided, left = own_keys
        keys.append(reports, json.dumps([rank, name]) + "\n")
        arrived = int(keys.add(count, 1))
        deadline = time.monotonic() + seconds
        # Not store.wait(), which logs its timeouts.
        pause, longest = _FIRST_POLL_S, max(_LAST_POLL_S, len(self.ranks) / _REQUESTS_PER_S)
        while result is None and arrived < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.5 * pause, longest)
            result = json.loads(read(keys, decided) or "null")
        if result is None:
            called = sorted(json.loads(line) for line in read(keys, reports).splitlines())
            result = _result_of(dict(called), self.ranks, seconds)
        kind, message = json.loads(keys.compare_set(decided, "", json.dumps(result)))
        if keys.add(left, 1) == len(self.ranks):
            for key in own_keys:
                keys.delete_key(key)
        return kind, message


_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, _BarrierStore] = weakref.WeakKeyDictionary()
_stores_lock = threading.Lock()


class RankBarrier:
    """A collective operation, divided into steps with a barrier after each; made by ``rank_barrier``.

    Args:
        name: Name of the operation, for errors.
        rank: This process, in its group.
        store: The barriers of the group; None: of a single rank.
    """

    name: str
    rank: int
    failed: bool  # all ranks have raised, or will
    _store: _BarrierStore | None

    def __init__(self, name: str, rank: int, store: _BarrierStore | None) -> None:
        self.name, self.rank, self._store, self.failed = name, rank, store, False

    def run_on_all(self, step: str, function: Callable[[], T]) -> T:
        """Run a step on all ranks and wait until it is done on all. If it fails on one, it fails on all.

        Args:
            step: Name of the step, the same on all ranks.
            function: This rank's work. It must not call collectives, in which others would hang if it failed here.

        Returns:
            The result of ``function`` on this rank.

        Raises:
            ValueError, TypeError, FullshardError: The error of any rank's ``function``, with that rank's number; other
                exceptions as FullshardError.
        """
        try:
            value = function()
        except Exception as error:
            failure = self.fail(error, step)
            if self._store is None and type(failure) is type(error):
                raise  # without the number of the rank
            raise failure from error
        self.wait(step)
        return value

    def wait(self, step: str = "") -> None:
        """Wait until all ranks have arrived at the same step.

        Raises:
            FullshardError: If ranks arrive for different operations or steps, or some will not come.
        """
        kind, message = self._meet(step)
        if kind:
            self.failed = True
            raise error_from(kind, message)

    def fail(self, error: BaseException, step: str = "") -> Exception:
        """Make the next barrier fail on all ranks with this rank's error, without waiting.

        Returns:
            The exception that all ranks raise: this error, or an earlier one.
        """
        kind, message = self._meet(step, describe_error(error))
        self.failed = True
        return error_from(kind or FullshardError.__name__, message)

    def _meet(self, step: str, failure: _Result | None = None) -> _Result:
        """Arrive at the next barrier, with an error or without, and return its result."""
        name, store = f"{self.name}, {step}" if step else self.name, self._store
        rank = own_rank()
        result = None if failure is None else (failure[0], f"{name}: rank {rank}: {failure[1]}")
        if store is None:
            return result or ("", "")
        store.count += 1
        PROGRESS.barriers[store.name] = store.ranks, store.count
        with self._explained(), PROGRESS.in_barrier(name, store.name, store.count):
            return _by_thread(partial(store.meet, store.count, rank, name, result, step_timeout()))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Record that other ranks raise as well if the block does, and explain errors of the store."""
        try:
            yield
        except Exception as error:
            self.failed = True
            if not isinstance(error, dist.DistError):
                raise
            cause = PROGRESS.explained(error) if PROGRESS.is_watched() else error
            if cause is not error:  # rank 0 may have ended by what this rank is to raise
                raise cause from error
            raise FullshardError(
                f"{self.name}: rank {dist.get_rank()} cannot reach the store of the process group; has the process "
                f"that hosts it, usually rank 0, exited? ({error})"
            ) from error


@contextlib.contextmanager
def rank_barrier(name: str, group: dist.ProcessGroup | None = None) -> Iterator[RankBarrier]:
    """Run a block on all ranks of a group together, with a barrier at its beginning and end.

    If the block raises on one rank, the others raise at the next step of the ``RankBarrier``, or at the end::

        with rank_barrier(f"save {path}", group) as barrier:
            plan = barrier.run_on_all("plan", make_plan)    # fails on all ranks if it fails on one
            barrier.run_on_all("write", lambda: write(plan))

    Args:
        name: Name of the operation with its arguments, such as "save /runs/7": the same on all ranks.
        group: The ranks. None: the default group, or this process alone if there is none.

    Raises:
        FullshardError: On all ranks, if they have called different functions, or some will not come.
        ValueError: If this process is not in the group, or the environment variable of the timeout is invalid.
    """
    step_timeout()
    group = resolve_group(group)
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not in the process group; call it only on the group's ranks"
        )
    store = _store_of(group)
    with contextlib.nullcontext() if store is None else store.lock:
        barrier = RankBarrier(name, 0 if group is None else group.rank(), store)
        barrier.wait()
        try:
            yield barrier
        except BaseException as error:
            if not barrier.failed:
                cause = (
                    PROGRESS.explained(error) if isinstance(error, RuntimeError) and PROGRESS.is_watched() else error
                )
                if PROGRESS.failure is not None:
                    raise FullshardError(PROGRESS.failure) from error  # as all ranks do
                with contextlib.suppress(FullshardError):  # of a store that is gone; what is raised here comes first
                    barrier.fail(cause)
            raise
        if not barrier.failed:
            barrier.wait("done")


def _store_of(group: dist.ProcessGroup | None) -> _BarrierStore | None:
    """Return the barriers of a group, which the watchdog watches; None for a single rank."""
    if group is None or group.size() == 1:
        return None
    watch()
    with _stores_lock:
        if group not in _stores:
            _stores[group] = _BarrierStore(group)
        return _stores[group]


def step_timeout() -> float:
    """Return the seconds that a rank waits for others in saves and loads, if the watchdog does not end the wait."""
    return seconds_from(STEP_TIMEOUT_VARIABLE, _STEP_TIMEOUT_S)


def _by_thread(function: Callable[[], T]) -> T:
    """Call a function that makes requests to the store, which never end where its machine is gone.

    Raises:
        FullshardError: If the watchdog has ended the run before there was an answer.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="fullshard barrier", daemon=True).start()
    while PROGRESS.failure is None:
        if concurrent.futures.wait([answer], _CHECK_S).done:
            return answer.result()
    raise FullshardError(PROGRESS.failure)


def _result_of(reports: Mapping[int, str], ranks: Sequence[int], seconds: float) -> _Result:
    """Return the result of a barrier: a failure if ranks are missing, or have arrived for different operations."""
    called = list_values({rank: repr(name) for rank, name in reports.items()})
    if missing := [rank for rank in ranks if rank not in reports]:
        return FullshardError.__name__, (
            f"{called}, but {list_ranks(missing)} did not come within {seconds:g} s. All ranks must call it, in the "
            "same order. If they are only slow, raise the timeout with the environment variable "
            f"{STEP_TIMEOUT_VARIABLE} (seconds)"
        )
    if len(set(reports.values())) > 1:
        advice = "Call the same functions on all ranks, in the same order"
        return FullshardError.__name__, f"ranks called different functions: {called}. {advice}"
    return "", ""
