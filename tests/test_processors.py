"""What the Makefile and CI say of the test suite: instruction sets of other processors, tests on the accelerator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE, CI = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def words(pattern: str, text: str) -> list[str]:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, pattern
    return found[1].split()


def test_ci_takes_each() -> None:
    """CI runs on the processor's own instructions, always, and its workflow has a job for each other set."""
    names = words(r"^CPUS := (.*)$", MAKEFILE)
    for name in names:
        assert (words(rf"^CPU_{name} :=(.*)$", MAKEFILE) == []) == (name == "own")
    assert 'make test CPU="${CPU:-own}"' in CI and "date" not in CI
    assert words(r"^ +cpu: \[(.*)\]$", WORKFLOW.replace(",", "")) == [name for name in names if name != "own"]


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
