"""Measure what one real GPU can show, each part in a process of its own under a time limit.

On a machine with little but torch: ``PYTHONPATH=src python -m bench gpu``. A rehearsal without a GPU:
``python -m bench gpu --device emulated --small --results FOLDER``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bench import report
from bench.command_line import RESULTS, UsageError, option
from bench.command_line import Options as SharedOptions
from bench.environment import REPOSITORY, Environment, current_environment
from bench.gpu.device import CUDA, EMULATED, name_of, nccl_version
from bench.gpu.parts import PARTS, Settings, measured_part
from bench.results import write_json

PAGE = REPOSITORY / "docs" / "performance" / "gpu.md"


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All parts. The page is written in any case, beside the results if these are not the repository's."""

    device: str = option(CUDA, "A real device, or a rehearsal.", choices=(CUDA, EMULATED))
    only: tuple[str, ...] = option((), choices=tuple(part.name for part in PARTS))
    small: bool = option(False, "Tiny models and few steps.")
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
    parts: dict[str, Any] = {}
    outcome = {
        "benchmark": "gpu",
        "device": device,
        "small": small,
        "environment": asdict(environment),
        "cuda": torch.version.cuda,
        "nccl": nccl_version() if device == CUDA else None,
        "parts": parts,
    }
    for part in (part for part in PARTS if not options.only or part.name in options.only):
        seconds = part.seconds * (4 if small else 1)  # a rehearsal may share a slow machine
        print(f"{part.name} (at most {seconds:.0f} s) ...")
        parts[part.name] = measured = measured_part(part, Settings(device, small, seconds))
        print(f"  {measured.get('failed', 'done')} after {measured['seconds']} s", flush=True)
        # After every part: what is known is kept whatever becomes of the rest.
        write_json(folder / f"gpu_{environment.name}.json", outcome)
        for marker, text in blocks(outcome):
            report.put(page, marker, text)
    failed = [name for name, measured in parts.items() if "failed" in measured]
    print(f"failed: {', '.join(failed)}" if failed else "all ran")
    return not failed


def blocks(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    lines = [report.provenance(Environment(**result["environment"]))]
    lines.append(f"CUDA {result['cuda']}, NCCL {result['nccl']}.")
    rehearsal = result["device"] != CUDA or result["small"]
    yield "gpu", "\n".join([*lines, *["", "**A rehearsal: nothing here is a measurement.**"] * rehearsal])
    for part in PARTS:
        measured = result["parts"].get(part.name)
        if measured is None:
            text = "Not run."
        elif "failed" in measured:
            text = f"Failed after {measured['seconds']:.0f} s: {measured['failed']}"
        else:
            text = importlib.import_module(f"bench.gpu.{part.module}").table(measured)
        yield f"gpu:{part.name}", text
