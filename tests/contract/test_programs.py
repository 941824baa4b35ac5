"""Programs with ``fully_shard`` see under fullshard what they see under torch, but for one short list.

Those with wrappers and the random ones are in ``test_random_programs.py``: two files of about equal length.
The suite has a part of the programs: ``python -m tests.contract --all-programs`` runs all of them.
"""

from __future__ import annotations

import pytest

from contract.programs import SUITE
from contract.running import check, check_entries
from ranks import RankPool

NAMES = [name for name, program in SUITE.items() if not program.wrapper]


@pytest.mark.parametrize("name", NAMES)
def test_programs(ranks: RankPool, name: str) -> None:
    """A program sees the same under both libraries, at every point."""
    check(ranks, name)


def test_allowed_differences_are_seen(ranks: RankPool) -> None:
    """Each allowed difference shows in the program that it names, and has a row in the docs."""
    check_entries(ranks, NAMES)
