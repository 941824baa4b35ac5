"""The table of versions in docs/get_started/installation.md, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compatibility
from compatibility import CLOSING, CORE, OPENING, PAGE, PYTHONS, RESULTS, ROOT, TORCHES, WITHOUT

WHERE = {"system": "Linux x86_64", "date": "2026-11-24", "commit": "abc"}
RAN = {"python": "3.10.13", "torch": "2.11.0+cpu", "passed": 7, "failed": 0, "skipped": 1, **WHERE}
REPORT = """<testsuites><testsuite><testcase classname="a" name="test_good"/>
<testcase classname="a" name="test_bad"><failure message="no"/></testcase>
<testcase classname="a" name="test_broken"><failure message="no"/><error message="teardown"/></testcase>
<testcase classname="b" name="test_skipped"><skipped message="not here"/></testcase></testsuite></testsuites>"""


def test_page_has_the_table_of_the_results() -> None:
    """The page shows what the results say, and what the core names is there."""
    shown = PAGE.read_text().partition(OPENING)[2].partition(CLOSING)[0].strip()
    assert shown == compatibility.table(json.loads(RESULTS.read_text()))
    assert [name for name in CORE if not (ROOT / name).exists()] == []


def test_stated_versions_have_run() -> None:
    """Each combination of the versions of Python and torch that are called supported has a row without a failure."""
    outcomes = json.loads(RESULTS.read_text())
    ran = {compatibility.combination(each) for each in outcomes if each.get("failed") == 0 and each["passed"] > 500}
    stated = [{"python": p, "torch": t} for p in PYTHONS for t in TORCHES if (p, t) not in WITHOUT]
    assert not [each for each in stated if compatibility.combination(each) not in ran]


def test_outcomes_of_a_report(tmp_path: Path) -> None:
    """Tests are counted once, also those of which test and teardown failed."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    failures = ["a::test_bad", "a::test_broken"]
    assert compatibility.read(report) == {"passed": 1, "failed": 2, "skipped": 1, "failures": failures}


def test_a_run_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each minor version of Python and release of torch, whatever its build; others stay."""
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    monkeypatch.setattr(compatibility, "RESULTS", results)
    monkeypatch.setattr(compatibility, "PAGE", page)
    page.write_text(f"before\n{OPENING}\nold\n{CLOSING}\nafter\n")
    missing = {"python": "3.13", "torch": "2.11.0", "not_run": "no such build", **WHERE}
    for outcome in (missing, RAN, {**RAN, "python": "3.10.14", "torch": "2.11.0+cu130", "passed": 8}):
        compatibility.write(outcome)
    assert page.read_text().splitlines() == [
        "before",
        OPENING,
        "| Python | torch | passed | failed | skipped | date | commit |",
        "|---|---|---|---|---|---|---|",
        "| 3.10.14 | 2.11.0+cu130 | 8 | 0 | 1 | 2026-11-24 | abc |",
        "| 3.13 | 2.11.0 | not run |  |  | 2026-11-24 | abc |",
        CLOSING,
        "after",
    ]
