"""Running many histories on the rank pool, some at a time, and what became of each."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fuzz.histories import NOTHING_HERE, DifferenceFound, live
from fuzz.plan import HistoryPlan
from ranks import Rank, RankPool, RanksFailed

__all__ = ["Failure", "kind_of", "run_all", "run_one"]

TOGETHER = 12  # histories per call of the pool, which collects garbage after each
TIMEOUT = 60.0  # of a single history


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


class WorldBroken(Exception):  # noqa: N818 - reads as what happened
    """A history that leaves the ranks in an unknown state. The message is JSON, because only text leaves a rank."""

    def __init__(self, number: int, text: str, found: dict[int, str]) -> None:
        super().__init__(json.dumps({"number": number, "found": {**found, number: text}}))


def run_batch(rank: Rank, plans: Sequence[HistoryPlan]) -> dict[int, str]:
    """Body of a rank: live histories; by number what differed.

    Raises:
        WorldBroken: If one ended otherwise than by a difference that all ranks have agreed on.
    """
    found: dict[int, str] = {}
    for number, plan in enumerate(plans):
        try:
            live(rank, plan)
        except DifferenceFound as difference:
            if not difference.on_all:
                raise WorldBroken(number, str(difference), found) from None
            found[number] = str(difference)
    return found


def run_all(
    pool: RankPool, plans: Sequence[HistoryPlan], progress: Callable[[int, Sequence[Failure]], None] | None = None
) -> list[Failure]:
    """Live all histories; those that failed, in the order of the plans.

    Args:
        pool: Of the session.
        plans: In any order of world sizes.
        progress: Called with the number of histories that are over, since the last call, and those of them that failed.
    """
    failures: list[Failure] = []
    for batch in _batches(plans):
        left = list(batch)
        while left:
            done, found = _live(pool, left)
            failures += found
            if progress is not None:
                progress(done, found)
            left = left[done:]
    order = {id(plan): index for index, plan in enumerate(plans)}
    return sorted(failures, key=lambda failure: order[id(failure.plan)])


def run_one(pool: RankPool, plan: HistoryPlan) -> Failure | None:
    """Live one history."""
    _, failures = _live(pool, [plan])
    return failures[0] if failures else None


def _live(pool: RankPool, plans: Sequence[HistoryPlan]) -> tuple[int, list[Failure]]:
    """Live histories until one breaks its world; how many are over, and those of them that failed."""
    done = len(plans)
    try:
        by_rank = pool(plans[0].front_end.world_size, run_batch, list(plans), timeout=TIMEOUT + 10.0 * done)
    except RanksFailed as error:
        reports = [json.loads(each.message) for each in error.outcomes if each.error_type == WorldBroken.__name__]
        if not reports and done == 1:
            return 1, [Failure(plans[0], f"{error}\n--- history ---\n{plans[0].describe()}")]
        if not reports:  # none could say which history it was: look at them one by one
            return _live(pool, plans[:1])
        by_rank = [{int(number): text for number, text in each["found"].items()} for each in reports]
        done = 1 + min(each["number"] for each in reports)
    numbers = sorted({number for found in by_rank for number in found if number < done})
    return done, [Failure(plans[number], _together(by_rank, number)) for number in numbers]


def _together(by_rank: Sequence[dict[int, str]], number: int) -> str:
    texts = dict.fromkeys(found[number] for found in by_rank if number in found)
    return "\n".join(text for text in texts if NOTHING_HERE not in text)


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
    where = next((i for i, line in enumerate(lines) if re.search(r"(after operation \d+:|when made)", line)), None)
    if where is None:
        return lines[1] if len(lines) > 1 else text
    operation = re.sub(r"^.*(?:: (\w+)\(.*|when made)$", r"\1", lines[where])
    found = next((line for line in lines[where + 1 :] if line and line != NOTHING_HERE), lines[where])
    found = re.sub(r"'[^']*'|\d[\d.e+-]*", "#", found)[:90]
    return f"{operation} | {found}"
