"""Decisions that one rank makes for all ranks of a save; if one of them fails, all raise the errors of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import list_ranks

__all__ = ["Coordinator"]

T = TypeVar("T")
S = TypeVar("S")


class _Failure(NamedTuple):
    """The text of an error, for other ranks: exceptions of storage libraries cannot always be pickled.

    Args:
        text: The text.
        is_final: The decision has had no effect.
    """

    text: str
    is_final: bool = True


def _failure(error: BaseException, *, is_final: bool = True) -> _Failure:
    text = str(error) or type(error).__name__
    explained = isinstance(error, (CheckpointError, ValueError, TypeError))
    return _Failure(text if explained else f"{type(error).__name__}: {text}", is_final)


class Coordinator:
    """The ranks of a save. The first of them is the coordinator.

    Args:
        group: The ranks; None: no process groups, this process alone.
        what: Beginning of error messages.
    """

    rank: int
    size: int
    _group: dist.ProcessGroup | None
    _what: str

    def __init__(self, group: dist.ProcessGroup | None, what: str) -> None:
        self._group, self._what = group, what
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def decide(
        self,
        make_value: Callable[[], T],
        decide_all: Callable[[list[T]], Sequence[S]],
        *,
        has_effect: Callable[[], bool] = lambda: False,
        undo: Callable[[], None] = lambda: None,
    ) -> S:
        """Send a value of every rank to the coordinator, and return what that decides for this rank. A collective.

        Args:
            make_value: Makes this rank's value. It must not call collectives.
            decide_all: Makes a value for each rank from the values of all, in rank order. Runs on the coordinator.
            has_effect: Returns True if ``decide_all``, which has failed, may have taken effect.
            undo: Undoes what ``make_value`` has done. Called if that fails, or another rank, or the decision without
                effect; not if a collective fails, as the others may have decided. May be called twice.

        Raises:
            CheckpointError: On all ranks, with the error of each rank that failed.
        """
        cause: BaseException | None = None
        value: T | _Failure
        try:
            value = make_value()
        except BaseException as error:  # other ranks must not wait for one that was interrupted
            cause, value = error, _failure(error)
            undo()
        try:
            found = self._gather(value)
        except CheckpointError:
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None  # the other ranks were interrupted, too
            raise
        decided: list[Any] = [None] * self.size
        if found is not None:
            failures = {rank: each.text for rank, each in enumerate(found) if isinstance(each, _Failure)}
            try:
                decided = list(decide_all(found)) if not failures else [_Failure(self._report(failures))] * self.size
            except BaseException as error:
                cause, decided = error, [_failure(error, is_final=not has_effect())] * self.size
        mine = self._scatter(decided)
        if isinstance(mine, _Failure) and mine.is_final:
            undo()
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if isinstance(mine, _Failure):
            raise CheckpointError(f"{self._what}: {mine.text}") from cause
        result: S = mine
        return result

    def _gather(self, value: Any) -> list[Any] | None:
        if self._group is None or self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._explained():
            dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def _scatter(self, values: list[Any]) -> Any:
        if self._group is None or self.size == 1:
            return values[0]
        own: list[Any] = [None]
        with self._explained():
            dist.scatter_object_list(own, values if self.rank == 0 else None, group=self._group, group_src=0)
        return own[0]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of the back end as CheckpointError."""
        if not dist.is_initialized():
            raise CheckpointError(
                f"{self._what}: the process group has been destroyed; call result() of async_save before destroying it"
            )
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._what}: a collective between the ranks failed: a rank has ended, or took longer than the "
                f"timeout of the process group. The folder holds the complete previous checkpoint or the complete new "
                f"one ({error})"
            ) from error

    def _report(self, failures: dict[int, str]) -> str:
        """Return the failure of each rank as text; a failure that all ranks share appears once."""
        ranks: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks.setdefault(text, []).append(rank)
        if len(ranks) == 1 and len(failures) == self.size:
            return next(iter(ranks))
        return "; ".join(f"{list_ranks(at)}: {text}" for text, at in ranks.items())
