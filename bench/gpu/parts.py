"""The parts of ``python -m bench gpu``: each runs in a process of its own, a worker of which this is the module."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.contestants import Contestant
from bench.teams import Launch, ask_alone


@dataclass(frozen=True)
class Settings:
    """What all parts are told: type of accelerator, whether this is a rehearsal, and their time limit."""

    device: str
    small: bool
    seconds: float


@dataclass(frozen=True)
class Part:
    """One part: a module of this package whose ``measure(settings, **options)`` returns what goes into the JSON."""

    name: str
    module: str
    seconds: float  # its time limit
    options: Mapping[str, Any] = field(default_factory=dict)


# What is worth most comes first.
PARTS = (
    Part("step, one rank, fp32", "step", 40, {"ranks": 1, "dtype": "fp32", "size": "small"}),
    Part("step, 1 of 8, fp32", "step", 60, {"ranks": 8, "dtype": "fp32", "size": "medium"}),
    Part("step, 1 of 8, bf16", "step", 50, {"ranks": 8, "dtype": "bf16", "size": "medium"}),
    Part("host", "host", 45),
    Part("overlap", "overlap", 40),
)


def measured_part(part: Part, settings: Settings) -> dict[str, Any]:
    """What the part measured, or ``{"failed": why}``; in both cases with its ``seconds``."""
    begun = time.monotonic()
    contestant = Contestant(part.name, part.module)
    launch = Launch.alone(contestant, __name__, module=part.module, settings=asdict(settings))
    outcome = ask_alone(launch, settings.seconds, "measure", **part.options)
    result = {"failed": outcome["failure"]} if "failure" in outcome else outcome["answers"][0]
    return {**result, "seconds": round(time.monotonic() - begun, 1)}


class Worker:
    def __init__(self, module: str, settings: Settings) -> None:
        self._module, self._settings = importlib.import_module(f"bench.gpu.{module}"), settings

    def measure(self, **options: Any) -> Any:
        return self._module.measure(self._settings, **options)


def build(module: str, settings: dict[str, Any]) -> Worker:
    return Worker(module, Settings(**settings))
