"""A barrier that raises on all ranks what one raises: saves and loads begin when all ranks have called the same one.

[Note: Rank barrier]
Ranks synchronize through the key-value store of the process group and not in a collective of its backend: on an
accelerator that would be one of training, which the collectives of a rank that did not come match by chance, and a
group for it has to be made by all ranks. A barrier is a [Note: Rendezvous]: a rank that arrives reports the name of its
operation, the last one compares the names and proposes the result, and the others wait for it. A rank that fails
proposes its error at once. So all ranks leave a barrier with the same result, and stay synchronized for the next. A
rank makes a handful of requests per barrier, whatever the number of ranks.

Whether the others will come is for the watchdog to find out, as for every wait of the training thread: a rank that
evaluates or writes for long is waited for.
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
from fullshard.ranks.watchdog import watch

__all__ = ["STEP_TIMEOUT_VARIABLE", "RankBarrier", "rank_barrier", "step_timeout"]

T = TypeVar("T")
_Result = tuple[str, str]  # exception or "", and its message

STEP_TIMEOUT_VARIABLE = "FULLSHARD_STEP_TIMEOUT_S"
_STEP_TIMEOUT_S = 3600.0  # ranks read and write different amounts
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

    def wait(self, step: str = "") -> None:
        """Wait until all ranks have arrived at the same step.

        Raises:
            FullshardError: If ranks arrive for different operations or steps, or some will not come.
        """
        name = self._name_of(step)
        with self._raised_on_all():
            rendezvous = self._next()
            with PROGRESS.in_barrier(name, self._store.name, rendezvous.number):
                kind, message = self._arrive(rendezvous, name)
            rendezvous.leave()
            if kind:
                raise error_from(kind, message)

    def fail(self, error: BaseException, step: str = "") -> Exception:
        """Make the next barrier fail on all ranks with this rank's error, without waiting.

        Returns:
            The exception that all ranks raise: this error, or an earlier one.
        """
        kind, message = describe_error(error)
        with self._raised_on_all():
            rendezvous = self._next()
            text = f"{self._name_of(step)}: rank {self._store.global_rank}: {message}"
            kind, message = rendezvous.propose((kind, text))
            rendezvous.leave()
        self.failed = True
        return error_from(kind or FullshardError.__name__, message)

    def _name_of(self, step: str) -> str:
        return f"{self.name}, {step}" if step else self.name

    def _next(self) -> Rendezvous:
        rendezvous = self._store.next_rendezvous()
        PROGRESS.barriers[self._store.name] = self._store.ranks, rendezvous.number
        return rendezvous

    def _arrive(self, rendezvous: Rendezvous, name: str) -> _Result:
        """Report to a barrier and return its result: as the last rank, or as another rank found."""
        if PROGRESS.failure is not None:
            raise FullshardError(PROGRESS.failure)
        count, ranks, seconds = rendezvous.report(name), self._store.ranks, step_timeout()
        deadline = time.monotonic() + seconds
        # Not store.wait(): that locks the store, blocks signal handlers, and logs its timeouts.
        pause, longest = _FIRST_POLL_S, max(_LAST_POLL_S, len(ranks) / _REQUESTS_PER_S)
        while count < len(ranks) and time.monotonic() < deadline:
            result: _Result | None = rendezvous.result()
            if result is not None:
                return result
            if PROGRESS.failure is not None:  # set by the watchdog, on all ranks
                raise FullshardError(PROGRESS.failure)
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.5 * pause, longest)
        decided: _Result = rendezvous.propose(_result_of(rendezvous.reports(), ranks, seconds))
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
            told = PROGRESS.explained(error) if PROGRESS.is_watched() else error
            if told is not error:  # rank 0 may have ended by what this rank is to raise
                raise told from error
            raise FullshardError(
                f"{self.name}: rank {self._store.global_rank} cannot reach the store of the process group; has the "
                f"process that hosts it, usually rank 0, exited? ({error})"
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
    if group is not None:
        watch()
    store = GroupStore.of(group, "barrier")
    with store.lock:
        barrier = RankBarrier(name, store)
        barrier.wait()
        try:
            yield barrier
        except BaseException as error:
            if not barrier.failed:
                told = PROGRESS.explained(error) if isinstance(error, RuntimeError) and PROGRESS.is_watched() else error
                if PROGRESS.failure is not None:
                    raise FullshardError(PROGRESS.failure) from error  # as all ranks do
                with contextlib.suppress(FullshardError):  # of a store that is gone; what is raised here comes first
                    barrier.fail(told)
            raise
        if not barrier.failed:
            barrier.wait("done")


def step_timeout() -> float:
    """Return the seconds that a rank waits for others in saves and loads, if the watchdog does not end the wait."""
    return seconds_from(STEP_TIMEOUT_VARIABLE, _STEP_TIMEOUT_S)


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
