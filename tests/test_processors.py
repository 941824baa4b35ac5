"""What the Makefile and CI say of the test suite: instruction sets of other processors, tests on the accelerator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE, CI = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()


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


def test_tests_that_the_makefile_names_exist() -> None:
    """Tests that every run takes to the emulated accelerator were not renamed meanwhile."""
    shown = subprocess.run(
        ["make", "-s", "--eval", "show: ; @echo $(SOME_ON_ACCELERATOR)", "show"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    named = [name.partition("::") for name in shown.stdout.split()]
    assert len(named) > 20
    assert not [(file, test) for file, _, test in named if f"\ndef {test}" not in (ROOT / file).read_text()]
