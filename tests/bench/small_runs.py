"""Runs a benchmark at its smallest size, the driver in this process."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from bench.__main__ import BENCHMARKS
from bench.command_line import start


def run_small(folder: Path, name: str, options: str, *more: str) -> tuple[str, dict[str, Any]]:
    """Run a benchmark to its page in ``folder``; the page, and the figures. Nothing says where they are."""
    module = importlib.import_module(BENCHMARKS[name])
    files = ["--results", str(folder), "--document", str(folder / "page.md"), "--write-document"]
    assert start(name, module.Options, module.run, "", [*options.split(), *more, *files]) == 0
    (path,) = folder.glob("*.json")
    page = (folder / "page.md").read_text()
    assert str(folder) not in path.read_text() + page and path.name.startswith(name)
    return page, json.loads(path.read_text())
