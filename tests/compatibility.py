"""Runs the core of the test suite on several versions of Python and torch: ``python -m tests.compatibility``.

Each combination gets a virtual environment with torch, this checkout (as a wheel) and pytest. The outcomes are added to
``tests/compatibility.json``, and their table is written into ``docs/get_started/installation.md``. ``--python`` and
``--torch`` choose versions; ``--only 3.10:2.12.1 3.13:2.15.0`` names combinations. uv makes the environments if it is
installed, else ``pythonX.Y -m venv`` and pip. On Linux, torch from PyPI is a build for CUDA with several GB of
libraries, which runs on CPUs as well; ``--install "--torch-backend cpu"`` makes uv take the builds for CPUs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "compatibility.json"
PAGE = ROOT / "docs" / "get_started" / "installation.md"
OPENING, CLOSING = "<!-- compatibility -->", "<!-- /compatibility -->"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.12.1", "2.13.0", "2.14.1", "2.15.0")
WITHOUT = {("3.10", "2.15.0")}  # torch has no such build
TOOLS = ("pytest>=8.2", "pytest-xdist>=3.6", "hypothesis>=6.100", "setuptools>=70", "spmd-types>=0.2.3")

# What may differ between versions: collectives and their names, DTensor, hooks, autograd and torch.compile, pytrees,
# optimizers, state dicts, and the private names that the drop-in replaces.
CORE = (
    "tests/test_torch_names.py",
    "tests/test_public_names.py",
    "tests/checkpoint/test_save_load.py",
    "tests/dropin/test_dropin_pipelining.py",
    "tests/dropin/test_dropin_private_names.py",
    "tests/dropin/test_dropin_state_dict.py",
    "tests/engine/test_containers.py",
    "tests/engine/test_extensions.py",
    "tests/engine/test_mixed_precision.py",
    "tests/engine/test_parameters.py",
    "tests/engine/test_placements.py",
    "tests/engine/test_python_groups.py",
    "tests/engine/test_spmd_types.py",
    "tests/engine/test_tensor_parallel.py",
    "tests/golden/test_golden_traces.py",
    "tests/optim/test_localize.py",
    "tests/optim/test_norms.py",
    "tests/training/test_compiling_and_functions.py",
    "tests/training/test_copies_and_pickling.py",
    "tests/training/test_caller_finalizes.py",
    "tests/training/test_gradient_hooks.py",
    "tests/training/test_names_of_torch_2_15.py",
    "tests/training/test_parity.py",
    "tests/training/test_recomputation.py",
    "tests/wrap/test_activation_checkpoint.py",
    "tests/wrapper/test_grad_scaler.py",
    "tests/wrapper/test_torch_state_dict.py",
)
SECONDS = 900  # for one combination; far more than it takes

Outcome = dict[str, Any]


def main() -> int:
    """Run the combinations that were named; return 1 if one could not be installed, or a test of it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions, as 3.12")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions, as 2.13.0")
    parser.add_argument("--only", nargs="+", default=[], metavar="PYTHON:TORCH", help="these and no others")
    parser.add_argument("--environments", type=Path, help="a folder for them, kept; else a temporary one")
    parser.add_argument("--install", default="", metavar="OPTIONS", help="of uv pip install or pip install")
    parser.add_argument("--workers", type=int, default=2, help="pytest's, each with two or four ranks")
    parser.add_argument("--dry", action="store_true", help="print the outcomes, write no file")
    given = parser.parse_args()
    combinations = [tuple(each.split(":")) for each in given.only] or [
        (python, torch) for torch in given.torch for python in given.python if (python, torch) not in WITHOUT
    ]
    good = True
    for python, torch in combinations:
        with tempfile.TemporaryDirectory(prefix="fullshard-compatibility-") as temporary:
            folder = (given.environments or Path(temporary)) / f"py{python}-torch{torch}"
            outcome = {"python": python, "torch": torch, **circumstances()}
            try:
                executable = install(folder.resolve(), python, torch, shlex.split(given.install))
                outcome |= run(executable, given.workers)
            except (subprocess.SubprocessError, OSError) as error:
                outcome["not_run"] = reason(error)
        good &= not outcome.get("failed", True)
        print(row(outcome), *outcome.get("failures", []), sep="\n  ", flush=True)
        if not given.dry:
            write(outcome)
    return int(not good)


def install(folder: Path, python: str, torch: str, options: list[str]) -> Path:
    """Make the environment unless it is there, install what a run needs, and return its interpreter."""
    executable = folder / "bin" / "python"
    uv = shutil.which("uv")
    if not executable.exists():
        command = [uv, "venv", "-q", "-p", python] if uv else [f"python{python}", "-m", "venv"]
        checked([*command, str(folder)])
    pip = [str(executable), "-m", "pip", "install"]
    if uv:  # which takes a folder that it has built before for unchanged, where pip builds it anew
        pip = [uv, "pip", "install", "-p", str(executable), "--reinstall-package", "fullshard"]
    checked([*pip, *options, f"torch=={torch}", *TOOLS, str(ROOT)])
    return executable


def run(executable: Path, workers: int) -> Outcome:
    """Run the core in an environment, on the installed package."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python, torch = checked([str(executable), "-c", versions]).split()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = f"-q --no-showlocals -p no:cacheprovider -n {workers} --dist loadfile --durations=40".split()
        command = [str(executable), "-m", "pytest", *options, f"--junitxml={report}", *CORE]
        with (executable.parent.parent / "pytest.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=SECONDS)
        outcome = read(report)
    return {"python": python, "torch": torch, **outcome, "seconds": round(time.monotonic() - began)}


def read(report: Path) -> Outcome:
    """The numbers of a report of pytest's, and the names of the tests that failed."""
    cases = list(xml.etree.ElementTree.parse(report).getroot().iter("testcase"))
    kinds = [{child.tag for child in case} & {"failure", "error", "skipped"} for case in cases]
    if not cases:
        raise RuntimeError("pytest ran no test")
    bad = (case for case, kind in zip(cases, kinds, strict=True) if kind & {"failure", "error"})
    failures = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    passed, skipped = sum(not kind for kind in kinds), sum("skipped" in kind for kind in kinds)
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}


def circumstances() -> Outcome:
    """When and on what this runs: date, commit, system and processor architecture."""
    commit = checked(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    changed = checked(["git", "-C", str(ROOT), "status", "--porcelain", "--", "src", "tests"])
    changed = "".join(line for line in changed.splitlines() if not line.endswith(RESULTS.name))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": f"{commit}, changed" if changed else commit,
        "system": f"{platform.system()} {platform.machine()}",
    }


def write(outcome: Outcome) -> None:
    """Add an outcome to the results, in place of an earlier one of that combination, and write the table."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [each for each in stored if combination(each) != combination(outcome)]
    outcomes = sorted([*kept, outcome], key=combination)
    RESULTS.write_text(json.dumps(outcomes, indent=1) + "\n")
    before, found, after = PAGE.read_text().partition(OPENING)
    if not found or CLOSING not in after:
        raise ValueError(f"{PAGE.name} has no {OPENING} ... {CLOSING}")
    PAGE.write_text(f"{before}{OPENING}\n{table(outcomes)}\n{CLOSING}{after.partition(CLOSING)[2]}")


def combination(outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Minor version of Python, and release of torch: what a table has one row for."""
    python, torch = (tuple(map(int, re.findall(r"\d+", outcome[name].split("+")[0]))) for name in ("python", "torch"))
    return torch, python[:2]


def table(outcomes: Iterable[Outcome]) -> str:
    """The outcomes as Markdown."""
    head = "| Python | torch | passed | failed | skipped | date | commit |\n|---|---|---|---|---|---|---|"
    return "\n".join([head, *map(row, outcomes)])


def row(outcome: Outcome) -> str:
    """One line of the table."""
    counts = ["not run", "", ""]
    if "failed" in outcome:
        counts = [str(outcome[name]) for name in ("passed", "failed", "skipped")]
    cells = [outcome["python"], outcome["torch"], *counts, outcome["date"], outcome["commit"]]
    return f"| {' | '.join(cells)} |"


def checked(command: list[str]) -> str:
    """Run a command that has to succeed, and return what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def reason(error: Exception) -> str:
    """What kind of failure it was; its text, which names places of this machine, is printed only."""
    print(getattr(error, "stderr", None) or error, file=sys.stderr)
    return type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
