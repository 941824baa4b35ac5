"""The files of the package as text and syntax trees, for tests that check how the code is written."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "fullshard"
NAME = "fullshard"


@dataclass(frozen=True)
class Source:
    """One file: ``path`` relative to the package, and its text."""

    path: str
    text: str

    @property
    def name(self) -> str:
        """Its dotted name."""
        return ".".join([NAME, *self.path.removesuffix(".py").split("/")]).removesuffix(".__init__")

    @property
    def part(self) -> str:
        """First segment below the package, which decides the layer: "engine", "" for __init__."""
        first = self.path.partition("/")[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its syntax tree."""
        return list(ast.walk(self.tree))


@cache
def package_sources() -> list[Source]:
    """Every file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [Source(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")) for path in files]
