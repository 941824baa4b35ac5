"""`make test CPU=<name>`: the instruction sets of other processors reach the ranks, and CI takes each in turn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from ranks import Rank, RankPool

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE, CI = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()


def instruction_sets(rank: Rank) -> tuple[str, str | None]:
    return torch.backends.cpu.get_cpu_capability(), os.environ.get("MKL_CBWR")


def show_those_of_ranks() -> None:
    pool = RankPool()
    print(pool(2, instruction_sets))
    pool.close()


def words(pattern: str, text: str) -> list[str]:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, pattern
    return found[1].split()


def test_ci_takes_each_in_turn() -> None:
    """CI knows the names of the Makefile, each with its settings, and runs the one whose hour it is."""
    names = words(r"^CPUS := (.*)$", MAKEFILE)
    assert words(r"^cpus=\((.*?)\)", CI) == names
    for name in names:
        assert (words(rf"^CPU_{name} :=(.*)$", MAKEFILE) == []) == (name == "own")
    assert 'make test CPU="$cpu"' in CI
    choose = "\n".join(line for line in CI.splitlines() if line.startswith("cpu"))
    hours = [choose.replace("$(date -u +%s)", str(3600 * hour + 17)) + '; echo "$cpu"' for hour in range(9, 14)]
    chosen = [subprocess.run(["bash", "-c", h], capture_output=True, text=True, check=True).stdout for h in hours]
    assert [line.strip() for line in chosen] == [names[hour % len(names)] for hour in range(9, 14)]


def test_files_that_the_makefile_names_exist() -> None:
    """Tests that every run takes to the emulated accelerator were not renamed meanwhile."""
    named = re.search(r"^SOME_ON_ACCELERATOR := \$\(addprefix tests/,(.*?)\)", MAKEFILE, re.MULTILINE | re.DOTALL)
    assert named is not None
    files = named[1].replace("\\\n", " ").split()
    assert len(files) > 5 and not [name for name in files if not (ROOT / "tests" / name).exists()]


def test_ranks_inherit_them() -> None:
    """Ranks compute with the instruction sets that the environment of the pytest process names."""
    chosen = dict(setting.split("=") for setting in words(r"^CPU_avx2 := (.*)$", MAKEFILE))
    chosen["ATEN_CPU_CAPABILITY"] = "default"  # any x86 or Arm processor has it
    program = "import sys; sys.path.insert(0, 'tests'); import test_processors; test_processors.show_those_of_ranks()"
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str([("DEFAULT", "AVX2")] * 2), done.stderr
