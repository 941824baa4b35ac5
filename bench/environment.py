"""What a result was measured on: versions, processor, commit, date. Never a host name and never a path."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DIRTY = "with changes"  # ends a commit in whose tree something had changed


@dataclass(frozen=True)
class Environment:
    """The circumstances of one run. ``device`` is the accelerator's name, or None for a CPU run."""

    torch: str
    python: str
    system: str
    cpu: str
    cores: int
    device: str | None
    commit: str
    date: str

    @property
    def name(self) -> str:
        """A file-name part that says which kind of machine this was, and not which machine."""
        return slug(self.device) if self.device else f"{slug(self.cpu)}-{self.cores}-cores"

    @property
    def machine(self) -> str:
        """The accelerator, or the processor."""
        return self.device or self.cpu


def current_environment(device: str | None = None) -> Environment:
    import torch

    return Environment(
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        device=device,
        commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def slug(text: str) -> str:
    """Lower-case letters, digits and hyphens: ``AMD EPYC (TM)`` becomes ``amd-epyc-tm``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """Short commit of this tree, marked when the measured code (``src`` or ``bench``) differs from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit} {DIRTY}" if _git("status", "--porcelain", "--", "src", "bench/*.py") else commit


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    try:
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
