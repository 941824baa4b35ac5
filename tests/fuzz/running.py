"""Running histories on the rank pool, and what became of each."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass

from fuzz.histories import NOTHING_HERE, DifferenceFound
from fuzz.operations import Operations
from fuzz.plan import HistoryPlan
from fuzz.sharding import message_sizes
from ranks import Rank, RankPool, RanksFailed

TIMEOUT = 60.0


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


def live_and_tell(rank: Rank, plan: HistoryPlan) -> str:
    """Body of a rank: live a history; what differed, in words.

    Raises:
        DifferenceFound: If not all ranks have come to the same difference: the world is of no further use.
    """
    with message_sizes(plan.front_end), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about checkpoints without inputs, and the like
        try:
            history = Operations(rank, plan)
        except Exception as error:
            raise DifferenceFound(plan, -1, f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from None
        try:
            history.live()
        except DifferenceFound as difference:
            if not difference.on_all:
                raise
            return str(difference)
    return ""


def run(pool: RankPool, plan: HistoryPlan) -> Failure | None:
    """Live a history; None if nothing differed."""
    try:
        texts = dict.fromkeys(pool(plan.front_end.world_size, live_and_tell, plan, timeout=TIMEOUT))
    except RanksFailed as error:
        return Failure(plan, f"{error}\n--- history ---\n{plan.describe()}")
    found = "\n".join(text for text in texts if text and NOTHING_HERE not in text)
    return Failure(plan, found) if found else None


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
