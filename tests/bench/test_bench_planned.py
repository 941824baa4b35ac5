"""Plans beside runs whose allocations are recorded."""

from __future__ import annotations

import pytest
from bench.overlap.cells import HOST, STREAMS, Cell, even_units
from bench.planned import driver, modelled
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


def test_time_on_a_modelled_network() -> None:
    """What schedules take, run and planned, the host's own work left out: with streams, and on a host that computes."""
    targets = [(cell.device, cell.ranks, cell.ratio) for cell in modelled.modelled_cells()]
    assert len(targets) == 18 and targets[:3] == [(STREAMS, 8, 0.3), (STREAMS, 8, 1.0), (STREAMS, 8, 3.0)]
    small = [Cell("even", even_units(3), device, 64, 1.0, "none") for device in (STREAMS, HOST)]
    cells = list(modelled.compare(small, rounds=1))
    assert all(abs(modelled.error_of(cell)) < 1e-3 for cell in cells), cells
    assert cells[0]["plan_seconds"] > 1.05 * sum(unit.forward + unit.backward for unit in even_units(3))
    slow = {**cells[0], "run_seconds": [2 * cells[0]["plan_seconds"]]}
    assert "off by 50.00 % at most in 1 cells (target: 3 %) (missed)" in "\n".join(modelled.paragraphs([slow]))
    assert "by more than 3 % in 0 of 1 cells" in "\n".join(modelled.paragraphs(cells))
