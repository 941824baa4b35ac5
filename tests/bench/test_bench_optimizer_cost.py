"""``bench.optimizer_cost``: what it concludes from times made by hand, and a tiny run. No test looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.environment import REPOSITORY

from bench import optimizer_cost


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.optimizer_cost", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_targets_are_judged_by_ratios_within_rounds() -> None:
    """Of medians over rounds; a target whose contestants did not run is left out."""
    seconds = {
        ("plain", "foreach"): [1.0, 10.0, 2.0],
        ("local", "foreach"): [1.1, 11.0, 2.6],
        ("flat", "foreach"): [0.3, 3.0, 0.2],
        ("fsdp2", "foreach"): [8.0, 80.0, 16.0],
    }
    verdicts = {verdict["target"]: verdict for verdict in optimizer_cost.judge(seconds)}
    assert list(verdicts) == [
        "local foreach / plain foreach",
        "local foreach / fsdp2 foreach",
        "flat foreach / fsdp2 foreach",
        "flat foreach / plain foreach",
    ]
    assert verdicts["local foreach / plain foreach"]["median"] == pytest.approx(1.1)
    assert verdicts["flat foreach / plain foreach"]["median"] == pytest.approx(0.3)
    assert not verdicts["flat foreach / plain foreach"]["met"]
    assert verdicts["flat foreach / fsdp2 foreach"]["met"]
    text = optimizer_cost.verdict_table(list(verdicts.values()))
    assert text.count("(missed)") == 1 and "| flat foreach / plain foreach | 0.20 | 0.30 (" in text
    summary = optimizer_cost.summarise(seconds, 100)
    assert summary["flat foreach"]["seconds_per_parameter"]["median"] == pytest.approx(0.003)
    assert summary["flat foreach"]["ratio_to_fsdp2"]["median"] == pytest.approx(0.0375)
    assert "| fsdp2 fused | cannot run |" in optimizer_cost.table(summary, {"fsdp2 fused": "no"})


def test_smoke(tmp_path: Path) -> None:
    """A tiny run writes JSON and the block of the page; an unknown contestant is refused."""
    page = tmp_path / "page.md"
    answer = run_bench(
        *("--units", "2", "--rounds", "2", "--steps-per-round", "1", "--results", str(tmp_path)),
        *("--document", str(page), "--write-document"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (path,) = tmp_path.glob("optimizer_cost_*.json")
    result = json.loads(path.read_text())
    names = {f"{system} {way}" for system in optimizer_cost.SYSTEMS for way in optimizer_cost.IMPLEMENTATIONS}
    assert set(result["contestants"]) == names and result["not_run"] == {}
    assert len(result["targets"]) == len(optimizer_cost.TARGETS)
    assert all(len(entry["seconds"]) == 2 for entry in result["contestants"].values())
    assert "<!-- bench:optimizer_cost -->\n16 parameters in 2 units" in page.read_text()
    with pytest.raises(Exception, match="fsdp3"):
        optimizer_cost.main(only=["fsdp3"])
