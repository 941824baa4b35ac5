"""Traces beside the simulated network, and what counts as a late rank that was named."""

from __future__ import annotations

import pytest
from bench.diagnosis import driver, modelled
from bench.diagnosis.modelled import compare
from bench.diagnosis.worker import DELAYED_UNIT, IN_BACKWARD
from small_runs import run_small


def test_exposed_time_is_that_of_the_simulation() -> None:
    """On host clocks and on streams, with both front ends; segments add up to the step."""
    cells = list(compare(64))
    assert len(cells) == 12
    for cell in cells:
        assert cell["traced_seconds"] == pytest.approx(cell["exposed_seconds"], rel=0.02), cell
        assert cell["parts_seconds"] == pytest.approx(cell["step_seconds"], rel=0.03), cell


def test_what_counts_as_named() -> None:
    """All ranks' tables name the rank, the unit and the phase; anything else is a false alarm."""
    right, other = [0.05, 1, "backward", DELAYED_UNIT], [0.006, 0, "forward", "blocks.1"]
    assert driver.named([[right], [right]], late=True) == {"named": True, "others": False}
    assert driver.named([[right, other], [right]], late=True) == {"named": True, "others": True}
    assert driver.named([[right], []], late=True) == {"named": False, "others": False}
    assert driver.named([[], []], late=False) == {"named": False, "others": False}
    assert driver.named([[right], []], late=False) == {"named": False, "others": True}


def test_small_run(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Every figure is there; a busy machine need not name anything."""
    monkeypatch.setattr(modelled, "RATIOS", (1.0,))
    monkeypatch.setattr(driver, "SMALL", {"width": 64, "blocks": 6, "tokens": 16})
    monkeypatch.setattr(driver, "LARGE", {"width": 64, "blocks": 6, "tokens": 16})
    page, stored = run_small(tmp_path, "diagnosis", "--rounds 1 --steps-per-round 3 --ranks 8")
    assert stored["late"][IN_BACKWARD]["runs"] == 1 and len(stored["cells"]) == 4
    assert stored["costs"]["parts"]["median"] == pytest.approx(1, rel=0.2)
    assert stored["costs"]["watchdog"]["notes"] > 20
    assert "| in its backward | 1 |" in page and "Against the targets: " in page
