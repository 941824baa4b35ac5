"""The pages of docs/reference, and of errors, name what the code has: nothing less, and nothing that is gone."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import fullshard
import fullshard.dropin.errors
import fullshard.errors

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
SOURCES = sorted((ROOT / "src" / "fullshard").rglob("*.py"))
PARTS = "optim", "wrap", "checkpoint", "comm", "dropin", "errors", "policy", "activation_checkpoint", "comm_hooks"
PUBLIC = ["fullshard", *(f"fullshard.{part}" for part in (*PARTS, "ragged"))]

DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
ROW = re.compile(r"^\| \[`(\w+)`\]\[(\S+?)\] \|", re.MULTILINE)


def named(path: str) -> object:
    """The object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_names(module: ModuleType) -> list[str]:
    """Those of a module that are not torch's, which it exports too."""
    names = (name for name in module.__all__ if not name.startswith("_"))
    return [name for name in names if not getattr(getattr(module, name), "__module__", "").startswith("torch.")]


def test_each_public_name_is_on_one_page_of_the_reference() -> None:
    """Once: under the name of the package if it has it, otherwise under that of the part."""
    directives = [path for page in REFERENCE.rglob("*.md") for path in DIRECTIVE.findall(page.read_text())]
    expected: dict[str, object] = {}
    for module in map(importlib.import_module, PUBLIC):
        for name in public_names(module):
            value = getattr(module, name)
            if name not in fullshard.__all__ or getattr(fullshard, name) is not value:
                expected[f"{module.__name__}.{name}"] = value
            else:
                expected[f"fullshard.{name}"] = value
    missing = sorted(expected.keys() - set(directives))
    assert not missing, f"no page of docs/reference has: {missing}"
    twice = sorted(path for path in directives if directives.count(path) > 1)
    assert not twice, f"docs/reference has more than once: {twice}"
    for path in directives:
        assert path in expected or path.rpartition(".")[2] in importlib.import_module(path.rpartition(".")[0]).__all__


@pytest.mark.parametrize("page", sorted((REFERENCE / "api").glob("*.md")), ids=lambda page: page.stem)
def test_table_of_a_page_lists_what_is_on_it(page: Path) -> None:
    """In the same order, by the name that a program imports."""
    text = page.read_text()
    rows = ROW.findall(text)
    assert [path for _, path in rows] == DIRECTIVE.findall(text)
    assert all(path.rpartition(".")[2] == name for name, path in rows)


def test_each_exception_of_the_package_is_on_the_page_of_exceptions() -> None:
    """With a row in the table of classes, or in the text for those of the commands."""
    page = (REFERENCE / "exceptions.md").read_text()
    found = {
        node.name
        for source in SOURCES
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and re.search(r"(Error|Warning)$", node.name) and node.name[0] != "_"
    }
    assert {*fullshard.errors.__all__, *fullshard.dropin.errors.__all__} <= found
    missing = sorted(name for name in found if f"`{name}`" not in page)
    assert not missing, f"docs/reference/exceptions.md lacks {missing}"


def test_tree_of_exceptions_is_that_of_the_classes() -> None:
    """Base classes are as the page draws them."""
    (tree,) = re.findall(r"```text\n(RuntimeError\n.*?)```", (REFERENCE / "exceptions.md").read_text(), re.DOTALL)
    path: list[str] = []
    for line in tree.splitlines():
        depth, name = len(re.match(r"[ │├└─]*", line)[0]) // 4, re.search(r"\w+", line)[0]  # type: ignore[index]
        path = [*path[:depth], name]
        if depth:
            part = fullshard.dropin if "fullshard.dropin" in line else fullshard
            bases = [base.__name__ for base in getattr(part, name).__bases__]
            assert bases[0] == path[-2]
            assert len(bases) == 1 or f"also an {bases[1]}" in line


def test_environment_variables_are_those_that_the_code_reads() -> None:
    """Each FULLSHARD_ variable of the sources has a row, and no row is of one that is gone."""
    page = (REFERENCE / "environment_variables.md").read_text()
    ours = page.partition("## fullshard\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(FULLSHARD_\w+)` \|", ours, re.MULTILINE)
    read = {name for source in SOURCES for name in re.findall(r"\"(FULLSHARD_\w+)\"", source.read_text())}
    assert rows == sorted(read)


def strings_of(source: Path) -> list[str]:
    """The strings in a file, those in f-strings by their fixed parts."""
    constants = (node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_quoted_errors_of_troubleshooting_are_those_of_the_code() -> None:
    """The messages in the first columns: their fixed parts are strings of the sources. ``torch:`` marks torch's."""
    page = (ROOT / "docs" / "how_to" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*?\n\n", page + "\n\n", re.DOTALL | re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()[2:] if row]
    quotes = [quote for cell in cells if "torch: " not in cell for quote in re.findall(r"`([^`]{12,})`", cell)]
    assert len(quotes) > 40
    have = "\n".join(text for source in SOURCES for text in strings_of(source))
    stale = [quote for quote in quotes if not all(part.strip() in have for part in quote.split("..."))]
    assert not stale, "troubleshooting.md quotes what no error says any more:\n  " + "\n  ".join(stale)


def test_stated_figures_are_those_of_the_code() -> None:
    """Limits and defaults that pages of the reference state are constants of the sources."""
    from fullshard.checkpoint.format import index, reader, region_table
    from fullshard.checkpoint.safetensors import files
    from fullshard.engine.prefetch import MAX_TINY_UNITS_TOGETHER
    from fullshard.ranks import barrier, watchdog

    stated = {
        "limits.md": (
            f"at most {MAX_TINY_UNITS_TOGETHER} together",
            f"unpacked | {region_table._LARGEST >> 30} GiB |",
            f"elements of a shard | 2^{index._LARGEST.bit_length() - 1} |",
            f"on import | {files.MAX_INDEX_BYTES >> 20} MiB |",
            f"safetensors file | {files.MAX_HEADER_BYTES:,} bytes",
            f"from a URL | {reader._KEPT >> 30} GiB",
        ),
        "environment_variables.md": (
            f"| `FULLSHARD_STEP_TIMEOUT_S` | {barrier._STEP_TIMEOUT_S:g} |",
            f"| `FULLSHARD_WATCHDOG_S` | {watchdog._STUCK_S:g} |",
            f"| `FULLSHARD_WATCHDOG_LOST_S` | {watchdog._LOST_S:g} |",
        ),
    }
    for page, texts in stated.items():
        text = (REFERENCE / page).read_text()
        assert not [each for each in texts if each not in text]


def test_stated_costs_are_those_that_were_measured() -> None:
    """The host times of docs/reference/limits.md are in the table of docs/performance/benchmarks.md."""
    table = (REFERENCE.parent / "performance" / "benchmarks.md").read_text()
    page = (REFERENCE / "limits.md").read_text()

    def ms(system: str, part: str) -> tuple[str, str]:
        row = re.search(rf"^\| {system}, {part} \| (\d+) \|.*?\| (\d+) \| -?\d\.\d\d \|", table, re.MULTILINE)
        return row[1], row[2]

    few, many = ms("fullshard", "initialization")
    assert f"{few} ms with 8 ranks, {many} ms with 16,384" in page
    for label, system in (("`fully_shard`", "fullshard"), ("wrapper", "fullshard-wrapper")):
        few, many = ms(system, "steady step")
        assert f"| host time of a step, {label} | in proportion | slowly: {few} and {many} ms |" in page


def test_glossary_is_in_alphabetical_order() -> None:
    """A reader finds a term by its first letter."""
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (REFERENCE / "glossary.md").read_text(), re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) > 40
