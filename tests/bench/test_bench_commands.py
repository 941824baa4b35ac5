"""The benchmarks start, explain themselves, and do a tiny piece of their work. No test looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.environment import REPOSITORY


def run_bench(module: str, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"bench.{module}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("module", ["step", "host_cost"])
def test_help(module: str) -> None:
    answer = run_bench(module, "--help")
    assert answer.returncode == 0, answer.stderr
    assert "--rounds" in answer.stdout
    assert "--only" in answer.stdout


@pytest.mark.parametrize("module", ["step", "host_cost"])
def test_an_unknown_contestant_is_refused(module: str) -> None:
    answer = run_bench(module, "--only", "fsdp3")
    assert answer.returncode == 2
    assert "fsdp3" in answer.stderr and "known are" in answer.stderr


def test_step_smoke(tmp_path: Path) -> None:
    answer = run_bench(
        "step",
        *("--width", "32", "--blocks", "1", "--tokens", "16", "--rounds", "1", "--steps-per-round", "1"),
        *("--warmup-steps", "1", "--only", "unsharded", "--only", "fsdp2"),
        *("--results", str(tmp_path), "--document", str(tmp_path / "page.md"), "--write-document"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.index("losses after 2 steps") < answer.stdout.index("| contestant |")
    (path,) = tmp_path.glob("step_32_*.json")
    result = json.loads(path.read_text())
    assert list(result["contestants"]) == ["unsharded", "fsdp2"]
    for entry in result["contestants"].values():
        assert len(entry["losses"]) == 2 and len(entry["seconds"]) == 1
        assert entry["time_ratio_to_fsdp2"]["reference"] == "fsdp2"
    assert result["contestants"]["fsdp2"]["time_ratio_to_fsdp2"]["median"] == 1.0
    assert result["not_run"] == {} and result["losses_that_disagree"] == {}
    assert result["environment"]["torch"] == torch.__version__
    if sys.platform == "linux":
        memory = result["contestants"]["fsdp2"]
        assert 0 < memory["peak_over_baseline_bytes"] < memory["peak_bytes"]
    assert str(tmp_path) not in path.read_text()
    assert path.with_suffix(".png").exists()
    page = (tmp_path / "page.md").read_text()
    assert "<!-- bench:step:32 -->\nGPT of 1 blocks of width 32" in page and "| fsdp2 |" in page


def test_host_cost_smoke(tmp_path: Path) -> None:
    answer = run_bench(
        "host_cost",
        *("--units", "2", "--rounds", "2", "--steps-per-round", "1", "--only", "fsdp2"),
        *("--results", str(tmp_path)),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (path,) = tmp_path.glob("host_cost_*.json")
    contestants = json.loads(path.read_text())["contestants"]
    assert list(contestants) == ["unsharded", "fsdp2"]
    assert "host_seconds_per_unit" not in contestants["unsharded"]["step"]
    assert contestants["fsdp2"]["forward_backward"]["host_cost_ratio_to_fsdp2"]["median"] == 1.0
