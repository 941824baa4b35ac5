"""The shape of the code in ``src``: short functions, names that stand for one thing, and notes that can be found.

A line that is ``[Note: X]``, after a comment or docstring mark, defines a note; any other ``[Note: X]`` cites it. Each
citation needs exactly one definition in ``src``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from source_files import PACKAGE, Source, package_sources

QUESTIONS = re.compile(r"(What|How|Where|Which|Who|When|Whether)\b")
NOUNS = re.compile(QUESTIONS.pattern + r"|(The|A|An|Its|Their|Of|As)\b")
MAX_FUNCTION_LINES = 60
MAX_METHODS = 40
# Statements of each folder and file of the package, docstrings included. Statements, because lines flatter dense code.
STATEMENTS = Path(__file__).resolve().parent / "statements.json"

# file -> why it may name CUDA. All else takes devices as torch.accelerator, or the mesh, says.
CUDA_ALLOWED = {
    "composable/fsdp_module.py": "documents what needs NCCL",
    "optim/grad_scaler.py": "the default of torch's own argument",
    "comm/pooled.py": "NCCL's symmetric memory",
    "profiling.py": "NVTX ranges",
}

# Classes of the kinds of parameters. Only the engine tells them apart; above it, ``ShardedParameter`` says what a rank
# holds of any of them. dropin answers programs that ask torch for these classes.
KINDS_OF_PARAMETERS = {
    "FlatParamHandle",
    "FlatParameter",
    "FlatShardedParameter",
    "IrregularDTensor",
    "RaggedDTensor",
    "RaggedParameter",
    "RaggedShard",
    "SliceParameter",
}
MAY_NAME_KINDS = ("engine/", "ragged/", "dropin/", "__init__.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef
NOTE = re.compile(r"\[Note: ([^\]\n]+)\]")
DEFINITION = re.compile(r"""^\s*(?:\#+\s*|[rR]?\"{3}\s*|[rR]?'{3}\s*)?\[Note:\ ([^\]\n]+)\]\s*$""", re.VERBOSE)


@dataclass(frozen=True)
class Definition:
    """A function or class with its qualified name."""

    node: Function | ast.ClassDef | ast.Module
    name: str


def definitions(node: ast.AST, prefix: str = "") -> Iterator[Definition]:
    """Every function and class below ``node``, nested ones included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            yield Definition(child, name)
            yield from definitions(child, name + ("." if isinstance(child, ast.ClassDef) else ".<locals>."))
        else:
            yield from definitions(child, prefix)


def functions(source: Source) -> Iterator[Definition]:
    return (each for each in definitions(source.tree) if isinstance(each.node, Function))


def classes(source: Source) -> Iterator[Definition]:
    return (each for each in definitions(source.tree) if isinstance(each.node, ast.ClassDef))


def check_file_name(source: Source) -> Iterator[str]:
    if Path(source.path).name in ("utils.py", "util.py", "helpers.py", "common.py", "misc.py"):
        yield f"{source.path}: name a file after the concept it holds"


def check_function_length(source: Source) -> Iterator[str]:
    for each in functions(source):
        lines = function_lines(each.node)
        if lines > MAX_FUNCTION_LINES:
            yield f"{_at(source, each)} {lines} lines, at most {MAX_FUNCTION_LINES}"


def function_lines(node: Function) -> int:
    """Lines from the end of the signature to the end; without the docstring."""
    lines = node.end_lineno - node.body[0].lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def check_methods(source: Source) -> Iterator[str]:
    for each in classes(source):
        methods = sum(isinstance(node, Function) for node in each.node.body)
        if methods > MAX_METHODS:
            yield f"{_at(source, each)} {methods} methods, at most {MAX_METHODS}"


def check_devices(source: Source) -> Iterator[str]:
    if source.path not in CUDA_ALLOWED:
        for number, line in enumerate(source.text.splitlines(), start=1):
            if "cuda" in line.lower():
                yield f"{source.path}:{number}: names CUDA; other accelerators have to work as well"


def check_docstrings(source: Source) -> Iterator[str]:
    """Docstrings that begin with a question word, and those of functions that begin with an article and no verb."""
    for each in (Definition(source.tree, "the file"), *definitions(source.tree)):
        text = ast.get_docstring(each.node) or ""
        decorators = [] if isinstance(each.node, ast.Module) else map(ast.unparse, each.node.decorator_list)
        says_what_it_does = isinstance(each.node, Function) and not any("property" in name for name in decorators)
        first = NOUNS if says_what_it_does and not each.name.endswith("__") else QUESTIONS
        if first.match(text):
            yield f"{source.path}: {each.name}: not a sentence to be read alone: {text.splitlines()[0]}"


def check_kinds_of_parameters(source: Source) -> Iterator[str]:
    """Names of kinds of parameters above the engine."""
    if not source.path.startswith(MAY_NAME_KINDS):
        for node in source.nodes:
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in KINDS_OF_PARAMETERS:
                yield f"{source.path}:{node.lineno}: names {name}; ask ShardedParameter"  # type: ignore[attr-defined]


def _at(source: Source, each: Definition) -> str:
    return f"{source.path}:{each.node.lineno}: {each.name}:"


def check_notes(sources: list[Source]) -> Iterator[str]:
    """What is wrong with the notes of all files together."""
    defined: dict[str, list[str]] = {}
    cited: list[tuple[str, str]] = []
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), start=1):
            place = f"{source.path}:{number}"
            if definition := DEFINITION.match(line):
                defined.setdefault(definition[1], []).append(place)
                continue
            cited += [(name, place) for name in NOTE.findall(line)]
            if line.count("[Note:") > len(NOTE.findall(line)):
                yield f"{place}: a note's name is broken over two lines, or not '[Note: X]'"
    for name, place in cited:
        if name not in defined:
            yield f"{place}: cites [Note: {name}], which is defined nowhere"
    for name, places in defined.items():
        if len(places) > 1:
            yield f"[Note: {name}] is defined {len(places)} times: {', '.join(places)}"


CHECKS: dict[str, Callable[[Source], Iterator[str]]] = {
    "docstrings": check_docstrings,
    "file name": check_file_name,
    "function length": check_function_length,
    "kinds of parameters": check_kinds_of_parameters,
    "devices": check_devices,
    "methods": check_methods,
}


@pytest.mark.parametrize("name", CHECKS)
def test_package_keeps_its_shape(name: str) -> None:
    """Every file of the package keeps within the budget."""
    wrong = [message for source in package_sources() for message in CHECKS[name](source)]
    assert not wrong, "\n" + "\n".join(wrong)


def count_statements(sources: list[Source]) -> dict[str, int]:
    """Statements by folder, or file, directly in the package; and of all."""
    counts: dict[str, int] = {"all": 0}
    for source in sources:
        number = sum(isinstance(node, ast.stmt) for node in source.nodes)
        part = source.path.partition("/")[0]
        counts[part] = counts.get(part, 0) + number
        counts["all"] += number
    return counts


def test_statements_do_not_grow() -> None:
    """No part of the package has more statements than are stored: a commit that raises a number argues for it.

    ``python tests/test_code_shape.py`` stores today's.
    """
    stored, counts = json.loads(STATEMENTS.read_text()), count_statements(package_sources())
    more = {part: f"{number}, stored {stored.get(part, 0)}" for part, number in counts.items()}
    assert not {part: more[part] for part, number in counts.items() if number > stored.get(part, 0)}
    sources = [Source("a/b.py", 'def f():\n    """D."""\n    if x:\n        y = 1'), Source("c.py", "z")]
    assert count_statements(sources) == {"all": 5, "a": 4, "c.py": 1}


def check_class_names(sources: list[Source]) -> Iterator[str]:
    """Classes whose names, but for a leading underscore, stand for two things."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for each in classes(source):
            places.setdefault(each.node.name.lstrip("_"), []).append(f"{source.path}:{each.node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"{len(found)} classes are called {name}: {', '.join(found)}"


@pytest.mark.parametrize("check", [check_class_names, check_notes])
def test_names_of_classes_and_notes_stand_for_one_thing(check: Callable[[list[Source]], Iterator[str]]) -> None:
    """Class names are unique in the whole package, private ones too, and every note that is cited is defined once."""
    wrong = list(check(package_sources()))
    assert not wrong, "\n" + "\n".join(wrong)


def test_classes_of_one_name_are_found() -> None:
    """Whether one of them is private, or inside of a function."""
    texts = {"a.py": "class Plan: ...", "b.py": "def f():\n    class _Plan: ...", "c.py": "class Planner: ..."}
    found = check_class_names([Source(path, text) for path, text in texts.items()])
    assert list(found) == ["2 classes are called Plan: a.py:1, b.py:2"]


@pytest.mark.parametrize("path", CUDA_ALLOWED)
def test_cuda_is_named_where_it_may_be(path: str) -> None:
    """A file that may name CUDA does; else drop it from the list."""
    assert list(check_devices(Source("a.py", (PACKAGE / path).read_text(encoding="utf-8"))))


def _many(template: str, count: int, separator: str = "\n") -> str:
    return separator.join(template.format(i) for i in range(count))


# name of the check, what it finds, bad source, good source that differs in just that
EXAMPLES = [
    (
        "function length",
        "61 lines",
        "def f():\n" + _many("    x = {}", 61),
        'def f(\n    a, b,\n):\n    """One\n\n    two.\n    """\n' + _many("    x = {}", 60),
    ),
    (
        "methods",
        "A: 41 methods",
        "class A:\n" + _many("    def f{}(self): ...", 41),
        "class A:\n" + _many("    def f{}(self): ...", 40) + "\n    x = 1",
    ),
    (
        "kinds of parameters",
        "optim/a.py:2: names FlatParameter; ask ShardedParameter",
        Source("optim/a.py", "def f(p):\n    return isinstance(p, flat.FlatParameter)"),
        Source("engine/a.py", "def f(p):\n    return isinstance(p, flat.FlatParameter)"),
    ),
    ("file name", "name a file after", Source("engine/utils.py", ""), Source("engine/unit.py", "")),
    ("devices", "a.py:2: names CUDA", 'x = y\nx.to("cuda")', "x = y\nx.to(mesh.device)"),
    ("devices", "a.py:1: names CUDA", "# as in CUDA", "# as on accelerators"),
    ("docstrings", "the file: not a sentence", '"""How it is done."""', '"""A file."""'),
    ("docstrings", "A: not a sentence", 'class A:\n    """Where it lies."""', 'class A:\n    """The place."""'),
    ("docstrings", "f: not a sentence", 'def f():\n    """The place."""', 'def f():\n    """Return it."""'),
]


@pytest.mark.parametrize(("name", "message", "bad", "good"), EXAMPLES)
def test_check_finds_what_it_looks_for(name: str, message: str, bad: str | Source, good: str | Source) -> None:
    """Each check finds one thing in a bad example, and nothing in one that is just good enough."""
    sources = [each if isinstance(each, Source) else Source("a.py", each) for each in (bad, good)]
    (found,) = CHECKS[name](sources[0])
    assert message in found
    assert not list(CHECKS[name](sources[1]))


def test_notes_are_resolved_over_files() -> None:
    """A citation needs exactly one definition, in any file."""
    first = Source("a.py", "# [Note: Alias tensors]\n# An alias is ...\n")
    for text, message in {
        "x = 1  # see [Note: Alias tensors]": "",
        "'''Text.\n\n    [Note: Other]\n    text\n'''\n# see [Note: Other].": "",
        "# see [Note: Alias]": "b.py:1: cites [Note: Alias], which is defined nowhere",
        '"""[Note: Alias tensors]': "[Note: Alias tensors] is defined 2 times: a.py:1, b.py:1",
        "# see [Note: Alias\n# tensors]": "b.py:1: a note's name is broken over two lines",
        "# see [Note:Alias tensors]": "b.py:1: a note's name is broken over two lines, or not",
    }.items():
        found = list(check_notes([first, Source("b.py", text)]))
        assert len(found) == bool(message) and message in "".join(found), text


def test_the_quick_choice_names_tests_that_exist() -> None:
    """``make test QUICK=1`` runs one test of every promise."""
    lines = (STATEMENTS.parent / "promises.txt").read_text().splitlines()
    chosen = [line.partition("[")[0].split("::") for line in lines]
    assert [name for file, name in chosen if f"def {name}(" not in (STATEMENTS.parent.parent / file).read_text()] == []


if __name__ == "__main__":
    STATEMENTS.write_text(json.dumps(count_statements(package_sources()), indent=1, sort_keys=True) + "\n")
