"""A barrier that names missing ranks: saves and loads are collective, and begin when all ranks have called the same
one.

[Note: Rank barrier]
Ranks synchronize through the key-value store of the process group and not in a collective of its back end: a collective
that a rank never joins ends in a timeout that names no rank, and a broken group (docs/design/ranks.md compares it with
``monitored_barrier``). Barriers are numbered; each rank counts for itself. A rank that arrives posts the name of its
operation and increments a counter; the last one publishes the result, and the others wait for it. The first rank
that has waited too long publishes a failure that names the missing ranks. There is one result per barrier, the
first one published, and it is valid for all ranks, also for one that arrives late. So all ranks leave a barrier with
the same result, and stay synchronized for the next.

A rank makes a handful of requests to the store per barrier, independent of the number of ranks; the names of operations
are read, by one rank, only in case of an error. The last rank that leaves a barrier removes its keys.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.ranks.agreement import describe_error, error_from, list_ranks, list_values
from fullshard.ranks.store import GroupStore, seconds_from

__all__ = [
    "BARRIER_TIMEOUT_VARIABLE",
    "LOAD_TIMEOUT_S",
    "STEP_TIMEOUT_VARIABLE",
    "RankBarrier",
    "rank_barrier",
    "step_timeout",
]

T = TypeVar("T")
_Result = tuple[str, str, list[str]]  # exception or "", its message, if ranks are missing the operations of others

BARRIER_TIMEOUT_VARIABLE = "FULLSHARD_BARRIER_TIMEOUT_S"
STEP_TIMEOUT_VARIABLE = "FULLSHARD_STEP_TIMEOUT_S"
_BARRIER_TIMEOUT_S = 30.0  # a rank may be delayed by an evaluation, or by the end of another save
LOAD_TIMEOUT_S = 120.0  # start-up times of ranks differ
_STEP_TIMEOUT_S = 3600.0  # between steps, ranks read and write different amounts
_REPORT_S = 10.0  # for one rank to collect the names
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_REQUESTS_PER_S = 20_000  # to the store while all ranks wait
_MISMATCH = 1 << 32  # added to the counter by a rank whose operation is not that of the first
_KEYS = ("first", "arrived", "leader", "result", "left")


class RankBarrier:
    """A collective operation, divided into steps with a barrier after each; made by :func:`rank_barrier`.

    Args:
        name: Name of the operation, for errors.
        store: Keys of the group's barriers.
    """

    name: str
    rank: int  # in the group
    _store: GroupStore
    _failed: bool  # all ranks have raised, or will

    def __init__(self, name: str, store: GroupStore) -> None:
        self.name, self.rank, self._store, self._failed = name, store.rank, store, False

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
        value = self._run(step, function)
        self.wait(step)
        return value

    def wait(self, step: str = "", timeout: float | None = None) -> None:
        """Wait until all ranks have arrived.

        Args:
            step: Name of the step, the same on all ranks.
            timeout: Seconds to wait for the others. None: the time for a step.

        Raises:
            FullshardError: If a rank did not arrive, arrived too late, or for another operation or step.
        """
        name = f"{self.name}, {step}" if step else self.name
        try:
            with self._store_errors():
                while True:
                    number, late = self._arrive(name)
                    result = self._wait_for_result(number, name, step, step_timeout() if timeout is None else timeout)
                    self._leave(number)
                    # A failed barrier that was for another operation, which this rank skipped, is not its own.
                    if not late or not result[2] or name in result[2]:
                        break
            kind, message, names = result
            if late and names:
                raise FullshardError(
                    f"{name}: rank {self._store.global_rank} arrived after the others had timed out: {message}"
                )
            if kind:
                raise error_from(kind, message)
        except Exception:
            self._failed = True
            raise

    def fail(self, error: BaseException, step: str = "") -> Exception:
        """Make the next barrier fail on all ranks with this rank's error, without waiting.

        Returns:
            The exception that all ranks raise: this error, or an earlier one.
        """
        name = f"{self.name}, {step}" if step else self.name
        kind, message = describe_error(error)
        with self._store_errors():
            number = self._store.next_number()
            kind, message, _ = self._publish(number, (kind, f"{name}: rank {self._store.global_rank}: {message}", []))
            self._leave(number)
        self._failed = True
        return error_from(kind or FullshardError.__name__, message)

    def close(self, error: BaseException | None) -> None:
        """Wait until all ranks are done, or fail the operation on all ranks if this one has raised."""
        if not self._failed and error is None:
            self.wait("done")
        elif not self._failed and error is not None:
            self.fail(error)

    def _run(self, step: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:
            failure = self.fail(error, step)
            if len(self._store.ranks) == 1 and type(failure) is type(error):
                raise  # without the number of the rank
            raise failure from error

    # ---------------------------------------------------------------- one barrier

    def _arrive(self, name: str) -> tuple[int, bool]:
        """Arrive at the next barrier, and publish its result as the last rank.

        Returns:
            The barrier's number, and True if it had a result already.
        """
        keys, number = self._store.keys, self._store.next_number()
        late = keys.check([f"{number}/result"])
        self._store.post([number, name])
        same = self._store.decide(f"{number}/first", name) == name
        arrived = keys.add(f"{number}/arrived", 1 if same else 1 + _MISMATCH)
        if arrived % _MISMATCH == len(self._store.ranks):
            result: _Result = ("", "", [])
            if arrived > _MISMATCH:
                called = list_values({repr(each): ranks for each, ranks in self._arrived(number).items()})
                advice = "Call the same functions on all ranks, in the same order"
                result = FullshardError.__name__, f"ranks called different functions: {called}. {advice}", []
            self._publish(number, result)
        return number, late

    def _wait_for_result(self, number: int, name: str, step: str, timeout: float) -> _Result:
        """Return the result; after the timeout, one rank publishes a failure with the names of all."""
        # Not store.wait(): that locks the store, blocks signal handlers, and logs its timeouts.
        deadline, pause, reported = time.monotonic() + timeout, _FIRST_POLL_S, False
        longest = max(_LAST_POLL_S, len(self._store.ranks) / _REQUESTS_PER_S)
        while (found := self._result(number)) is None:
            left = deadline - time.monotonic()
            if left > 0:
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, longest)
                continue
            leads = not reported and self._store.decide(f"{number}/leader", self.rank) == self.rank
            names = self._arrived(number) if leads else {name: list(self._store.ranks)}
            missing = sorted(set(self._store.ranks).difference(*names.values()))
            if missing or reported:
                return self._publish(number, _missing(names, missing, timeout, step))
            # Another rank collects the names, or the last one has just arrived; but they may have ended.
            deadline, reported = deadline + _REPORT_S, True
        return found

    def _arrived(self, number: int) -> dict[str, list[int]]:
        """Return the ranks that have arrived at a barrier, by the names of their operations."""
        ranks: dict[str, list[int]] = {}
        for rank, (at, name) in self._store.posted().items():
            if at == number:
                ranks.setdefault(name, []).append(rank)
        return ranks

    def _result(self, number: int) -> _Result | None:
        found: _Result | None = self._store.decision(f"{number}/result")
        return found

    def _publish(self, number: int, result: _Result) -> _Result:
        """Publish a result unless there is one, and return the result that counts."""
        decided: _Result = self._store.decide(f"{number}/result", result)
        return decided

    def _leave(self, number: int) -> None:
        if self._store.keys.add(f"{number}/left", 1) == len(self._store.ranks):
            for key in _KEYS:
                self._store.keys.delete_key(f"{number}/{key}")

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise FullshardError(
                f"{self.name}: rank {self._store.global_rank} cannot reach the store of the process group; did the "
                f"process that serves it, usually rank 0, end? ({error})"
            ) from error


_lock = threading.Lock()
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupStore] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def rank_barrier(
    name: str, group: dist.ProcessGroup | None = None, *, timeout: float = _BARRIER_TIMEOUT_S
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
        timeout: Seconds to wait for the other ranks, unless the environment variable ``FULLSHARD_BARRIER_TIMEOUT_S``
            is set.

    Raises:
        FullshardError: On all ranks that have arrived, if others are missing after the timeout (with the ranks of
            both); on these others when they arrive; on all, if they have called different functions.
        ValueError: If this process is not in the group, or the environment variable is invalid.
    """
    seconds = seconds_from(BARRIER_TIMEOUT_VARIABLE, timeout)
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not in the process group; call it only on the group's ranks"
        )
    with _lock:
        store = GroupStore(None, "barrier") if group is None else _stores.get(group) or GroupStore(group, "barrier")
        if group is not None:
            _stores[group] = store
    with store.lock:
        barrier = RankBarrier(name, store)
        try:
            barrier.wait(timeout=seconds)
            try:
                yield barrier
            except BaseException as error:
                barrier.close(error)
                raise
            barrier.close(None)
        finally:
            store.clear()


def step_timeout() -> float:
    """Return the seconds that a rank waits for the others between the steps of one operation."""
    return seconds_from(STEP_TIMEOUT_VARIABLE, _STEP_TIMEOUT_S)


def _missing(names: dict[str, list[int]], missing: Sequence[int], timeout: float, step: str) -> _Result:
    """Return the failure of ranks that have waited too long for others."""
    first, *others = names
    who = list_values({repr(name): ranks for name, ranks in names.items()})
    if not others:
        who = f"{first}: reached by {list_ranks(names[first])}" if missing else f"{first}: not reached by all ranks"
    hint = (
        "If they are still working, raise the timeout with the environment variable "
        f"{STEP_TIMEOUT_VARIABLE} (seconds); if they hang or have ended, see their own output"
        if step
        else "All ranks must call it, in the same order; look for control flow that depends on the rank, and for ranks "
        "that have failed. If they are only slow, raise the timeout with the environment variable "
        f"{BARRIER_TIMEOUT_VARIABLE} (seconds)"
    )
    but_not = f", but not by {list_ranks(missing)}" if missing else ""
    message = f"{who}{but_not} within {timeout:g} s. {hint}"
    return FullshardError.__name__, message, list(names)
