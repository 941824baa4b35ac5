"""Run programs on ranks: what the tests of this folder and ``python -m tests.contract`` share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.allowed import ALLOWED, allowed
from contract.comparison import Difference, compare
from contract.draw import draw
from contract.programs import PROGRAMS, SUITE
from ranks import Rank, RankPool

ROOT = Path(__file__).parents[2]
MOST_SHOWN = 12


@dataclass(frozen=True)
class Result:
    """What came of a program on one rank.

    Attributes:
        different: what differs and is not allowed; everything, if asked for.
        meant: the allowed differences that were seen, by name.
        points: the number of points that torch's run has reached.
        refused: why torch has refused to go on, if it has.
    """

    different: tuple[Difference, ...]
    meant: frozenset[str]
    points: int
    refused: str


def compared(rank: Rank, name: str | int, every: bool) -> Result:
    """Body of a rank: compare a program, by its name or seed. Only what is asked for is sent from the rank."""
    comparison = compare(rank, PROGRAMS[name] if isinstance(name, str) else draw(name))
    entries = [allowed(difference) for difference in comparison.differences]
    different = (d for d, entry in zip(comparison.differences, entries, strict=True) if every or entry is None)
    meant = frozenset(entry.name for entry in entries if entry is not None)
    return Result(tuple(different), meant, comparison.points, comparison.refused)


_known: dict[str | int, list[Result]] = {}  # several tests look at the same program


def run(ranks: RankPool, name: str | int, every: bool = False) -> list[Result]:
    """What came of a program on all ranks. ``every``: with the differences that are allowed."""
    if name not in _known or every:
        world = (PROGRAMS[name] if isinstance(name, str) else draw(name)).world
        _known[name] = ranks(world, compared, name, every)
    return _known[name]


def report(differences: list[Difference]) -> str:
    """Some of the differences, of each property and parameter the first."""
    first: dict[object, Difference] = {}
    for difference in differences:
        first.setdefault((difference.what, difference.point), difference)
    lines = [str(difference) for difference in first.values()]
    return "\n".join([f"{len(differences)} differences that are not allowed:", *lines[:MOST_SHOWN]])


def check(ranks: RankPool, name: str | int) -> None:
    """Fail with what differs and is not allowed; skip what torch refuses from the start."""
    found = run(ranks, name)
    different = [difference for result in found for difference in result.different]
    assert not different, report(different)
    if all(result.points < 2 for result in found):
        pytest.skip(f"torch refuses: {found[0].refused}")


def check_entries(ranks: RankPool, names: Iterable[str]) -> None:
    """Each allowed difference is seen in its program, if that is one of ``names``, and has a row in the docs."""
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "differences.md").read_text(), re.MULTILINE)
    for entry in ALLOWED:
        assert entry.shown_by in SUITE, f"no program of the suite is called {entry.shown_by}"
        assert entry.row in rows, f"no row of docs/differences.md begins with {entry.row}"
        if entry.shown_by in names:
            seen = any(entry.name in result.meant for result in run(ranks, entry.shown_by))
            assert seen, f"{entry.shown_by} no longer shows {entry.name}: remove the entry"
