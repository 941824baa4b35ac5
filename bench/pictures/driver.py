"""The pictures of the documentation, in light and in dark, from data that is stored beside them."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command_line import Options as SharedOptions
from bench.command_line import option
from bench.environment import current_environment
from bench.pictures import style

# Name of the picture -> module.
PICTURES = {
    "step": "bench.pictures.step",
    "memory": "bench.pictures.memory",
    "schedule": "bench.pictures.schedule",
    "architecture": "bench.pictures.architecture",
    "meshes": "bench.pictures.meshes",
    "bytes": "bench.pictures.bytes_per_rank",
    "summary": "bench.pictures.summary",
}


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """All pictures, from stored data."""

    only: tuple[str, ...] = option((), choices=tuple(PICTURES))
    record: bool = option(False, "Record the data first; `step` and `memory` train for that.")
    results: Path = style.FOLDER


def stored(name: str) -> Any:
    """The data that a picture is drawn from."""
    return json.loads((style.DATA / f"{name}.json").read_text(encoding="utf-8"))


def draw(name: str, data: Any, folder: Path) -> list[Path]:
    """Write a picture in both themes."""
    paths = []
    for palette in style.PALETTES:
        style.apply(palette)
        figure = importlib.import_module(PICTURES[name]).draw(data, palette)
        paths.append(style.write(figure, name, palette, folder))
    return paths


def run(options: Options) -> None:
    for name in options.only or PICTURES:
        if options.record:
            module = importlib.import_module(PICTURES[name])
            data = module.record()
            if module.SLOW:
                data["environment"] = current_environment().as_json()
            style.DATA.mkdir(parents=True, exist_ok=True)
            (style.DATA / f"{name}.json").write_text(written(data), encoding="utf-8")
        for path in draw(name, stored(name), options.results):
            print(f"wrote {path.name}", flush=True)


def written(data: Any) -> str:
    """JSON with a line for each entry of a list, so that a change of one is a change of one line."""
    return _written(data, 0) + "\n"


def _written(value: Any, depth: int) -> str:
    pad = " " * (depth + 1)
    short = json.dumps(value)
    if len(short) < 110 or not isinstance(value, (dict, list)):
        return short
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {_written(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(f"{pad}{_written(item, depth + 1)}" for item in value) + "\n" + " " * depth + "]"
