"""Seeds each fault into a copy of the source and runs the tests that should notice it."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.fault import Fault

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "fault")
)
SECONDS = 600  # a fault that makes ranks wait for each other is noticed by then


def main() -> int:
    """Run the faults of the rooms that were named; return 1 if the tests missed one."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all without it")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout whose tests are to be used")
    arguments = parser.parse_args()
    rooms = arguments.rooms or ROOMS
    if unknown := sorted(set(rooms) - set(ROOMS)):
        parser.error(f"unknown rooms {', '.join(unknown)}; expected some of {', '.join(ROOMS)}")
    faults = [fault for room in rooms for fault in importlib.import_module(f"tests.faults.{room}").FAULTS]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as name:
        source = Path(name) / "src"
        shutil.copytree(ROOT / "src", source)
        for fault in faults:
            since = time.monotonic()
            word = _outcome(fault, source, arguments.root)
            missed += word == "MISSED"
            print(f"{word:8} {time.monotonic() - since:4.0f} s  {fault.file}: {fault.consequence}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were noticed")
    return int(missed > 0)


def _outcome(fault: Fault, source: Path, root: Path) -> str:
    path = source / "fullshard" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file}: expected the text {fault.old!r} once, found it {text.count(fault.old)} times")
    path.write_text(text.replace(fault.old, fault.new))
    try:
        return _run([str(root / "tests" / name) for name in fault.tests], source, root)
    finally:
        path.write_text(text)


def _run(paths: list[str], source: Path, root: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{root}"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode > 1:  # not a failed test: pytest could not even run them
        return "noticed" if "rror" in done.stdout else f"pytest {done.returncode}"
    return "noticed" if done.returncode else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
