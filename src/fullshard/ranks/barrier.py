"""A barrier that names missing ranks: saves and loads begin when all ranks have called the same one.

[Note: Rank barrier]
Ranks synchronize through the key-value store of the process group and not in a collective of its backend: a collective
that a rank never joins ends in a timeout that names no rank, and a broken group (docs/design/ranks.md compares it with
``monitored_barrier``). A barrier is a [Note: Rendezvous]: a rank that arrives reports the name of its operation, the
last one compares the names and proposes the result, and the others wait for it. The first rank that has waited too
long proposes a failure that names the missing ranks. So all ranks leave a barrier with the same result, also one that
arrives late, and stay synchronized for the next. A rank makes a handful of requests per barrier, whatever the number
of ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.progress import PROGRESS
from fullshard.ranks.agreement import describe_error, error_from, list_ranks, list_values, resolve_group
from fullshard.ranks.store import GroupStore, Rendezvous, seconds_from

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
_REPORT_S = 10.0  # for the first rank to report who is missing, before the others do, in case it has ended
_LOOK_S, _LOOKERS = 5.0, 8  # how often the first ranks look for processes that have ended
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.05
_REQUESTS_PER_S = 20_000  # to the store while all ranks wait


class RankBarrier:
    """A collective operation, divided into steps with a barrier after each; made by ``rank_barrier``.

    Args:
        name: Name of the operation, for errors.
        store: The rendezvous of the group's barriers.
    """

    name: str
    rank: int  # in the group
    failed: bool  # all ranks have raised, or will
    _store: GroupStore

    def __init__(self, name: str, store: GroupStore) -> None:
        self.name, self.rank, self._store, self.failed = name, store.rank, store, False

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
            if len(self._store.ranks) == 1 and type(failure) is type(error):
                raise  # without the number of the rank
            raise failure from error
        self.wait(step)
        return value

    def wait(self, step: str = "", timeout: float | None = None) -> None:
        """Wait until all ranks have arrived at the same step, for the time of a step unless ``timeout`` is given.

        Raises:
            FullshardError: If a rank did not arrive, arrived too late, or for another operation or step.
        """
        name, seconds = self._name_of(step), step_timeout() if timeout is None else timeout
        with self._raised_on_all():
            while True:
                rendezvous = self._store.next_rendezvous()
                found: _Result | None = rendezvous.result()
                kind, message, names = found or self._arrive(rendezvous, name, step, seconds)
                rendezvous.leave()
                # A failed barrier that was for another operation, which this rank skipped, is not its own.
                if found is None or not names or name in names:
                    break
            if found is not None and names:
                message = f"{name}: rank {self._store.global_rank} arrived after the others had timed out: {message}"
            if kind:
                raise error_from(kind, message)

    def fail(self, error: BaseException, step: str = "") -> Exception:
        """Make the next barrier fail on all ranks with this rank's error, without waiting.

        Returns:
            The exception that all ranks raise: this error, or an earlier one.
        """
        kind, message = describe_error(error)
        with self._raised_on_all():
            rendezvous = self._store.next_rendezvous()
            text = f"{self._name_of(step)}: rank {self._store.global_rank}: {message}"
            kind, message, _ = rendezvous.propose((kind, text, []))
            rendezvous.leave()
        self.failed = True
        return error_from(kind or FullshardError.__name__, message)

    def _name_of(self, step: str) -> str:
        return f"{self.name}, {step}" if step else self.name

    def _arrive(self, rendezvous: Rendezvous, name: str, step: str, timeout: float) -> _Result:
        """Report to a barrier and return its result: as the last rank, after the timeout, or as another rank found."""
        count, ranks = rendezvous.report(name), self._store.ranks
        deadline = time.monotonic() + (timeout if count == 1 else timeout + _REPORT_S)
        # Not store.wait(): that locks the store, blocks signal handlers, and logs its timeouts.
        pause, longest = _FIRST_POLL_S, max(_LAST_POLL_S, len(ranks) / _REQUESTS_PER_S)
        look = time.monotonic() + _LOOK_S
        while count < len(ranks) and time.monotonic() < deadline:
            result: _Result | None = rendezvous.result()
            if result is not None:
                return result
            if count <= _LOOKERS and PROGRESS.watchdog is not None and time.monotonic() > look:
                look += _LOOK_S
                if lost := PROGRESS.watchdog.lost(set(ranks) - rendezvous.reports().keys()):
                    told = f"{name}: ranks that the others wait for are lost: {list_values(lost)}"
                    failed: _Result = rendezvous.propose((FullshardError.__name__, told, [name]))
                    return failed
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.5 * pause, longest)
        decided: _Result = rendezvous.propose(_result_of(rendezvous.reports(), ranks, timeout, step))
        return decided

    @contextlib.contextmanager
    def _raised_on_all(self) -> Iterator[None]:
        """Record that other ranks raise as well if the block does, and explain errors of the store."""
        try:
            yield
        except Exception as error:
            self.failed = True
            if not isinstance(error, dist.DistError):
                raise
            raise FullshardError(
                f"{self.name}: rank {self._store.global_rank} cannot reach the store of the process group; has the "
                f"process that hosts it, usually rank 0, exited? ({error})"
            ) from error


@contextlib.contextmanager
def rank_barrier(
    name: str, group: dist.ProcessGroup | None = None, *, timeout: float = _BARRIER_TIMEOUT_S
) -> Iterator[RankBarrier]:
    """Run a block on all ranks of a group together, with a barrier at its beginning and end.

    If the block raises on one rank, the others raise at the next step of the ``RankBarrier``, or at the end::

        with rank_barrier(f"save {path}", group) as barrier:
            plan = barrier.run_on_all("plan", make_plan)    # fails on all ranks if it fails on one
            barrier.run_on_all("write", lambda: write(plan))

    Args:
        name: Name of the operation with its arguments, such as "save /runs/7": the same on all ranks.
        group: The ranks. None: the default group, or this process alone if there is none.
        timeout: Seconds to wait for the others; the environment variable ``FULLSHARD_BARRIER_TIMEOUT_S`` overrides it.

    Raises:
        FullshardError: On all ranks that have arrived, if others are missing after the timeout (with the ranks of
            both); on these others when they arrive; on all, if they have called different functions.
        ValueError: If this process is not in the group, or the environment variable is invalid.
    """
    seconds = seconds_from(BARRIER_TIMEOUT_VARIABLE, timeout)
    group = resolve_group(group)
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not in the process group; call it only on the group's ranks"
        )
    store = GroupStore.of(group, "barrier")
    with store.lock:
        barrier = RankBarrier(name, store)
        barrier.wait(timeout=seconds)
        try:
            yield barrier
        except BaseException as error:
            if not barrier.failed:
                with contextlib.suppress(FullshardError):  # of a store that is gone; what is raised here comes first
                    barrier.fail(error)
            raise
        if not barrier.failed:
            barrier.wait("done")


def step_timeout() -> float:
    """Return the seconds that a rank waits for the others between the steps of one operation."""
    return seconds_from(STEP_TIMEOUT_VARIABLE, _STEP_TIMEOUT_S)


def _result_of(reports: Mapping[int, str], ranks: Sequence[int], timeout: float, step: str) -> _Result:
    """Return the result of a barrier: a failure if ranks are missing, or have arrived for different operations."""
    names = list(dict.fromkeys(reports.values()))
    called = list_values({rank: repr(name) for rank, name in reports.items()})
    missing = [rank for rank in ranks if rank not in reports]
    if not missing and len(names) == 1:
        return "", "", []
    if not missing:
        advice = "Call the same functions on all ranks, in the same order"
        return FullshardError.__name__, f"ranks called different functions: {called}. {advice}", []
    hint = (
        "If they are still working, raise the timeout with the environment variable "
        f"{STEP_TIMEOUT_VARIABLE} (seconds); if they hang or have exited, see their own output"
        if step
        else "All ranks must call it, in the same order; look for control flow that depends on the rank, and for ranks "
        "that have failed. If they are only slow, raise the timeout with the environment variable "
        f"{BARRIER_TIMEOUT_VARIABLE} (seconds)"
    )
    who = called if len(names) > 1 else f"{names[0]}: reached by {list_ranks(list(reports))}"
    message = f"{who}, but not by {list_ranks(missing)} within {timeout:g} s. {hint}"
    return FullshardError.__name__, message, names
