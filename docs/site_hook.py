"""What the site needs beyond Markdown: pages from outside of ``docs/``, links that leave it, and dark pictures.

Links between pages are relative paths, so that they work in a clone, on the host of the repository and on the site. On
the site, this hook of MkDocs turns those that leave ``docs/`` into links to the repository, at the tag of the release.
A picture ``x.svg`` beside which there is an ``x.dark.svg`` is shown in the one that fits the reader's colors.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")

# Pages of the site that are kept in the root of the repository, where hosts and package indexes look for them.
ROOT_PAGES = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
}
NOT_SEARCHED = ("log.md", "project/changelog.md")  # they have every word, and would hide the page that explains it
RESULTS = "bench/results"  # plots, which the site has under the same path


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the root of the repository, and the plots of the benchmarks."""
    for uri, path in ROOT_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for plot in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"{RESULTS}/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page that leave ``docs/``, outside of code."""
    uri = page.file.src_uri
    if uri in NOT_SEARCHED:
        page.meta["search"] = {"exclude": True}
    markdown = re.sub(r"\A<!-- snippets: .*? -->\n+", "", markdown)  # the page's title is a heading in its first line
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for number in range(0, len(blocks), 2):
        blocks[number] = re.sub(
            r"(!?\[[^\]]*\])\(([^)\s]+)\)", lambda found: link(found[1], found[2], uri, config), blocks[number]
        )
    return "".join(blocks)


def link(text: str, target: str, uri: str, config: Any) -> str:
    """One Markdown link of the page at ``uri``, as it has to be on the site."""
    path, _, heading = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return f"{text}({target})"
    source = ROOT_PAGES.get(uri, f"docs/{uri}")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / found).exists():
        LOG.warning("%s links to %s, which is not there", source, target)
    on_site = {path: name for name, path in ROOT_PAGES.items()}.get(found)
    if found.startswith(RESULTS) and found.endswith(".png"):
        on_site = found
    elif found.startswith("docs/") and (ROOT / found).is_file() and not found.endswith(".py"):
        on_site = found.removeprefix("docs/")
    if on_site is None:
        kind = "tree" if (ROOT / found).is_dir() else "blob"
        version = config["extra"]["release"]
        return f"{text}({config['repo_url']}/{kind}/{version}/{found}{'#' + heading if heading else ''})"
    relative = posixpath.relpath(on_site, posixpath.dirname(uri) or ".")
    dark = re.sub(r"\.svg$", ".dark.svg", relative)
    if text.startswith("!") and dark != relative and (ROOT / re.sub(r"\.svg$", ".dark.svg", found)).exists():
        # A link to the picture, so that it can be opened in its own size on a narrow screen.
        return "".join(
            f"[{text}({path}#only-{theme})]({path})" for path, theme in ((relative, "light"), (dark, "dark"))
        )
    return f"{text}({relative}{'#' + heading if heading else ''})"
