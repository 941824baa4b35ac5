"""`fullshard inspect` and `fullshard export`: what they show, and exit codes 0, 1 and 2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from checkpoint.contents import flip, write
from fullshard.checkpoint.tools.commands import parse_size
from fullshard.cli import app
from patience import patient


def save(path: Path, *, more: int = 0, **changes: Any) -> str:
    entries = {
        "model.layer.weight": torch.full((30, 20), 1.5),
        "model.layer.bias": torch.zeros(30, dtype=torch.bfloat16),
        "optimizer.state.layer.weight.exp_avg": torch.zeros(30, 20),
        "extra.note": "[red]not markup[/]",
        **{f"model.more.{i}": torch.zeros(()) for i in range(more)},
        **changes,
    }
    return write(path, entries, about={"step": 7}, aliases={"model.tied": "model.layer.weight"})


def run(*arguments: str, code: int = 0) -> str:
    """What a command prints, with spaces in place of whatever separates words, once its exit code is as expected."""
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, arguments)
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def test_inspect_lists(tmp_path: Path) -> None:
    """What there is at a glance: totals, parts, tensors, values, what the saver said, tied names."""
    shown = run("inspect", save(tmp_path / "c"))
    for text in (
        "3 tensors with 1.2 K elements, 4.9 kB · 1 other value · 1 file",
        "step 7",
        "model 2 630 elements, 2.5 kB float32, bfloat16",
        "optimizer.state.*.exp_avg 1 600 elements, 2.4 kB float32",
        "model.layer.weight float32 30 x 20 2.4 kB 1",
        "= model.layer.weight",
        "extra.note '[red]not markup[/]'",
        "and 1 more tensors",
    ):
        assert text in shown
    assert "optimizer.state.layer.weight.exp_avg" not in shown  # one of many like it


def test_inspect_names(tmp_path: Path) -> None:
    """A pattern lists all that match, however many, and shows values whole; none is wrong input."""
    note, name = "".join(f"{i:03}" for i in range(100)), "extra.a_setting_with_a_name"
    path = save(tmp_path / "c", more=40, **{name: note})
    shown = run("inspect", path, "--names", "model.more.*")
    assert all(f"model.more.{i} " in shown for i in range(40)) and "model.layer" not in shown.split("shards")[1]
    assert "more tensors" not in shown
    assert "exp_avg float32 30 x 20" in run("inspect", path, "--names", "*exp_avg")
    assert "no tensor or value" in run("inspect", path, "--names", "nosuch*", code=2)
    glance = run("inspect", path)
    assert "and 14 more tensors" in glance
    assert note[:90] in glance.replace(" ", "") and note not in glance.replace(" ", "")
    assert note in run("inspect", path, "--names", "extra.*").replace(" ", "")
    result = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["inspect", path, "--names", name])
    assert re.search(rf"^ *{name} ", result.output, re.MULTILINE), result.output  # the name is not folded


def test_inspect_verifies(tmp_path: Path) -> None:
    """0 and a sentence where all is well; 1 and every problem where something is not."""
    path = save(tmp_path / "c")
    assert "verified: 4.9 kB of tensors, all checksums match" in run("inspect", path, "--verify")
    (file,) = Path(path).glob("data-*")
    flip(file, -100)
    flip(file, -3000)
    shown = run("inspect", path, "--verify", code=1)
    assert shown.count("problem: ") == 2 and "2 problems found" in shown and "extra.note" in shown
    assert "cannot be read; run with --verify to see the error" in run("inspect", path)


def test_wrong_input(tmp_path: Path) -> None:
    """No such folder, no checkpoint in it, options that mean nothing: exit code 2 and one line that says so."""
    path = save(tmp_path / "c")
    out = str(tmp_path / "x.safetensors")
    (tmp_path / "empty").mkdir()
    for arguments, message in [
        (("inspect", str(tmp_path / "nosuch")), "has no checkpoint: it is empty or missing"),
        (("inspect", str(tmp_path / "empty")), "has no checkpoint"),
        (("export", str(tmp_path / "nosuch"), out), "has no checkpoint"),
        (("export", path, out, "--dtype", "int8"), "--dtype: expected a floating-point"),
        (("export", path, out, "--dtype", "nosuch"), "--dtype: expected a floating-point"),
        (("export", path, out, "--max-shard-size", "5 apples"), "--max-shard-size: expected a size"),
        (("export", path, out, "--prefix", "x."), "no tensor"),
        (("export", path, out, "--dtype", "float8_e8m0fnu"), "does not support the dtypes"),
        (("export", path, "s3://bucket/x.safetensors"), "found the URL 's3://bucket/x.safetensors'"),
    ]:
        assert message in run(*arguments, code=2)
    assert not Path(out).exists() and not Path("s3:").exists()


def test_export(tmp_path: Path) -> None:
    """A file, converted; a folder in the layout; 1 where the checkpoint is damaged or the place cannot be written."""
    path = save(tmp_path / "c")
    assert "x.safetensors" in run("export", path, str(tmp_path / "x.safetensors"), "--dtype", "bfloat16")
    found = load_file(tmp_path / "x.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(
        ["layer.weight", "layer.bias"], torch.bfloat16
    )
    shown = run("export", path, str(tmp_path / "out"), "--max-shard-size", "2kB")
    assert "model-00002-of-00002.safetensors" in shown and "model.safetensors.index.json" in shown
    (tmp_path / "file").write_text("")
    run("export", path, str(tmp_path / "file" / "x.safetensors"), code=1)
    (file,) = Path(path).glob("data-*")
    file.unlink()
    assert "no such file" in run("export", path, str(tmp_path / "y.safetensors"), code=1)
    assert not (tmp_path / "y.safetensors").exists()


def test_sizes() -> None:
    """Decimal and binary units, with and without a space; nothing else."""
    expected = {"5GB": 5 * 10**9, "1.5 MiB": 3 * 2**19, "100": 100, "2kb": 2000, " 1 TB ": 10**12}
    assert {text: parse_size(text) for text in expected} == expected
    for text in ("", "GB", "-1GB", "0", "1e9", "5 XB", "1..5GB", "0.1"):
        with pytest.raises(ValueError, match="expected a size"):
            parse_size(text)


def test_help_needs_no_torch() -> None:
    """The command line by itself imports no torch to answer a question about its options."""
    code = """
import importlib.util, sys, types
package = types.ModuleType("fullshard")  # the package's public names do import torch
package.__path__ = list(importlib.util.find_spec("fullshard").submodule_search_locations)
sys.modules["fullshard"] = package
from fullshard.cli import app
for command in ("inspect", "export"):
    try:
        app([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
print("heavy:", {"torch", "numpy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert "--verify" in done.stdout and "--max-shard-size" in done.stdout
    assert done.stdout.endswith("heavy: set()\n"), done.stdout + done.stderr
