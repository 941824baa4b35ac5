"""Half of the larger cross products is enough for every day."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

MANY, VERY_MANY = 4, 8  # variants, of which a half is run, and a quarter
FOLDERS = [Path(__file__).parent / name for name in ("checkpoint", "engine", "optim", "wrapper")]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests with many variants (front ends times strategies times models), run every other one, or every fourth.

    A checkerboard over the parameters: every value of each stays, and two parameters still meet in all kinds.
    ``FULLSHARD_TEST_ALL=1`` runs all of them, and so does naming a test on the command line.
    """
    if os.environ.get("FULLSHARD_TEST_ALL", "0") != "0" or any("::" in argument for argument in config.args):
        return
    groups: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        inside = any(item.path.is_relative_to(folder) for folder in FOLDERS)
        if inside and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            groups[item.path, item.originalname].append(item)
    left_out = {
        item
        for group in groups.values()
        if len(group) >= MANY
        for item in group
        if sum(item.callspec.indices.values()) % (4 if len(group) >= VERY_MANY else 2)
    }
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
