"""The benchmarks are listed, explain themselves, and take the options that they should."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
from bench.__main__ import BENCHMARKS, listing, main, sentence_of
from bench.command_line import SHARED, Options, UsageError, option, parser_of, start
from bench.environment import REPOSITORY
from bench.everything import APART, STAGES


def test_every_benchmark_is_listed_with_one_sentence() -> None:
    """Also by a process of its own, which imports no torch for it."""
    for name in BENCHMARKS:
        assert sentence_of(name).endswith(".") and f"  {name} " in listing()
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "python -m bench all --write-document" in makefile
    assert {stage.benchmark for stage in STAGES} | set(APART) == set(BENCHMARKS), "a benchmark that `all` leaves out"
    words = [sys.executable, "-m", "bench"]
    environment = {**os.environ, "COLUMNS": "120"}
    answer = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == listing()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_that_are_shared_are_explained_alike(name: str) -> None:
    """Every benchmark can be told where to write; what another one has too has its help from one place."""
    module = importlib.import_module(BENCHMARKS[name])
    actions = {action.dest: action for action in parser_of(name, module.Options, sentence_of(name))._actions}
    assert {"results", "document", "write_document"} <= set(actions)
    for each in fields(module.Options):
        if each.name in SHARED:
            assert actions[each.name].help.startswith(SHARED[each.name])


@dataclass(frozen=True, kw_only=True)
class Example(Options):
    width: tuple[int, ...] = (512, 1024)
    blocks: int | None = None
    only: tuple[str, ...] = option((), choices=("fsdp2", "fullshard"))
    ratio: float = option(0.5, "A ratio.")


def started(*arguments: str) -> Example:
    found: list[Example] = []
    assert start("example", Example, found.append, "", arguments) == 0
    return found[0]


def test_values_are_those_given_and_else_the_defaults() -> None:
    """Options of several values are repeated; who takes part and where files go is no setting."""
    assert started() == Example()
    found = started("--width", "32", "--width", "64", "--blocks", "2", "--only", "fsdp2", "--ratio", "0.25")
    assert (found.width, found.blocks, found.only, found.ratio) == ((32, 64), 2, ("fsdp2",), 0.25)
    assert started("--write-document").write_document and not started("--no-write-document").write_document
    assert set(found.settings) == {"width", "blocks", "ratio"}


@pytest.mark.parametrize("arguments", ["--blocks 0", "--only fsdp3", "--ratio -1", "--rounds 2", "--wid 3"])
def test_what_cannot_be_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the usual exit status, and the contestants that there are."""
    with pytest.raises(SystemExit) as stopped:
        started(*arguments.split())
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "known are fsdp2, fullshard" in told if "fsdp3" in arguments else "error:" in told


def test_what_went_wrong_is_in_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether a benchmark says so, cannot measure what was asked for, or is not there."""

    def refuse(_: Example) -> None:
        raise UsageError("too little memory")

    assert start("example", Example, lambda _: False, "", ()) == 1
    with pytest.raises(SystemExit):
        start("example", Example, refuse, "", ())
    assert "too little memory" in capsys.readouterr().err
    assert main(["nothing"]) == 2 and "known are step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["all", "--rounds", "3"])  # which not all of them have
