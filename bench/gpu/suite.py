"""The tests on the device: ``tests/devices``, and as many of the ordinary ones as the time limit lets through."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench import report
from bench.environment import REPOSITORY
from bench.gpu.parts import Settings

# In the order in which they run, so what matters most on a device comes first.
FOLDERS = ("devices", "training", "engine", "optim", "wrapper", "checkpoint")
REHEARSED = ("devices/test_device_checkpoint.py",)
# Ranks of NCCL that share a GPU: little of its memory for each communicator, and there are many.
SMALL = {"NCCL_BUFFSIZE": str(2**19), "NCCL_MAX_CTAS": "2"}
TO_END = 20.0  # seconds that an interrupted pytest has for its report


def measure(settings: Settings) -> dict[str, Any]:
    """How many passed, failed and were skipped, by file, and how those that failed did."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={told}"]
        if importlib.util.find_spec("xdist") and not settings.small:  # each has worlds of one, two and four ranks
            command += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2))), "--dist", "loadfile"]
        command += [f"tests/{name}" for name in (REHEARSED if settings.small else FOLDERS)]
        environment = {**SMALL, **os.environ, "FULLSHARD_TEST_DEVICE": settings.device}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
        stopped = False
        try:
            process.wait(max(1.0, settings.seconds - TO_END))
        except subprocess.TimeoutExpired:
            stopped = True
            process.send_signal(signal.SIGINT)  # pytest ends with a report of what it has done
            process.wait(TO_END)
        return {**read_report(told), "stopped_by_the_time_limit": stopped, "status": process.returncode}


def read_report(path: Path) -> dict[str, Any]:
    """Counts by file and the failures of a report in JUnit's format."""
    files: dict[str, Counter[str]] = {}
    failures: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        if not file:  # of the test that was running when the time was up
            continue
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        outcome = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        files.setdefault(file, Counter())[outcome] += 1
        if bad is not None:
            text = f"{bad.get('message', '')}\n{bad.text or ''}".strip()
            failures[f"{file}::{case.get('name')}"] = re.sub(r"/\S*/(?=site-packages/|tests/|src/)", "", text)[:2000]
    return {"files": {name: dict(counts) for name, counts in files.items()}, "failures": failures}


def table(result: Mapping[str, Any]) -> str:
    """Markdown of what ``measure`` returned."""
    kinds = ("passed", "failed", "skipped")
    rows = [[name, *(str(counts.get(kind, 0)) for kind in kinds)] for name, counts in result["files"].items()]
    total = [sum(counts.get(kind, 0) for counts in result["files"].values()) for kind in kinds]
    text = report.markdown_table(["file", *kinds], [*rows, ["all", *map(str, total)]])
    if result["stopped_by_the_time_limit"]:
        text += "\n\nThe time limit of ten minutes ended the tests here; the other files did not run."
    if result["failures"]:
        text += "\n\nFailed:\n\n" + "\n".join(f"- `{name}`" for name in result["failures"])
    return text
