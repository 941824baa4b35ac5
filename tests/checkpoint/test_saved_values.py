"""Values beside a model: what is saved can be loaded."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import fullshard


def test_keys_of_tuples_in_tuples(tmp_path: Path) -> None:
    """Such as counts by a pair of a step and a shape; deeper ones are refused, for their hash may end the process."""
    counts = {(1, (2, "three")): 4, ((), ()): 5}
    fullshard.save(tmp_path / "saved", nn.Linear(2, 2), counts=counts)
    assert fullshard.load(tmp_path / "saved", nn.Linear(2, 2))["counts"] == counts
