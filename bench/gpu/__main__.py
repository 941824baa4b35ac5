"""Run all that a real GPU can show, each part in a process of its own under a time limit.

make gpu
python -m bench.gpu --only races --only graphs
python -m bench.gpu --device emulated --small --results /tmp/x      # a rehearsal without a GPU
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import report
from bench.environment import current_environment, slug
from bench.gpu.device import CUDA, EMULATED, name_of, nccl_version
from bench.gpu.page import PAGE, render
from bench.gpu.parts import PARTS, Settings, part_named, run

LEAST = 15.0  # seconds with which a part is still begun

console = Console(highlight=False)


def main(
    device: Annotated[str, typer.Option(help=f"{CUDA}, or {EMULATED} for a rehearsal.")] = CUDA,
    only: Annotated[list[str] | None, typer.Option(help="Run only this part; repeat.")] = None,
    small: Annotated[bool, typer.Option(help="Tiny models and few steps.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="For all parts together.")] = 9.5,
    commit: Annotated[str | None, typer.Option(help="Of the source [git says]; for copies without a history.")] = None,
    results: Annotated[Path | None, typer.Option(help="Folder of the JSON and the traces [bench/results].")] = None,
    document: Annotated[Path | None, typer.Option(help="The page [docs/gpu.md, with the default results].")] = None,
) -> None:
    """Run the parts one after another; a part that fails is reported, and the others go on."""
    for name in only or ():
        if name not in {part.name for part in PARTS}:
            raise typer.BadParameter(f"unknown {name!r}; known are {', '.join(part.name for part in PARTS)}")
    if device not in (CUDA, EMULATED):
        raise typer.BadParameter(f"unknown device {device!r}; known are {CUDA}, {EMULATED}", param_hint="--device")
    if device == CUDA and not torch.cuda.is_available():
        console.print("bench.gpu: no CUDA device here, nothing run (--device emulated --small rehearses it)")
        return
    if results is None and device != CUDA:
        raise typer.BadParameter("a rehearsal needs a folder of its own", param_hint="--results")
    page = document if document is not None else PAGE if results is None else results / "gpu.md"
    folder = results or report.RESULTS
    environment = current_environment(name_of(device))
    environment = replace(environment, commit=commit or environment.commit)
    end = time.monotonic() + 60 * minutes
    outcome: dict[str, Any] = {
        "benchmark": "gpu",
        "device": device,
        "small": small,
        "environment": environment.as_json(),
        "cuda": torch.version.cuda,
        "nccl": nccl_version() if device == CUDA else None,
        "parts": {},
    }
    for part in (part_named(name) for name in only) if only else PARTS:
        # A rehearsal may share a slow machine, and compile the emulated device first.
        limit = math.inf if part is PARTS[-1] else part.seconds * (4 if small else 1)
        seconds = min(limit, end - time.monotonic())
        if seconds < LEAST:
            console.print(f"{part.name}: no time left")
            continue
        console.print(f"{part.name} (at most {seconds:.0f} s) ...")
        measured = run(part, Settings(device, small, str(folder), seconds))
        console.print(f"  {measured.get('failed', 'done')} after {measured['seconds']} s", markup=False)
        outcome["parts"][part.name] = measured
        # After every part: what is known is kept whatever becomes of the rest.
        report.write_json(folder / f"gpu_{slug(environment.device or device)}.json", outcome)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(outcome), encoding="utf-8")
    failed = [name for name, measured in outcome["parts"].items() if "failed" in measured]
    console.print(f"wrote {page.name}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
