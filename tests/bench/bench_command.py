"""Runs ``python -m bench`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.environment import REPOSITORY


def run_bench(*arguments: str, module: str = "bench", timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_small(folder: Path, name: str, options: str) -> tuple[str, list[Path]]:
    """Run a benchmark to its page in ``folder``; the page, and the JSON files. Nothing says where they are."""
    files = ("--results", str(folder), "--document", str(folder / "page.md"), "--write-document")
    answer = run_bench(name, *options.split(), *files)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = sorted(folder.glob("*.json"))
    assert found and all(str(folder) not in path.read_text() for path in found)
    return (folder / "page.md").read_text(), found
