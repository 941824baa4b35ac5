"""Roles of reStructuredText in docstrings, as links of the API reference.

Docstrings refer to names with roles, such as ``:func:`fully_shard```. The pages of the site are Markdown, which has no
roles: this extension of griffe makes links of those that name something on a page of the reference, and code of others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object

REFERENCE = Path(__file__).parent / "reference"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj|py:\w+):`(~?)([\w.]+)(?:\(\))?`")


class Roles(Extension):
    """Rewrites the docstrings of the objects that griffe has read."""

    def __init__(self) -> None:
        pages = "".join(page.read_text() for page in REFERENCE.rglob("*.md"))
        paths = re.findall(r"^::: (\S+)", pages, re.MULTILINE)
        self.paths = {path.rpartition(".")[2]: path for path in reversed(paths)} | {path: path for path in paths}

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(self._link, obj.docstring.value)

    def _link(self, role: re.Match[str]) -> str:
        short, name = role.groups()
        path = self.paths.get(name)
        shown = name.rpartition(".")[2] if short else name
        return f"[`{shown}`][{path}]" if path else f"`{shown}`"
