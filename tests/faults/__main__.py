"""Seeds each fault into a copy of the source and runs the tests that should notice it, up to the first that fails."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults.fault import Fault

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "fault")
)
SECONDS = 300  # a fault that makes ranks wait for each other is noticed by then


def main() -> int:
    """Run the faults of the rooms that were named; return 1 if the tests missed one."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all without it")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout whose tests are to be used")
    parser.add_argument("-k", default="", metavar="TEXT", help="only faults in whose entry it occurs")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="faults at a time")
    arguments = parser.parse_args()
    rooms = arguments.rooms or ROOMS
    if unknown := sorted(set(rooms) - set(ROOMS)):
        parser.error(f"unknown rooms {', '.join(unknown)}; expected some of {', '.join(ROOMS)}")
    totals = []
    for room in rooms:
        faults = importlib.import_module(f"tests.faults.{room}").FAULTS
        faults = [fault for fault in faults if arguments.k in str(fault)]
        since = time.monotonic()
        with ThreadPoolExecutor(arguments.n) as pool:
            noticed = sum(pool.map(partial(_is_noticed, root=arguments.root.resolve()), faults))
        totals.append((noticed, len(faults)))
        print(f"{room}: {noticed} of {len(faults)} faults were noticed, {time.monotonic() - since:.0f} s", flush=True)
    return int(any(noticed < faults for noticed, faults in totals))


def _is_noticed(fault: Fault, root: Path) -> bool:
    """Run the tests of a fault on a copy of the source that has it, and print what became of them."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as name:
        source = Path(name) / "src"
        shutil.copytree(ROOT / "src", source)
        path = source / "fullshard" / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.file}: expected {fault.old!r} once, found it {text.count(fault.old)} times")
        path.write_text(text.replace(fault.old, fault.new))
        by = _first_failure([str(root / "tests" / test) for test in fault.tests], source, root)
    word = "noticed" if by else "MISSED"
    print(f"{word} {time.monotonic() - since:4.0f} s  {fault.file}: {fault.consequence} {by}", flush=True)
    return bool(by)


def _first_failure(tests: list[str], source: Path, root: Path) -> str:
    """The first of the tests that fails; an empty text if none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{root}"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"(still running after {SECONDS} s)"
    if done.returncode not in (0, 1, 2):  # passed, failed, an error during collection; else it could not run them
        raise RuntimeError(f"pytest could not run {tests}: {done.stderr}{done.stdout}")
    failures = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, flags=re.MULTILINE)
    return f"({failures[0]})" if failures else ""


if __name__ == "__main__":
    sys.exit(main())
