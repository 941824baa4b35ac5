"""Docstrings of the public names: their examples run, and they describe every argument."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks import Rank

MODULES = (
    "fullshard",
    "fullshard.activation_checkpoint",
    "fullshard.comm",
    "fullshard.comm_hooks",
    "fullshard.dropin",
    "fullshard.optim",
    "fullshard.wrap",
)


PROPERTIES: set[Any] = set()  # their getters, which say in one sentence what they are


def public() -> dict[str, Any]:
    """The public functions, classes and methods that the package defines, by module and qualified name."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            for value in with_members(getattr(module, name)):
                if getattr(value, "__module__", "").startswith("fullshard"):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def with_members(value: Any) -> Iterator[Any]:
    """A value, and if it is a class, its public methods and properties, inherited ones too."""
    yield value
    for base in value.__mro__ if inspect.isclass(value) else ():
        for name, member in vars(base).items():
            found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(member, property):
                PROPERTIES.add(found)
            if inspect.isfunction(found) and not name.startswith("_"):
                yield found


PUBLIC = public()
ALONE = {"fullshard.planning.plan.plan"}  # without a process group


def examples_of(value: Any) -> list[str]:
    """The Python blocks of a docstring."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", inspect.getdoc(value) or "", re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def run_example(rank: Rank, name: str, code: str, folder: str) -> None:
    """Run an example in a folder that all ranks share."""
    os.chdir(folder)
    exec(compile(code, f"example of {name}", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", sorted(name for name, value in PUBLIC.items() if examples_of(value)))
def test_example_runs(ranks: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of a public docstring runs."""
    if name in ALONE:
        monkeypatch.chdir(tmp_path)
        for code in examples_of(PUBLIC[name]):
            exec(compile(code, f"example of {name}", "exec"), {"__name__": "example"})
        return
    for number, code in enumerate(examples_of(PUBLIC[name])):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks(2, run_example, name, code, str(folder))


@functools.cache
def documented(text: str) -> frozenset[str]:
    """The names that a docstring has under Args and Attributes."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return frozenset(re.findall(r"^    \**(\w+)", "".join(sections), re.MULTILINE))


@pytest.mark.parametrize("name", sorted(name for name, value in PUBLIC.items() if inspect.isfunction(value)))
def test_arguments_are_documented(name: str) -> None:
    """A function that has arguments describes all of them, and what it returns unless it is a property."""
    function = PUBLIC[name]
    text = inspect.getdoc(function) or ""
    arguments = [argument for argument in inspect.signature(function).parameters if argument not in ("self", "cls")]
    assert not set(arguments) - documented(text)
    returned = inspect.signature(function).return_annotation
    if function not in PROPERTIES and returned not in (None, "None", "NoReturn", inspect.Signature.empty):
        assert re.search(r"^(Returns|Yields):", text, re.MULTILINE), f"it returns {returned}"
    assert not re.search(r":(func|class|meth|mod|attr|data):`", text), "Markdown shows roles of reST as they are"
    assert not re.match(r"(What|Whether|See|Its?) ", text)
