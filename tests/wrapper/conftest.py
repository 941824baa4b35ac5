"""Half of the larger cross products is enough for every day."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

MANY = 4
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests here with many variants (front end options times strategies times models), run every other one.

    A checkerboard over the parameters: every value of each stays, and two parameters still meet in all kinds.
    ``FULLSHARD_TEST_ALL=1`` runs all of them, and so does naming a test on the command line.
    """
    if os.environ.get("FULLSHARD_TEST_ALL", "0") != "0" or any("::" in argument for argument in config.args):
        return
    groups: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(HERE) and hasattr(item, "callspec"):
            groups[item.path, item.originalname].append(item)
    left_out = {
        item
        for group in groups.values()
        if len(group) >= MANY
        for item in group
        if sum(item.callspec.indices.values()) % 2
    }
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
