"""``python -m fullshard.dropin``: programs that know nothing of fullshard, and the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.dropin import installed
from fullshard.dropin.__main__ import main

PROGRAM = """
import os, sys
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

model = fully_shard(nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
line = f"{FSDPModule.__module__} {isinstance(model, FSDPModule)} {sys.argv[1:]} {__name__} {sys.path[0]}\\n"
os.write(1, line.encode())
torch.distributed.destroy_process_group()
"""
STARTER = """
import subprocess, sys
print("starter", sys.argv[1:], flush=True)
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python arguments...`` in ``folder``."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a program, a program that starts others, and a module."""
    (tmp_path / "inner").mkdir()
    for name, text in (("inner/program.py", PROGRAM), ("starter.py", STARTER), ("a_module.py", PROGRAM)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_runs_a_script(folder: Path):
    """With its arguments and its folder in front of the path; one line on stderr says what was replaced."""
    done = run(folder, "-m", "fullshard.dropin", "inner/program.py", "-m", "--x", "1")
    assert done.returncode == 0, done.stderr
    expected = f"fullshard.fsdp_module True ['-m', '--x', '1'] __main__ {folder / 'inner'}"
    assert done.stdout.strip() == expected
    assert sum("stands in for torch.distributed.fsdp" in line for line in done.stderr.splitlines()) == 1


def test_runs_a_module_on_two_ranks(folder: Path):
    """Under torchrun; only the first rank says what was replaced."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(folder, *ranks, "-m", "fullshard.dropin", "-m", "a_module", "one")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"fullshard.fsdp_module True ['one'] __main__ {folder}"] * 2
    assert done.stderr.count("stands in for torch.distributed.fsdp") == 1


def test_processes_that_a_program_starts_stand_in_too(folder: Path):
    """A launcher under the drop-in. A sitecustomize of the user's own runs as well, and others import nothing more."""
    (folder / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'ran'\n")
    done = run(folder, "-m", "fullshard.dropin", "starter.py", "inner/program.py", PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("fullshard.fsdp_module True [] __main__")
    look = "import os, sys; print(os.environ['OWN'], 'torch' in sys.modules, 'fullshard' in sys.modules)"
    done = run(folder, "-m", "fullshard.dropin", "starter.py", "-c", look, PYTHONPATH=str(folder))
    assert done.stdout.splitlines()[1] == "ran False False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "usage: python -m fullshard.dropin"),
        (["--help"], 0, "Runs a Python script"),
        (["missing.py"], 2, "there is no missing.py; for a module say -m missing.py"),
    ],
)
def test_wrong_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, text: str):
    """Exit status and what to do, before anything is installed."""
    assert main(arguments) == status
    printed = capsys.readouterr()
    assert text in (printed.err if status else printed.out)
    assert not installed()


def test_a_program_that_fails_fails(folder: Path):
    """With its own exit status or traceback."""
    (folder / "fails.py").write_text("raise SystemExit(7)")
    assert run(folder, "-m", "fullshard.dropin", "fails.py").returncode == 7
