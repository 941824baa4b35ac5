"""``python -m bench gpu``: what it concludes from measurements made by hand, and a rehearsal on the emulated device."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.environment import REPOSITORY
from bench.gpu import driver, overlap, page, suite
from bench.gpu.parts import PARTS

MISSING = runpy.run_path(str(REPOSITORY / "tests" / "accelerator" / "build.py"))["missing"]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a CUDA device nothing is run, and nothing written."""
    assert driver.run(driver.Options(results=tmp_path))
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_nothing_but_torch_and_what_fullshard_imports_is_needed() -> None:
    """On a machine with little else: neither the command nor its parts import a package of the other benchmarks."""
    code = """
import importlib, sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"typer", "rich", "matplotlib", "pytest", "hypothesis"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refusing())
import bench.__main__
for name in ("driver", "parts", "page", "step", "host", "graphs", "races", "overlap", "suite"):
    importlib.import_module("bench.gpu." + name)
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_rehearsal(tmp_path: Path) -> None:
    """Parts run on the emulated accelerator, and the page says that nothing there is a measurement."""
    names = ("races", "step, one rank, fp32")
    assert driver.run(driver.Options(device="emulated", small=True, results=tmp_path, only=names, commit="abc"))
    result = json.loads((tmp_path / "gpu_emulated.json").read_text())
    measured = result["parts"]
    assert tuple(measured) == names and result["environment"]["commit"] == "abc"
    assert not any(entry.get("failed") or entry.get("not_run") for entry in measured.values()), measured
    modes = measured["races"]["modes"].values()
    assert all(mode["races"] == 0 and not mode["differ"] and mode["finite"] for mode in modes)
    assert all(fault["races"] > 0 for fault in measured["races"]["faults"].values())
    one_rank = measured["step, one rank, fp32"]["contestants"]
    assert one_rank["fullshard"]["losses"] == one_rank["unsharded"]["losses"] == one_rank["fsdp2"]["losses"]
    assert one_rank["fullshard"]["time_ratio_to_fsdp2"]["median"] > 0
    text = (tmp_path / "gpu.md").read_text()
    assert "nothing here is a measurement" in text and "commit abc" in text
    assert text.count("| fullshard |") == 1 and str(tmp_path) not in text


def test_the_parts_fit_into_ten_minutes() -> None:
    """Time limits add up to less than ten minutes, and every part has a section on the page."""
    assert sum(part.seconds for part in PARTS) < 590
    assert {part.name.split(",")[0] for part in PARTS} == set(page._SECTIONS)
    assert all((REPOSITORY / "tests" / name).exists() for name in (*suite.FOLDERS, *suite.REHEARSED))


def test_the_page_is_that_of_the_results() -> None:
    """docs/performance/gpu.md is rendered from the latest results, with why a part failed and what was not reached."""
    stored = page.load()
    assert page.PAGE.read_text(encoding="utf-8") == page.render(stored)
    text = page.render({**stored, "parts": {"graphs": {"failed": "out of luck", "seconds": 3.0}}})
    assert "Failed after 3 s: out of luck" in text and text.count("Not run.") == len(PARTS) - 1


# ---------------------------------------------------------------- what the parts conclude


def test_hidden_communication() -> None:
    """Messages count as hidden while a kernel of the busiest other stream runs, however the spans lie."""

    def kernel(name: str, stream: int, begin: float, end: float) -> dict[str, Any]:
        return {"cat": "kernel", "ph": "X", "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}

    message = "void at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        kernel(message, 20, 0, 10),
        kernel(message, 24, 20, 30),
        kernel("gemm", 7, 5, 22),
        kernel("gelu", 7, 21, 24),
        kernel("copy", 20, 26, 27),  # into a message: neither
        {"cat": "cpu_op", "ph": "X", "name": "aten::mm", "ts": 0, "dur": 100},
    ]
    found = overlap.hidden(events)
    assert found["message_seconds"] == pytest.approx(20e-6)
    assert found["computation_seconds"] == pytest.approx(19e-6)
    assert found["hidden_share"] == pytest.approx((5 + 4) / 20)
    assert overlap.hidden([])["hidden_share"] == 0.0


def test_reports_of_pytest_are_read(tmp_path: Path) -> None:
    """Outcomes are counted by file, and failures kept."""
    path = tmp_path / "report.xml"
    path.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.engine.test_a" name="one"/>
        <testcase classname="tests.engine.test_a" name="two"><failure message="no">long</failure></testcase>
        <testcase classname="tests.engine.test_b" name="three"><skipped message="why"/></testcase>
        <testcase name="interrupted"/>
        </testsuite></testsuites>"""
    )
    found = suite.read_report(path)
    assert found["files"] == {"engine/test_a": {"passed": 1, "failed": 1}, "engine/test_b": {"skipped": 1}}
    assert found["failures"] == {"engine/test_a::two": "no\nlong"}
    assert "| all | 1 | 1 | 1 |" in suite.table({**found, "stopped_by_the_time_limit": True})
