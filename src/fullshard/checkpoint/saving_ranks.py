"""Steps of a save that all ranks take together; if one of them fails, all raise the errors of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fullshard.errors import CheckpointError
from fullshard.ranks.agreement import list_ranks

__all__ = ["SavingRanks"]

T = TypeVar("T")


class _Failure(NamedTuple):
    """The text of an error, for other ranks: exceptions of storage libraries cannot always be pickled.

    Args:
        text: The text.
        has_effect: The step may have taken effect, so that nothing must be undone.
    """

    text: str
    has_effect: bool

    @classmethod
    def of(cls, error: BaseException, *, has_effect: bool) -> _Failure:
        text = str(error) or type(error).__name__
        explained = isinstance(error, (CheckpointError, ValueError, TypeError))
        return cls(text if explained else f"{type(error).__name__}: {text}", has_effect)


class SavingRanks:
    """The ranks of a save.

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

    def step(
        self,
        function: Callable[[], T],
        *,
        has_effect: Callable[[], bool] = lambda: False,
        undo: Callable[[], None] = lambda: None,
    ) -> list[T]:
        """Run a step on all ranks, and return its results by rank. A collective.

        Args:
            function: This rank's step. It must not call collectives.
            has_effect: Returns True if the step, which has failed, may have taken effect for all ranks.
            undo: Undoes the step, also twice. Called if this rank or another one has failed without effect; not if a
                collective fails, as the others may go on.

        Raises:
            CheckpointError: On all ranks, with the error of each rank that failed.
        """
        cause: BaseException | None = None
        value: T | _Failure
        try:
            value = function()
        except BaseException as error:  # other ranks must not wait for one that was interrupted
            cause, value = error, _Failure.of(error, has_effect=has_effect())
            if not value.has_effect:
                undo()
        try:
            results = self._all_gather(value)
        except CheckpointError:
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None  # the other ranks were interrupted, too
            raise
        failures = {rank: result for rank, result in enumerate(results) if isinstance(result, _Failure)}
        if failures and not any(failure.has_effect for failure in failures.values()):
            undo()
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if failures:
            raise CheckpointError(f"{self._what}: {self._report(failures)}") from cause
        return results

    def _all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Errors of the back end become CheckpointError."""
        values = [value] * self.size
        if self._group is None or self.size == 1:
            return values
        if not dist.is_initialized():
            raise CheckpointError(
                f"{self._what}: the process group has been destroyed; call result() of async_save before destroying it"
            )
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._what}: a collective between the ranks failed: a rank has ended, or took longer than the "
                f"timeout of the process group. The folder holds the complete previous checkpoint or the complete new "
                f"one ({error})"
            ) from error
        return values

    def _report(self, failures: dict[int, _Failure]) -> str:
        """Return the failure of each rank as text; a failure that all ranks share appears once."""
        ranks: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            ranks.setdefault(failure.text, []).append(rank)
        if len(ranks) == 1 and len(failures) == self.size:
            return next(iter(ranks))
        return "; ".join(f"{list_ranks(at)}: {text}" for text, at in ranks.items())
