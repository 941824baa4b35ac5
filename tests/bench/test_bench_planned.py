"""Plans beside runs whose allocations are recorded."""

from __future__ import annotations

import pytest
from bench.planned import driver
from bench.planned.cases import FAKE_RANKS, GLOO_RANKS, Case, memory_cases


def test_memory_of_a_run() -> None:
    """Within a hundredth, at the same moment: alone, with recomputation, and of a flat wrapper."""
    assert len(list(memory_cases())) == 40
    cases = [
        Case(512, GLOO_RANKS),
        Case(512, FAKE_RANKS, "bf16", checkpoint=True),
        Case(512, FAKE_RANKS, "bf16", replicas=2),
    ]
    cells = list(driver.compare(cases))
    for cell in cells:
        assert cell["plan"]["peak"] == pytest.approx(cell["run"]["peak"], rel=0.01), cell
        assert cell["plan"]["resting"] == pytest.approx(cell["run"]["resting"], rel=0.01), cell
        assert list(cell["plan"]["place"]) == list(cell["run"]["place"]), cell
    page = "\n".join(driver.paragraphs({"cells": cells}))
    assert "Of 3 configurations, the plan is off by 0." in page and "names the moment in 3 (target" in page
