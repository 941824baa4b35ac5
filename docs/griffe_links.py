"""Links between names in the API reference.

Docstrings name other parts of the package as code, ``fullshard.fully_shard`` or ``CheckpointError``, or with a role of
reStructuredText, which Markdown does not have. This extension of griffe makes links of those that have a place on a
page of the reference, and plain code of other roles.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object

REFERENCE = Path(__file__).parent / "reference"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`~?([\w.]+)(?:\(\))?`")
CODE = re.compile(r"(?<![\[`])``([\w.]+)(\(\))?``(?![\]`])")


class Links(Extension):
    """Rewrites the docstrings of the objects that griffe has read."""

    def __init__(self) -> None:
        pages = "".join(page.read_text() for page in REFERENCE.rglob("*.md"))
        paths = re.findall(r"^::: (\S+)", pages, re.MULTILINE)
        self.paths = {path: path for path in paths}
        classes = {path.rpartition(".")[2]: path for path in reversed(paths)}
        self.paths |= {name: path for name, path in classes.items() if name[0].isupper()}  # others are common words

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(r"``\1``", obj.docstring.value)
            obj.docstring.value = CODE.sub(lambda code: self._link(code, obj.name), text)

    def _link(self, code: re.Match[str], own: str) -> str:
        name, call = code[1], code[2] or ""
        path = self.paths.get(name)
        return code[0] if path is None or path.endswith(f".{own}") else f"[`{name}{call}`][{path}]"
