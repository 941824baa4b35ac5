"""The private names of torch that the sources use, of which nobody promises that the next version has them.

``torch_names.json`` has them by package of fullshard, with the versions of torch that have each.
``python tests/test_torch_names.py`` writes it, for the installed version.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from compatibility import TORCHES

ROOT = Path(__file__).resolve().parent.parent / "src" / "fullshard"
KNOWN = Path(__file__).resolve().parent / "torch_names.json"
MINOR = ".".join(torch.__version__.split(".")[:2])

Rooms = dict[str, dict[str, list[str]]]  # versions of torch by package and name


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_in(source: str) -> Iterator[str]:
    """Yield the names of torch in a source, with all that they are attributes of."""
    tree, known = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update({a.asname or "torch": a.name if a.asname else "torch" for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    known = {short: name for short, name in known.items() if name.split(".")[0] == "torch"}
    yield from known.values()
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *parts])


def exists(name: str) -> bool:
    """True if torch has it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            functools.reduce(getattr, parts[count:], found)
        except AttributeError:
            return False
        return True
    return False


def used() -> dict[str, set[str]]:
    """The private names by package; "fullshard" are those of its own modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0] if path.parent != ROOT else ROOT.name
        found[room].update(filter(is_private, names_in(path.read_text())))
    return {room: names for room, names in found.items() if names}


def write() -> None:
    """Bring the file up to date with the sources and with the installed torch."""
    known: Rooms = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    rooms: Rooms = {}
    for room, names in sorted(used().items()):
        earlier = known.get(room, {})
        rooms[room] = {
            name: sorted({*earlier.get(name, ()), MINOR} if exists(name) else {*earlier.get(name, ())} - {MINOR})
            for name in sorted(names)
        }
    entries = {
        room: ",\n".join(f"  {json.dumps(name)}: {json.dumps(versions)}" for name, versions in names.items())
        for room, names in rooms.items()
    }
    lines = ",\n".join(f" {json.dumps(room)}: {{\n{names}\n }}" for room, names in entries.items())
    KNOWN.write_text(f"{{\n{lines}\n}}\n")


def test_torch_has_them() -> None:
    """This test names those that the installed torch does not have, before others fail for reasons that hide it."""
    missing = {room: sorted(name for name in names if not exists(name)) for room, names in used().items()}
    assert not {room: names for room, names in missing.items() if names}, f"torch {torch.__version__} has not all names"


def test_they_are_known() -> None:
    """The file has the names of the sources, each with every version on which the tests run."""
    known: Rooms = json.loads(KNOWN.read_text())
    assert {room: set(names) for room, names in known.items()} == used()
    versions = [".".join(each.split(".")[:2]) for each in TORCHES]
    assert {tuple(found) for names in known.values() for found in names.values()} == {tuple(versions)}


if __name__ == "__main__":
    write()
