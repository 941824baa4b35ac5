"""``python -m bench gpu``: what it concludes from a trace, and a rehearsal on the emulated device."""

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
from bench.gpu import driver, overlap
from bench.gpu.parts import PARTS

MISSING = runpy.run_path(str(REPOSITORY / "tests" / "accelerator" / "build.py"))["missing"]()


def test_only_torch_and_a_gpu_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing imports a package of the other benchmarks; without a CUDA device it says so, and nothing is written."""
    code = """
import importlib, sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"typer", "rich", "matplotlib", "pytest", "hypothesis"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refusing())
for name in ("driver", "parts", "step", "host", "overlap"):
    importlib.import_module("bench.gpu." + name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    if not torch.cuda.is_available():
        assert driver.run(driver.Options(results=tmp_path))
        assert "no CUDA device" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_rehearsal(tmp_path: Path) -> None:
    """A part runs on the emulated accelerator, and the page says that nothing there is a measurement."""
    name = "step, one rank, fp32"
    assert driver.run(driver.Options(device="emulated", small=True, results=tmp_path, only=(name,), commit="abc"))
    result = json.loads((tmp_path / "gpu_emulated.json").read_text())
    measured = result["parts"][name]
    assert result["environment"]["commit"] == "abc" and not measured.get("failed") and not measured["not_run"], measured
    one_rank = measured["contestants"]
    assert one_rank["fullshard"]["losses"] == one_rank["unsharded"]["losses"] == one_rank["fsdp2"]["losses"]
    assert one_rank["fullshard"]["time_ratio_to_fsdp2"]["median"] > 0
    text = (tmp_path / "gpu.md").read_text()
    assert "nothing here is a measurement" in text and "commit abc" in text and str(tmp_path) not in text
    assert text.count("| fullshard |") == 1 and text.count("Not run.") == len(PARTS) - 1
    failed = dict(driver.blocks({**result, "parts": {"host": {"failed": "out of luck", "seconds": 3.0}}}))
    assert failed["gpu:host"] == "Failed after 3 s: out of luck"


def test_hidden_communication() -> None:
    """Messages count as hidden while a kernel of the busiest other stream runs, however the spans lie."""
    message = "void at::cuda::(anonymous namespace)::spin_kernel(long)"
    kernels = [
        (message, 20, 0, 10),
        (message, 24, 20, 30),
        ("gemm", 7, 5, 22),
        ("gelu", 7, 21, 24),
        ("copy", 20, 26, 27),
    ]
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "ph": "X", "name": "aten::mm", "ts": 0, "dur": 100}]
    for name, stream, begin, end in kernels:
        span = {"ts": begin, "dur": end - begin, "args": {"stream": stream}}
        events.append({"cat": "kernel", "ph": "X", "name": name, **span})
    found = overlap.hidden(events)
    assert found["message_seconds"] == pytest.approx(20e-6)
    assert found["computation_seconds"] == pytest.approx(19e-6)  # without the copy into a message
    assert found["hidden_share"] == pytest.approx((5 + 4) / 20)
    assert overlap.hidden([])["hidden_share"] == 0.0
