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

from fullshard.comm import CollectiveTransport, GlooTransport
from fullshard.comm.group_costs import smallest_direct
from ranks import Rank

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *(ROOT / "docs").rglob("*.md"),
]


def snippets_of(page: Path) -> list[str]:
    """The Python snippets of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def how_run(page: Path) -> str:
    """Where a page's Python snippets run, by its first line: on a number of ranks, or in other tests."""
    stated = re.match(r"<!-- snippets: (.+?) -->\n", page.read_text())
    return stated[1] if stated else ""


WITH_SNIPPETS = {str(page.relative_to(ROOT)): how_run(page) for page in PAGES if snippets_of(page)}
RANKS = {name: int(how.split()[0]) for name, how in WITH_SNIPPETS.items() if re.fullmatch(r"[1-9] ranks?", how)}


class WrapModel(nn.Module):
    """The model that docs/how_to/units.md speaks of."""

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
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # a page counts graphs; other tests of this process have made some
    module = sys.modules["snippets"] = types.ModuleType("snippets")  # which fullshard.dropin finds, as a user's
    namespace: dict[str, Any] = vars(module)
    if page == "docs/how_to/units.md":
        namespace["model"] = WrapModel()
    for number, snippet in enumerate(snippets_of(ROOT / page)):
        exec(compile(snippet, f"{page} (snippet {number})", "exec"), namespace)
    if page == "docs/how_to/units.md":
        namespace["model"](torch.arange(4)).square().mean().backward()
    del sys.modules["snippets"]


def losses_of_readme(rank: Rank, sides: str) -> list[float]:
    """The losses of the README's example at a size for CPUs: as it is, or with the new or old side of the diff."""
    readme = ROOT / "README.md"
    (code,), (diff,) = snippets_of(readme), re.findall(r"```diff\n(.*?)```", readme.read_text(), re.DOTALL)
    for large, small in {'"cuda"': '"cpu"', "1024": "32", "256": "4", "=24": "=2", "range(100)": "range(3)"}.items():
        assert large in code
        code = code.replace(large, small)
    (call,) = re.findall(r"^shard\(.*$", code, re.MULTILINE)
    if sides:
        code = code.replace(call, "\n".join(line[1:] for line in diff.splitlines() if line[:1] in sides))
    losses: list[float] = []
    torch.manual_seed(rank.rank)
    exec(
        compile(code.replace("loss.backward()", "loss.backward(); losses.append(loss.item())"), "README.md", "exec"),
        {"losses": losses},
    )
    return losses


def test_readme_example_trains_as_fsdp2(ranks: Callable[..., Any]) -> None:
    """The README's example and both sides of its diff train, to the same losses."""
    ours = ranks(2, losses_of_readme, "")
    assert ours == ranks(2, losses_of_readme, " +") == ranks(2, losses_of_readme, " -")
    assert len(ours[0]) == 3 and ours[0] != ours[1]


def run_as_a_script(rank: Rank, code: str) -> None:
    """Run a program as Python does that torchrun has not started."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    exec(compile(code, "quick_start.md", "exec"), {"__name__": "__main__"})


def test_quick_start_runs_as_a_plain_script(ranks: Callable[..., Any]) -> None:
    """The program of the quick start runs in one process without torchrun if it starts no process group, as it says."""
    code = snippets_of(ROOT / "docs" / "get_started" / "quick_start.md")[0]
    start = 'if not dist.is_initialized():\n    dist.init_process_group("nccl" if cuda else "gloo")\n'
    assert start in code
    ranks(1, run_as_a_script, code.replace(start, ""), fresh=True)


@pytest.mark.parametrize("page", sorted(RANKS))
def test_snippets_run(ranks: Callable[..., Any], page: str) -> None:
    """Every Python snippet of the docs runs."""
    ranks(RANKS[page], run_snippets, page)


def test_every_page_says_how_its_snippets_are_run() -> None:
    """A page with Python snippets names its number of ranks or the test files that run them, and these exist."""
    for name, how in WITH_SNIPPETS.items():
        assert how, f"{name}: its first line should be <!-- snippets: 2 ranks -->, or name the tests that run them"
        tests = [] if name in RANKS or how.startswith("not run, ") else how.split(", ")
        for pattern in tests:
            assert list(ROOT.glob(pattern)), f"{name} says that {pattern} runs its snippets, which is not there"


def test_integration_pages_show_their_examples() -> None:
    """An example that a page of docs/integrations names is on that page, to the letter."""
    shown = set()
    for page in (ROOT / "docs" / "integrations").glob("*.md"):
        for name in set(re.findall(r"examples/(\w+\.py)", page.read_text())):
            assert (ROOT / "examples" / name).read_text() in snippets_of(page), f"{page.name} shows another {name}"
            shown.add(name)
    assert len(shown) == 10


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
    """The anchors that hosts make of a page's headings."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ .*$", prose, re.MULTILINE)}


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_stated_sizes_of_packed_parameters_are_those_of_the_transports() -> None:
    """The page that says which parameters are packed has the thresholds of the code, and what follows from them."""
    assert CollectiveTransport.direct_bytes == GlooTransport.direct_bytes, "one sentence for both"
    page = (ROOT / "docs" / "how_to" / "communication.md").read_text()
    sizes = [f"{GlooTransport.direct_bytes * ranks / 2**20:g} MiB" for ranks in (8, 64, 128, 1024)]
    assert f"at least {GlooTransport.direct_bytes:,} bytes" in page
    stated = f"smaller than {sizes[0]} on 8 ranks, {sizes[1]} on 64, {sizes[2]} on 128 and {sizes[3]} on 1,024"
    assert stated in " ".join(page.split())
    for article, model, weights in (
        ("an", "8B", (8, 8, 32, 32, 112, 112, 112)),
        ("a", "70B", (16, 16, 128, 128, 448, 448, 448)),
    ):
        cells = []
        for ranks in (2, 8, 16, 32, 64, 128, 256):
            shards = [size * 2**20 // ranks for size in weights]
            smallest = smallest_direct(shards, ranks, copied=False)
            cells.append(f"{sum(shard >= smallest for shard in shards)}")
        which = f"weights of {article} {model} block without staging copies"
        assert f"| {which} | {' | '.join(cells)} |" in page


def section(page: Path, heading: str) -> str:
    """The text of a page below the heading with this anchor, up to the next heading of its level or above."""
    lines = page.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("#") and anchor(line) == heading)
    level = len(lines[start]) - len(lines[start].lstrip("#"))
    ends = (n for n, line in enumerate(lines) if n > start and re.match(rf"#{{1,{level}}} ", line))
    return "\n".join(lines[start : next(ends, len(lines))])


def test_figures_of_the_readme_are_in_the_tables() -> None:
    """Every ratio in the README is one of the pages on performance, or of the table of seeded faults."""
    readme = section(ROOT / "README.md", "why-fullshard")
    pages = ("benchmarks.md", "gpu.md", "hosts.md")
    tables = "".join((ROOT / "docs" / "performance" / name).read_text() for name in pages)
    ratios = re.findall(r"\d\.\d\d", readme)
    assert len(ratios) > 15 and not [ratio for ratio in ratios if ratio not in tables]
    noticed, faults = re.search(r"\*\*Tests that are tested\.\*\* (\d+) of (\d+)", readme).groups()
    assert f"| all | 64 of 76 | {noticed} of {faults} |" in (ROOT / "docs" / "design" / "tests.md").read_text()
    failing = section(ROOT / "docs" / "get_started" / "migrating.md", "what-fails-in-torch-on-cpu")
    assert "Twelve" in readme and len(re.findall(r"^\| ", failing, re.MULTILINE)) == 1 + 12


def test_cited_notes_exist() -> None:
    """Every [Note: ...] that the docs mention is defined in the sources."""
    defined = set()
    for source in (ROOT / "src").rglob("*.py"):
        defined |= set(re.findall(r"^\s*(?:#\s*|\"\"\")?\[Note: ([^\]]+)\]\s*$", source.read_text(), re.MULTILINE))
    for page in (ROOT / "docs").rglob("*.md"):
        for cited in re.findall(r"\[Note: ([^\]]+)\]", page.read_text()):
            assert " ".join(cited.split()) in defined, f"{page.name} cites {cited}"


BRITISH = re.compile(
    r"(initial|synchron|quant)is(e|ed|es|ing|ation)|(summar|vector|normal|serial|optim|recogn|material|minim)is(e|ed|ing)"
    r"|orthogonalis|localised?|behaviour|neighbour|judgement|favour|colours?\b|\bcentre|artefact|cancelled",
    re.IGNORECASE,
)
AS_WRITTEN = {"docs/log.md", "CHANGELOG.md", "tests/test_docs.py"}  # a notebook, a former name, the pattern above


def test_spelling_is_american() -> None:
    """Of docs, code, tests and examples. ("modelled", as in the name of the modelled network, is not looked for.)"""
    code = (path for room in ("src", "bench", "tests", "examples") for path in (ROOT / room).rglob("*.py"))
    found = []
    for path in [*PAGES, *code]:
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text().splitlines() if name not in AS_WRITTEN else [], start=1):
            found += [f"{name}:{number}: {match[0]}" for match in BRITISH.finditer(line)]
    assert not found
