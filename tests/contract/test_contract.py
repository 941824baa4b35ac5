"""A program sees under fullshard what it sees under torch's FSDP1 and FSDP2, but for one short list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contract.allowed import ALLOWED, allowed
from contract.comparison import Comparison, Difference, compare
from contract.draw import draw
from contract.programs import PROGRAMS
from ranks import Rank, RankPool

ROOT = Path(__file__).parents[2]
SEEDS = range(40)  # python -m tests.contract has as many as one likes
MOST_SHOWN = 12


def compared(rank: Rank, name: str | int) -> Comparison:
    """Body of a rank: compare a program, by its name or seed."""
    return compare(rank, PROGRAMS[name] if isinstance(name, str) else draw(name))


def run(ranks: RankPool, name: str | int) -> list[Comparison]:
    """What came of a program on all ranks."""
    world = (PROGRAMS[name] if isinstance(name, str) else draw(name)).world
    return ranks(world, compared, name)


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
    different = [d for comparison in found for d in comparison.differences if allowed(d) is None]
    assert not different, report(different)
    if all(comparison.points < 2 for comparison in found):
        pytest.skip(f"torch refuses: {found[0].refused}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(ranks: RankPool, name: str) -> None:
    """A program sees the same under both libraries, at every point."""
    check(ranks, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(ranks: RankPool, seed: int) -> None:
    """So do programs that are drawn from a seed."""
    check(ranks, seed)


@pytest.mark.parametrize("entry", ALLOWED, ids=lambda entry: entry.name)
def test_allowed_differences_are_used_and_documented(ranks: RankPool, entry: object) -> None:
    """Each allowed difference shows in the program that it names, and has a row of its own in the docs."""
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "differences.md").read_text(), re.MULTILINE)
    assert entry.row in rows
    found = [d for comparison in run(ranks, entry.shown_by) for d in comparison.differences]
    assert any(allowed(d) is entry for d in found), f"{entry.shown_by} no longer shows it: remove the entry"
