"""The long description of the package: README.md with absolute links, as a package index has no files beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/fullshard/fullshard"
FILES = "https://raw.githubusercontent.com/fullshard/fullshard"  # pictures: what the address itself returns
PICTURES = (".svg", ".png", ".gif", ".jpg")
LINK = re.compile(
    r"""(?P<before>\]\(\s*<?                       # [text](target), ![text](target)
          | ^\[[^\]\n]+\]:\s+                       # [name]: target
          | \b(?:href|src|srcset)\s*=\s*["'])       # HTML
        (?P<target>[^\s)>"']+)""",
    re.VERBOSE | re.MULTILINE,
)
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


class LongDescription(MetadataHookInterface):
    """Sets ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the long description, whose links lead to the tag of the version."""
        root = Path(self.root)
        text = with_absolute_links((root / "README.md").read_text(encoding="utf-8"), root, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, root: Path, tag: str) -> str:
    """Make relative links of a page in ``root`` links to the repository at ``tag``, outside of blocks of code."""
    blocks = CODE.split(text)
    for number in range(0, len(blocks), 2):
        blocks[number] = LINK.sub(lambda found: found["before"] + absolute(found["target"], root, tag), blocks[number])
    return "".join(blocks)


def absolute(target: str, root: Path, tag: str) -> str:
    """Return where a link leads outside of a clone: the repository, or for pictures the file itself."""
    if re.match(r"[a-z]+:|#|//", target):
        return target
    path = target.partition("#")[0].removeprefix("./")
    if path.endswith(PICTURES):
        return f"{FILES}/{tag}/{path}"
    kind = "tree" if (root / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/{tag}/{target.removeprefix('./')}"
