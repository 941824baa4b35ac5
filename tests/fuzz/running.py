"""Running many histories on the rank pool, some at a time, and what became of each."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fuzz.histories import live
from fuzz.plan import HistoryPlan
from ranks import Rank, RankPool, RanksFailed

__all__ = ["Failure", "kind_of", "run_all", "run_one"]

TOGETHER = 12  # histories per call of the pool, which collects garbage after each
TIMEOUT = 60.0  # of a single history
SEED = re.compile(r"^seed (-?\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """A history that failed.

    Args:
        plan: Of the history.
        text: What all ranks had to say.
    """

    plan: HistoryPlan
    text: str

    @property
    def kind(self) -> str:
        """See :func:`kind_of`."""
        return kind_of(self.text)


def run_batch(rank: Rank, plans: Sequence[HistoryPlan]) -> None:
    """Body of a rank: live histories until one fails."""
    for plan in plans:
        live(rank, plan)


def run_all(
    pool: RankPool, plans: Sequence[HistoryPlan], progress: Callable[[int, Failure | None], None] | None = None
) -> list[Failure]:
    """Live all histories; those that failed, in the order of the plans.

    Args:
        pool: Of the session.
        plans: In any order of world sizes.
        progress: Called with the number of histories that are over, and the failure, if there is one.
    """
    failures: list[Failure] = []
    for batch in _batches(plans):
        left = list(batch)
        while left:
            failure, done = _first_failure(pool, left)
            if failure is not None:
                failures.append(failure)
            if progress is not None:
                progress(done, failure)
            left = left[done:]
    order = {id(plan): index for index, plan in enumerate(plans)}
    return sorted(failures, key=lambda failure: order[id(failure.plan)])


def run_one(pool: RankPool, plan: HistoryPlan) -> Failure | None:
    """Live one history."""
    return _first_failure(pool, [plan])[0]


def _first_failure(pool: RankPool, plans: Sequence[HistoryPlan]) -> tuple[Failure | None, int]:
    """Live histories until one fails; that, and how many are over."""
    try:
        pool(plans[0].front_end.world_size, run_batch, list(plans), timeout=TIMEOUT + 10.0 * len(plans))
    except RanksFailed as error:
        found = SEED.search(str(error))
        for number, plan in enumerate(plans, 1):
            if len(plans) == 1 or (found is not None and str(plan.seed) == found[1]):
                return Failure(plan, str(error)), number
        return _first_failure(pool, plans[:1])  # no rank could say: look at them one by one
    return None, len(plans)


def _batches(plans: Sequence[HistoryPlan]) -> Iterator[list[HistoryPlan]]:
    """Plans of one world size together."""
    waiting: dict[int, list[HistoryPlan]] = defaultdict(list)
    for plan in plans:
        batch = waiting[plan.front_end.world_size]
        batch.append(plan)
        if len(batch) == TOGETHER:
            yield list(batch)
            batch.clear()
    yield from (batch for batch in waiting.values() if batch)


def kind_of(text: str) -> str:
    """Of which kind a failure is: what the first rank found, without numbers and names that differ by history."""
    lines = text.splitlines()
    where = next((i for i, line in enumerate(lines) if re.search(r"^\S*DifferenceFound: ", line)), None)
    if where is None:
        return lines[1] if len(lines) > 1 else text
    operation = re.sub(r"^.*: (\w+)\(.*$", r"\1", lines[where])
    found = next(
        (line for line in lines[where + 1 :] if line and line != "nothing on this rank, but on another"), lines[where]
    )
    found = re.sub(r"'[^']*'|\d[\d.e+-]*", "#", found)[:90]
    return f"{operation} | {found}"


def clock() -> float:
    """Seconds."""
    return time.monotonic()
