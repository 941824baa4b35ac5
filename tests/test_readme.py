"""What the README and the docs say works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_readme_example_runs_on_one_rank(tmp_path: Path) -> None:
    """The README's example runs as a plain script."""
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    script = tmp_path / "script.py"
    script.write_text(snippet.group(1))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_links_between_documents_resolve() -> None:
    """Every relative link in the README and the docs names a file that exists."""
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_cited_notes_exist() -> None:
    """Every [Note: ...] that the docs mention is defined in the sources."""
    defined = set()
    for source in (ROOT / "src").rglob("*.py"):
        defined |= set(re.findall(r"^\s*(?:#\s*)?\[Note: ([^\]]+)\]\s*$", source.read_text(), re.MULTILINE))
    for page in (ROOT / "docs").rglob("*.md"):
        for cited in re.findall(r"\[Note: ([^\]]+)\]", page.read_text()):
            assert cited in defined, f"{page.name} cites {cited}"
