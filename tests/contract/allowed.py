"""The differences that are meant: one list. Each makes a program more right, and has a row in docs/differences.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from contract.comparison import Difference


@dataclass(frozen=True)
class Allowed:
    """A difference from torch that is meant.

    Attributes:
        name: of the difference.
        row: the topic (first column) of its row in ``docs/differences.md``.
        reason: why a program is more right with it.
        shown_by: a program that shows it.
        matches: whether a difference is one of these.
    """

    name: str
    row: str
    reason: str
    shown_by: str
    matches: Callable[[Difference], bool]


ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "late hooks on forward",
        "forward hooks registered after `fully_shard`",
        "a hook belongs to the forward of its module: it can read the weights that computed",
        "late hooks",
        lambda d: d.front_end == "fully_shard" and d.point.startswith("late post"),
    ),
)


def allowed(difference: Difference) -> Allowed | None:
    """The entry that a difference falls under."""
    return next((entry for entry in ALLOWED if entry.matches(difference)), None)
