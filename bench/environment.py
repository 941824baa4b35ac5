"""What a result was measured on: versions, processor, commit, date. Never a host name and never a path."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


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

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def name(self) -> str:
        """A file-name part that says which kind of machine this was, and not which machine."""
        return slug(self.device) if self.device else f"{slug(self.cpu)}-{self.cores}-cores"


def current_environment(device: str | None = None) -> Environment:
    import torch

    return Environment(
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=_usable_cores(),
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
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str:
    """Short commit of this tree, marked when the measured code (``src`` or ``bench``) differs from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = _git("status", "--porcelain", "--", "src", "bench/*.py")
    return f"{commit} with changes" if changed else commit


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
