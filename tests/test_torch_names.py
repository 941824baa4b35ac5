"""The private names of torch that the sources use, of which nobody promises that the next version has them."""

from __future__ import annotations

import ast
import functools
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "fullshard"


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


def test_torch_has_them() -> None:
    """This test names those that the installed torch does not have, before others fail for reasons that hide it."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for name in filter(is_private, names_in(path.read_text())):
            used[name].add(str(path.relative_to(ROOT)))
    assert len(used) > 50  # else they are not found
    assert not {name: sorted(files) for name, files in used.items() if not exists(name)}
