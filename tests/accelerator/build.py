"""Compile the emulated accelerator, once per version of torch and Python and of its source."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).resolve().parent / "source"
NAME = "fullshard_emulated_accelerator"
# -DNDEBUG as the wheels have it: the layout of RecordFunction depends on it. -O1 compiles in half the time of -O2, and
# the kernels are torch's own.
FLAGS = ["-O1", "-DNDEBUG", "-std=c++20", "-w"]
KEPT_DAYS = 7  # builds that nothing has loaded for longer are removed


def missing() -> str | None:
    """Why the accelerator cannot be built here; None if it can."""
    with _path():
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            return "the emulated accelerator needs a C++ compiler, and there is none on the PATH"
        if shutil.which("ninja") is None:
            return "the emulated accelerator needs ninja: pip install ninja"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"the emulated accelerator needs Python's headers, which are not in {sysconfig.get_path('include')}"
    return None


def build() -> ModuleType:
    """Compile it, or take what is compiled, and load it."""
    sources = sorted(SOURCE.iterdir())
    folder = _cache() / _digest(sources)
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    with _locked(folder):
        if not done.exists():
            _compile(sources, folder)
            done.touch()
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(sources: list[Path], folder: Path) -> None:
    from torch.utils.cpp_extension import load

    # From a copy: the list of what to compile holds paths, and other checkouts of the same source share the build.
    copies = folder / "source"
    copies.mkdir(exist_ok=True)
    for source in sources:
        shutil.copy2(source, copies)
    with _path():
        load(
            NAME,
            [str(copies / source.name) for source in sources if source.suffix == ".cpp"],
            extra_cflags=FLAGS,
            extra_include_paths=[str(copies)],
            build_directory=str(folder),
            is_python_module=False,
            is_standalone=False,
        )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullshard" / "emulated_accelerator"


def _digest(sources: list[Path]) -> str:
    digest = hashlib.sha256(" ".join([torch.__version__, sysconfig.get_config_var("SOABI"), *FLAGS]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _path() -> Iterator[None]:
    """Put the programs of this environment on the PATH: ninja is one where pip has installed it."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process build it at a time, and remove old builds of other sources.

    torch has a lock of its own, a file that outlives a killed build and then blocks every later one.
    """
    with (folder / "our_lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        os.utime(folder)
        for other in folder.parent.iterdir():
            if other.is_dir() and other.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                shutil.rmtree(other, ignore_errors=True)
        yield
