"""What ``bench.accelerate_step`` reports of records made by hand, and a tiny run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.comparison import Record, summarise
from bench.environment import REPOSITORY, current_environment

from bench import accelerate_step


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.accelerate_step", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def record(seconds: Sequence[float], peak: int) -> Record:
    return Record([1.0], [[s] for s in seconds], [{"baseline": 100 * 2**20, "peak": peak * 2**20, "resting": 0}])


def test_the_table_has_ratios_to_fsdp2() -> None:
    """Paired per round, with time and memory; who could not run has none."""
    records = {"fsdp2": record([2.0, 4.0], 300), "fsdp2+malloc": record([1.0, 2.0], 400)}
    summary = summarise({**records, "fullshard": record([1.0, 3.0], 200)})
    rows = accelerate_step.table(summary, {"fullshard-malloc": "no reason"}).splitlines()
    assert "| fullshard | 2000 | 0.62 (0.56 to 0.69) | 1.25 (1.12 to 1.38) | 100 | 0.50 | 1.000000 |" in rows
    assert rows[-1] == "| fullshard-malloc | cannot run | - | - | - | - | - |"
    settings = {"blocks": 6, "width": 512, "tokens": 256, "ranks": 2, "threads": 1}
    settings |= {"rounds": 9, "steps_per_round": 2, "warmup_steps": 2}
    block = accelerate_step.document_block(
        {
            "settings": settings,
            "accelerate": "1.15.0",
            "contestants": summary,
            "not_run": {"fullshard-malloc": "no reason"},
            "environment": {**current_environment().as_json(), "commit": "abc"},
        }
    )
    assert "accelerate 1.15.0" in block and block.endswith("commit abc.")
    assert "`fullshard-malloc` could not run: no reason." in block


def test_unknown_contestants_are_refused() -> None:
    """With the names that are known."""
    assert [c.name for c in accelerate_step.contestants_of(None)] == list(accelerate_step.TAKING_PART)
    with pytest.raises(ValueError, match=r"fsdp1.*known are fsdp2"):
        accelerate_step.contestants_of(["fsdp1"])


def test_training_is_measured(tmp_path: Path) -> None:
    """A tiny run: losses agree, files are written."""
    pytest.importorskip("accelerate")
    answer = run_bench(
        *("--width", "32", "--blocks", "2", "--tokens", "16", "--rounds", "1", "--steps-per-round", "1"),
        *("--warmup-steps", "1", "--only", "fsdp2", "--only", "fullshard", "--write-document"),
        *("--results", str(tmp_path), "--document", str(tmp_path / "page.md")),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (path,) = tmp_path.glob("accelerate_step_32_*.json")
    stored = json.loads(path.read_text())
    assert list(stored["contestants"]) == ["fsdp2", "fullshard"] and not stored["not_run"]
    assert stored["contestants"]["fullshard"]["time_ratio_to_fsdp2"]["median"] > 0
    assert "<!-- bench:accelerate_step:32 -->\nGPT of 2 blocks" in (tmp_path / "page.md").read_text()
