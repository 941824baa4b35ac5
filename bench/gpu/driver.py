"""Run all that a real GPU can show, each part in a process of its own under a time limit.

On a machine with little but torch: ``PYTHONPATH=src python -m bench gpu``. A rehearsal without a GPU:
``python -m bench gpu --device emulated --small --results FOLDER``.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import report
from bench.command_line import RESULTS, UsageError, option
from bench.command_line import Options as SharedOptions
from bench.environment import current_environment, slug
from bench.gpu.device import CUDA, EMULATED, name_of, nccl_version
from bench.gpu.page import PAGE, render
from bench.gpu.parts import PARTS, Settings, measured_part

LEAST = 15.0  # seconds with which a part is still begun


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All parts. The page is written in any case, beside the results if these are not the repository's."""

    device: str = option(CUDA, "A real device, or a rehearsal.", choices=(CUDA, EMULATED))
    only: tuple[str, ...] = option((), choices=tuple(part.name for part in PARTS))
    small: bool = option(False, "Tiny models and few steps.")
    minutes: float = option(9.5, "For all parts together.", least=0.1)
    commit: str | None = option(None, "Of the source, for copies without a history; else git says it.")


def run(options: Options) -> bool:
    """Run the parts one after another; a part that fails is reported, and the others go on."""
    device, small, folder = options.device, options.small, options.results
    if device == CUDA and not torch.cuda.is_available():
        print("bench gpu: no CUDA device here, nothing run (--device emulated --small rehearses it)")
        return True
    if folder == RESULTS and device != CUDA:
        raise UsageError("a rehearsal needs a folder of its own: --results")
    page = PAGE if folder == RESULTS else folder / "gpu.md"
    environment = current_environment(name_of(device))
    environment = replace(environment, commit=options.commit or environment.commit)
    end = time.monotonic() + 60 * options.minutes
    outcome: dict[str, Any] = {
        "benchmark": "gpu",
        "device": device,
        "small": small,
        "environment": environment.as_json(),
        "cuda": torch.version.cuda,
        "nccl": nccl_version() if device == CUDA else None,
        "parts": {},
    }
    for part in (part for part in PARTS if not options.only or part.name in options.only):
        # A rehearsal may share a slow machine, and compile the emulated device first.
        limit = math.inf if part is PARTS[-1] else part.seconds * (4 if small else 1)
        seconds = min(limit, end - time.monotonic())
        if seconds < LEAST:
            print(f"{part.name}: no time left")
            continue
        print(f"{part.name} (at most {seconds:.0f} s) ...")
        measured = measured_part(part, Settings(device, small, seconds))
        print(f"  {measured.get('failed', 'done')} after {measured['seconds']} s", flush=True)
        outcome["parts"][part.name] = measured
        # After every part: what is known is kept whatever becomes of the rest.
        report.write_json(folder / f"gpu_{slug(environment.device or device)}.json", outcome)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(outcome), encoding="utf-8")
    failed = [name for name, measured in outcome["parts"].items() if "failed" in measured]
    print(f"wrote {page.name}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return not failed
