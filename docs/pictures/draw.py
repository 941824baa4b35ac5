"""Draw the pictures of the documentation from the data beside them: ``python docs/pictures/draw.py [NAME ...]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.environment import current_environment

from pictures import style

# Name of the picture -> module.
PICTURES = {name: name for name in ("step", "memory", "schedule", "architecture", "meshes", "summary")}
PICTURES["bytes"] = "bytes_per_rank"


def module_of(name: str) -> Any:
    """The module that records and draws a picture."""
    return importlib.import_module(f"pictures.{PICTURES[name]}")


def stored(name: str) -> Any:
    """The data that a picture is drawn from."""
    return json.loads((style.DATA / f"{name}.json").read_text(encoding="utf-8"))


def draw(name: str, data: Any, folder: Path = style.FOLDER) -> list[Path]:
    """Write a picture in both themes."""
    paths = []
    for palette in style.PALETTES:
        style.apply(palette)
        paths.append(style.write(module_of(name).draw(data, palette), name, palette, folder))
    return paths


def record(name: str) -> None:
    """Store the data of a picture; what was trained for it says on which machine."""
    module = module_of(name)
    data = module.record()
    if module.SLOW:
        data["environment"] = current_environment().as_json()
    (style.DATA / f"{name}.json").write_text(written(data) + "\n", encoding="utf-8")


def written(value: Any, depth: int = 0) -> str:
    """JSON with a line for each entry of a list, so that a change of one is a change of one line."""
    pad, short = " " * (depth + 1), json.dumps(value)
    if len(short) < 110 or not isinstance(value, (dict, list)):
        return short
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {written(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(f"{pad}{written(item, depth + 1)}" for item in value) + "\n" + " " * depth + "]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(PICTURES)}; none: all.")
    parser.add_argument("--record", action="store_true", help="Record the data first; step and memory train for that.")
    given = parser.parse_args()
    for name in given.names or PICTURES:
        if given.record:
            record(name)
        for path in draw(name, stored(name)):
            print(f"wrote {path.name}", flush=True)


if __name__ == "__main__":
    main()
