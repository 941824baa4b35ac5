"""``python -m fullshard.dropin``: programs that know nothing of fullshard, and the processes that they start."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullshard.dropin import installed
from fullshard.dropin.__main__ import main
from fullshard.dropin.inheritance import FOLDER, patch_pythonpath, restore_pythonpath
from patience import patient

PROGRAM = """
import atexit, multiprocessing, os, pickle, sys, threading, time
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

class Mine:
    pass

def look(queue):
    queue.put((fully_shard.__module__, __name__, Mine.__module__))

def outlive(what):
    time.sleep(0.1)
    os.write(1, f"{what} {type(pickle.loads(pickle.dumps(Mine()))) is Mine}\\n".encode())

if __name__ == "__main__":
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    where = f"{__name__} {sys.path[0]} {__file__}"
    os.write(1, f"{FSDPModule.__module__} {isinstance(model, FSDPModule)} {sys.argv[1:]} {where}\\n".encode())
    torch.distributed.destroy_process_group()
    atexit.register(outlive, "handler")
    threading.Thread(target=outlive, args=("thread",)).start()
    if "--spawn" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=look, args=(queue,))
        child.start()
        print(queue.get(timeout=100), flush=True)
        child.join()
"""
# What each first import leads to is looked at in a fork: importing torch is what takes long.
FIRST_IMPORTS = """
import importlib, importlib.util, os, sys
import torch

def engine(value):
    return value.__module__.partition(".")[0]

def check(what, statement):
    if os.fork():
        os.wait()
        return
    try:
        names = {}
        exec(statement, names)
        taken = names.get("m", sys)
        found = [getattr(taken, name) for name in ("FSDPModule", "fully_shard", "replicate") if hasattr(taken, name)]
        for package in ("fsdp", "_composable.fsdp", "_composable.replicate_with_fsdp"):
            found.append(importlib.import_module("torch.distributed." + package).FSDPModule)
        left = [finder for finder in sys.meta_path if type(finder).__name__ == "Finder"]
        print(what, {*map(engine, found)}, left, type(torch.distributed.fsdp.__loader__).__name__, flush=True)
    except BaseException as error:
        print(what, repr(error), flush=True)
    os._exit(0)

check("stage", "from torch.distributed.pipelining import stage as m")
check("checkpoint", "import torch.distributed.checkpoint")
check("state dict", "import torch.distributed.checkpoint.state_dict")
check("tools", "from torch.distributed._tools.mem_tracker import MemTracker")
check("probe", "import importlib.util; importlib.util.find_spec('torch.distributed.fsdp')")

sys.modules["fullshard"] = None  # as if there were none
for name in ("_composable.fsdp", "fsdp", "fsdp", "fsdp.wrap", "pipelining.stage"):
    try:
        importlib.import_module("torch.distributed." + name)
        print("imported", name)
    except ImportError as error:
        print("refused", name, error)
print(hasattr(torch.distributed, "fsdp"))
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python arguments...`` in ``folder``."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a program and a module."""
    (tmp_path / "inner").mkdir()
    for name, text in (("inner/program.py", PROGRAM), ("a_module.py", PROGRAM)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_runs_a_script(folder: Path):
    """As plain python does, through a link; with classes that are found to the end, and children that stand in."""
    (folder / "link.py").symlink_to(folder / "inner" / "program.py")
    done = run(folder, "-m", "fullshard.dropin", "./link.py", "-m", "--x", "--spawn")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    expected = "fullshard.composable.fsdp_module True ['-m', '--x', '--spawn'] __main__"
    assert first == f"{expected} {folder.resolve() / 'inner'} {folder.resolve()}/./link.py"
    assert sorted(rest) == [
        "('fullshard.composable.fully_shard', '__mp_main__', '__mp_main__')",
        "handler True",
        "thread True",
    ]
    assert sum("replaces torch.distributed.fsdp" in line for line in done.stderr.splitlines()) == 2


def test_runs_a_module_on_two_ranks(folder: Path):
    """Under torchrun; only the first rank says what was replaced."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(folder, *ranks, "-m", "fullshard.dropin", "-m", "a_module", "one")
    assert done.returncode == 0, done.stderr
    expected = f"fullshard.composable.fsdp_module True ['one'] __main__ {folder} {folder / 'a_module.py'}"
    assert sorted(done.stdout.splitlines()) == [expected] * 2 + ["handler True"] * 2 + ["thread True"] * 2
    assert done.stderr.count("replaces torch.distributed.fsdp") == 1


def test_waits_for_any_of_torchs_packages(folder: Path):
    """Whichever is imported first, looked for or not; without fullshard none of them can be imported, ever."""
    (folder / "first.py").write_text(FIRST_IMPORTS)
    done = run(folder, "first.py", PYTHONPATH=FOLDER)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ("stage", "checkpoint", "state dict", "tools", "probe")
    assert lines[: len(names)] == [f"{name} {{'fullshard'}} [] SourceFileLoader" for name in names]
    why = (
        "this Python was started by a program that runs with fullshard.dropin, but cannot import fullshard; install "
        f"fullshard for it, or remove {FOLDER} from PYTHONPATH"
    )
    refused = ("_composable.fsdp", "fsdp", "fsdp", "fsdp.wrap", "pipelining.stage")
    assert lines[len(names) :] == [*(f"refused {name} {why}" for name in refused), "False"]


@pytest.mark.parametrize("package", [False, True])
def test_hides_no_sitecustomize(folder: Path, package: bool):
    """The user's own is the module; with two installations, and one of them spelled in two ways, too."""
    other = folder / "other" / "fullshard" / "dropin" / "inherit"
    shutil.copytree(FOLDER, other)
    (folder / "link").symlink_to(FOLDER)
    own = folder / ("sitecustomize/__init__.py" if package else "sitecustomize.py")
    own.parent.mkdir(exist_ok=True)
    own.write_text("import sys\nVALUE = 3\nassert sys.modules[__name__].VALUE == 3\n")
    path = os.pathsep.join([FOLDER, str(other), str(folder / "link"), str(folder)])
    look = (
        "import sys, sitecustomize as s; print(s.VALUE, s.__name__, s.__spec__.origin, s.__file__,"
        "sum(type(finder).__name__ == 'Finder' for finder in sys.meta_path))"
    )
    done = run(folder, "-c", look, PYTHONPATH=path)
    assert done.stdout.split() == ["3", "sitecustomize", str(own), str(own), "1"], done.stderr
    assert not done.stderr


def test_imports_nothing_at_the_start(folder: Path):
    """Every Python process that a program starts pays for it."""
    (folder / "empty").mkdir()
    look = "import sys; print(sorted(sys.modules))"
    without = ast.literal_eval(run(folder, "-c", look, PYTHONPATH=str(folder / "empty")).stdout)
    with_it = ast.literal_eval(run(folder, "-c", look, PYTHONPATH=FOLDER).stdout)
    assert {*with_it} - {*without} <= {"sitecustomize"}


@pytest.mark.parametrize(
    ("before", "passed_on"),
    [
        (None, [FOLDER]),
        ("", [FOLDER]),
        ("a", [FOLDER, "a"]),
        (":a::b", [FOLDER, "", "a", "", "b"]),
        (f"a:{FOLDER}:/x/fullshard/dropin/inherit/:b", [FOLDER, "a", "b"]),
    ],
)
def test_passes_on_and_takes_back(monkeypatch: pytest.MonkeyPatch, before: str | None, passed_on: list[str]):
    """Once, in front of what there is; empty parts, which mean the current folder, are kept."""
    monkeypatch.setenv("PYTHONPATH", before or "")
    if before is None:
        monkeypatch.delenv("PYTHONPATH")
    for _ in range(2):
        patch_pythonpath()
        assert os.environ["PYTHONPATH"].split(os.pathsep) == passed_on
    for _ in range(2):
        restore_pythonpath()
        assert os.environ.get("PYTHONPATH") == (os.pathsep.join(passed_on[1:]) or None)


@pytest.mark.parametrize(
    ("flag", "names"),
    [("-I", ("isolated", "ignore_environment")), ("-E", ("ignore_environment",)), ("-S", ("no_site",))],
)
def test_refuses_flags_that_children_inherit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, names: tuple[str, ...]
):
    """Those with which they would not look at PYTHONPATH."""
    with monkeypatch.context() as context:
        flags = dict.fromkeys(("isolated", "ignore_environment", "no_site"), 0) | dict.fromkeys(names, 1)
        context.setattr(sys, "flags", SimpleNamespace(**flags))
        status = main([str(folder / "a_module.py")])
    assert status == 2 and f"run Python without {flag}:" in capsys.readouterr().err
    assert not installed()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "usage: python -m fullshard.dropin"),
        (["--help"], 0, "Runs a Python script"),
        (["missing.py"], 2, "there is no file missing.py; to run a module pass -m missing.py"),
    ],
)
def test_wrong_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, text: str):
    """Exit status and what to do, before anything is installed."""
    assert main(arguments) == status
    printed = capsys.readouterr()
    assert text in (printed.err if status else printed.out)
    assert not installed()


def test_a_program_that_fails_fails(folder: Path):
    """With its own exit status or traceback; here a folder with a main module, on a nested drop-in."""
    program = folder / "inner" / "__main__.py"
    program.write_text("import sys\nprint(sys.path[0])")
    plain = run(folder, "inner")
    program.write_text("import sys, program\nprint(sys.path[0])\nraise SystemExit(7)")
    done = run(folder, "-m", "fullshard.dropin", "inner", PYTHONPATH=FOLDER)
    assert done.returncode == 7, done.stderr
    assert done.stdout == plain.stdout
    assert done.stderr.count("replaces torch.distributed.fsdp") == 1
