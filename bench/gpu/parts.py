"""The parts of ``python -m bench.gpu``, and how one is run: in a process of its own, under a time limit.

python -m bench.gpu.parts NAME SETTINGS ANSWER      # what that process does; both files are JSON
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.environment import REPOSITORY

_INTERRUPTED = 10.0  # seconds that an interrupted part has, to say what it knows


@dataclass(frozen=True)
class Settings:
    """What all parts are told.

    Attributes:
        device: Type of accelerator.
        small: Whether this is a rehearsal: tiny models, few steps.
        results: Folder for files beside the JSON.
        seconds: Time limit of this part.
    """

    device: str
    small: bool
    results: str
    seconds: float


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: Key in the JSON.
        module: Of this package; its ``measure(settings, **options)`` returns what goes into the JSON.
        seconds: Its time limit.
        options: For ``measure``.
        environment: Variables of its process.
    """

    name: str
    module: str
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


# What is worth most comes first. Together less than ten minutes; the last one also gets what the others leave.
PARTS = (
    Part("races", "races", 45, environment={"FULLSHARD_POISON": "1"}),
    Part("graphs", "graphs", 30),
    Part("step, one rank, fp32", "step", 40, {"ranks": 1, "dtype": "fp32", "size": "small"}),
    Part("step, 1 of 8, fp32", "step", 60, {"ranks": 8, "dtype": "fp32", "size": "medium"}),
    Part("step, 1 of 8, bf16", "step", 50, {"ranks": 8, "dtype": "bf16", "size": "medium"}),
    Part("host", "host", 45),
    Part("overlap", "overlap", 40),
    Part("tests", "suite", 275),
)


def part_named(name: str) -> Part:
    """One of PARTS."""
    return next(part for part in PARTS if part.name == name)


def measured_part(part: Part, settings: Settings) -> dict[str, Any]:
    """What the part measured, or ``{"failed": why}``; in both cases with its ``seconds``."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told, answer, log = (Path(folder) / name for name in ("settings.json", "answer.json", "log"))
        told.write_text(json.dumps(asdict(settings)))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.parts", part.name, str(told), str(answer)],
                cwd=REPOSITORY,
                env=_environment(part),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it ends with all that it has started
            )
            late = _wait(process, settings.seconds)
        result: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        if late:
            result["failed"] = f"not done after {settings.seconds:.0f} s"
        elif process.returncode:
            lines = log.read_text(errors="replace").strip().splitlines()
            result["failed"] = lines[-1] if lines else f"exit status {process.returncode}"
            result["log"] = lines[-60:]
    result["seconds"] = round(time.monotonic() - begun, 1)
    return result


def _environment(part: Part) -> dict[str, str]:
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **part.environment}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process had to be ended, which ends all that it started."""
    late = False
    for signal_number, limit in ((signal.SIGINT, seconds), (signal.SIGKILL, _INTERRUPTED)):
        try:
            process.wait(limit)
            break
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal_number)
    process.wait()
    return late


def main(name: str, told: str, answer: str) -> None:
    """Measure one part in this process."""
    part, settings = part_named(name), Settings(**json.loads(Path(told).read_text()))
    measured = importlib.import_module(f"bench.gpu.{part.module}").measure(settings, **part.options)
    Path(answer).write_text(json.dumps(measured))
    sys.stdout.flush()
    os._exit(0)  # an orderly exit ends badly if one of autograd's threads is still letting go of Python objects


if __name__ == "__main__":
    main(*sys.argv[1:])
