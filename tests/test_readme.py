"""What the README and the docs say works."""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import CollectiveTransport, GlooTransport, NcclTransport
from ranks import Rank

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

# The ranks that a page's Python snippets run on, one after another in one namespace.
RANKS = {
    "README.md": 4,
    "docs/accumulation.md": 4,
    "docs/checkpoints.md": 2,
    "docs/communication.md": 2,
    "docs/dropin.md": 2,
    "docs/gradient_norms.md": 2,
    "docs/low_bandwidth.md": 2,
    "docs/mechanisms.md": 2,
    "docs/memory.md": 2,
    "docs/meshes.md": 4,
    "docs/moving.md": 2,
    "docs/offload.md": 2,
    "docs/optimizers.md": 2,
    "docs/policies.md": 2,
    "docs/precision.md": 2,
    "docs/weights.md": 2,
    "docs/wrapper.md": 2,
    "docs/wrapping.md": 2,
}
ELSEWHERE = {
    "CONTRIBUTING.md": "the outline of a test",
    **{
        f"docs/clients/{page}.md": f"tests/clients/test_client_{page}*.py"
        for page in ("accelerate", "lightning", "peft", "torchao", "torchtitan", "torchtune", "transformers")
    },
    "docs/checkpoint_format.md": "tests/checkpoint/test_storage.py and test_offline.py",
    "docs/clients/pipelining.md": "tests/dropin/test_dropin_pipelining.py",
    "docs/clients/torch_checkpoint.md": "tests/dropin/test_dropin_state_dict.py",
    "docs/extensions.md": "tests/engine/test_extensions.py and test_torchao.py",
    "docs/qlora.md": "tests/clients/test_client_qlora.py",
    "docs/training.md": "needs what a run of fullshard train leaves; tests/train loads it",
}


def snippets_of(page: str) -> list[str]:
    """The Python snippets of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


class WrapModel(nn.Module):
    """The model that docs/wrapping.md speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def run_snippets(rank: Rank, page: str) -> None:
    """Run a page's snippets, and one step of a model that they did not make themselves."""
    module = sys.modules["snippets"] = types.ModuleType("snippets")  # which fullshard.dropin finds, as a user's
    namespace: dict[str, Any] = vars(module)
    if page == "docs/wrapping.md":
        namespace["model"] = WrapModel()
    for number, snippet in enumerate(snippets_of(page)):
        exec(compile(snippet, f"{page} (snippet {number})", "exec"), namespace)
    if page == "docs/wrapping.md":
        namespace["model"](torch.arange(4)).square().mean().backward()
    del sys.modules["snippets"]


def run_as_a_script(rank: Rank, code: str) -> None:
    """Run a program as Python does that torchrun has not started."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_readme_example_runs_on_one_rank(ranks: Callable[..., Any]) -> None:
    """The README's first example runs as a plain script."""
    ranks(1, run_as_a_script, snippets_of("README.md")[0], fresh=True)


@pytest.mark.parametrize("page", sorted(RANKS))
def test_snippets_run(ranks: Callable[..., Any], page: str) -> None:
    """Every Python snippet of the docs runs."""
    ranks(RANKS[page], run_snippets, page)


def test_no_page_is_forgotten() -> None:
    """Every page with Python snippets is in one of the two lists above."""
    found = {name for name in (str(page.relative_to(ROOT)) for page in PAGES) if snippets_of(name)}
    assert found == RANKS.keys() | ELSEWHERE.keys()


def test_links_between_documents_resolve() -> None:
    """Every relative link in the README and the docs names a file that exists, and a heading of it."""
    broken = []
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose):
            other = page.parent / target if target else page
            if target.startswith("http"):
                continue
            if not other.exists() or (heading and heading not in headings_of(other)):
                broken.append(f"{page.name}: {target}#{heading}")
    assert not broken


def headings_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_stated_sizes_of_packed_parameters_are_those_of_the_transports() -> None:
    """The page that says which parameters are packed has the thresholds of the code, and sizes that follow."""
    assert CollectiveTransport.direct_bytes == GlooTransport.direct_bytes, "one row for both"
    page = (ROOT / "docs" / "communication.md").read_text()
    for label, transport in (("gloo and others", GlooTransport), ("NCCL", NcclTransport)):
        mib = [transport.direct_bytes * ranks / 2**20 for ranks in (8, 64, 128, 1024)]
        sizes = " | ".join(f"{size:g} MiB" if size < 1024 else f"{size / 1024:g} GiB" for size in mib)
        assert f"| {label} (`direct_bytes` {transport.direct_bytes:,}) | {sizes} |" in page


def test_cited_notes_exist() -> None:
    """Every [Note: ...] that the docs mention is defined in the sources."""
    defined = set()
    for source in (ROOT / "src").rglob("*.py"):
        defined |= set(re.findall(r"^\s*(?:#\s*|\"\"\")?\[Note: ([^\]]+)\]\s*$", source.read_text(), re.MULTILINE))
    for page in (ROOT / "docs").rglob("*.md"):
        for cited in re.findall(r"\[Note: ([^\]]+)\]", page.read_text()):
            assert cited in defined, f"{page.name} cites {cited}"
