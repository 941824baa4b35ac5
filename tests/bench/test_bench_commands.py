"""The benchmarks are listed, explain themselves, and do a tiny piece of their work. No test looks at a time."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from bench.__main__ import APART, BENCHMARKS, listing, main, sentence_of
from bench.command_line import SHARED, Options, UsageError, option, parser_of, start
from bench.environment import REPOSITORY
from bench_command import run_bench, run_small

TRAINING = "--width 32 --blocks 1 --tokens 16 --rounds 1 --steps-per-round 1 --warmup-steps 1"
FLAT = "fullshard-wrapper-flat"


def test_every_benchmark_is_listed_with_one_sentence() -> None:
    for name in BENCHMARKS:
        assert sentence_of(name).endswith(".") and f"  {name} " in listing()
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "python -m bench all --write-document" in makefile and set(APART) < set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_that_are_shared_are_named_and_explained_alike(name: str) -> None:
    """Every benchmark can be told where to write; what another one has too has its help from one place."""
    module = importlib.import_module(BENCHMARKS[name])
    parser = parser_of(name, module.Options, sentence_of(name))
    actions = {action.dest: action for action in parser._actions}
    assert {"results", "document", "write_document"} <= set(actions)
    for each in fields(module.Options):
        assert (each.name in SHARED) is (each.metadata.get("help") is None), each.name
        if each.name in SHARED:
            assert actions[each.name].help.startswith(SHARED[each.name])


def test_an_option_explained_twice_or_not_at_all_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Options):
        rounds: int = option(3, "Something else.")

    @dataclass(frozen=True, kw_only=True)
    class Never(Options):
        turns: int = 3

    for options in (Twice, Never):
        with pytest.raises(TypeError, match="stated once"):
            parser_of("x", options, "")


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
    assert started() == Example()
    found = started("--width", "32", "--width", "64", "--blocks", "2", "--only", "fsdp2", "--ratio", "0.25")
    assert (found.width, found.blocks, found.only, found.ratio) == ((32, 64), 2, ("fsdp2",), 0.25)
    assert started("--write-document").write_document and not started("--no-write-document").write_document
    assert set(found.settings) == {"width", "blocks", "ratio"}


@pytest.mark.parametrize("arguments", ["--blocks 0", "--only fsdp3", "--ratio -1", "--rounds 2", "--wid 3"])
def test_what_cannot_be_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        started(*arguments.split())
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "known are fsdp2, fullshard" in told if "fsdp3" in arguments else "error:" in told


def test_what_went_wrong_is_in_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: Example) -> None:
        raise UsageError("too little memory")

    assert start("example", Example, lambda _: False, "", ()) == 1
    with pytest.raises(SystemExit):
        start("example", Example, refuse, "", ())
    assert "too little memory" in capsys.readouterr().err
    assert main(["nothing"]) == 2 and "known are step" in capsys.readouterr().err


def test_the_command_lists_and_explains() -> None:
    answer = run_bench()
    assert answer.returncode == 0 and answer.stdout.strip() == listing()
    answer = run_bench("step", "--help")
    assert answer.returncode == 0 and "--rounds" in answer.stdout and "--only" in answer.stdout


def test_all_accepts_only_what_all_understand() -> None:
    with pytest.raises(SystemExit):
        main(["all", "--rounds", "3"])
    assert isinstance(parser_of("all", Options, ""), argparse.ArgumentParser)


# ------------------------------------------------------------------ tiny runs


def test_step(tmp_path: Path) -> None:
    """A run of one contestant writes figures, plot and page."""
    page, (path,) = run_small(tmp_path, "step", f"{TRAINING} --only fsdp2")
    result = json.loads(path.read_text())
    assert list(result["contestants"]) == ["fsdp2"]
    entry = result["contestants"]["fsdp2"]
    assert len(entry["losses"]) == 2 and len(entry["seconds"]) == 1
    assert entry["time_ratio_to_fsdp2"]["reference"] == "fsdp2"
    assert entry["time_ratio_to_fsdp2"]["median"] == 1.0
    assert result["not_run"] == {} and result["losses_that_disagree"] == {}
    assert result["environment"]["torch"] == torch.__version__
    if sys.platform == "linux":
        assert 0 < entry["peak_over_baseline_bytes"] < entry["peak_bytes"]
    assert path.name.startswith("step_32_") and len(list(tmp_path.glob("step_32_*.png"))) == 1
    assert "<!-- bench:step:32 -->\nGPT of width 32" in page and "| fsdp2 |" in page


def test_modes(tmp_path: Path) -> None:
    """A mode of bytes, in microbatches."""
    page, (path,) = run_small(tmp_path, "modes", f"{TRAINING} --microbatches 2 --what bf16 --only fsdp2")
    stored = json.loads(path.read_text())
    assert stored["not_run"] == {} and stored["losses_that_disagree"] == {}
    entry = stored["contestants"]["fsdp2"]
    assert len(entry["memory_by_rank"]) == 2
    assert sys.platform != "linux" or entry["sent_bytes_per_step"] > 0
    assert "| bf16, fsdp2 |" in page and "<!-- bench:modes:32 -->\nGPT of width 32" in page


def test_wrapper(tmp_path: Path) -> None:
    """Summons of two contestants, which take turns."""
    options = f"{TRAINING} --microbatches 2 --what summon_writeback --only fsdp1-flat --only {FLAT}"
    page, (path,) = run_small(tmp_path, "wrapper", options)
    assert len(list(tmp_path.glob("wrapper_32_*.png"))) == 1
    stored = json.loads(path.read_text())
    entry = stored["contestants"][FLAT]
    assert list(stored["contestants"]) == ["fsdp1-flat", FLAT]
    assert stored["not_run"] == {} and stored["losses_that_disagree"] == {}
    assert entry["time_ratio"]["reference"] == "fsdp1-flat" and entry["time_ratio"]["median"] > 0
    assert f"| summon_writeback, {FLAT} |" in page
    if sys.platform == "linux":
        assert 0 < entry["peak_over_baseline_bytes"] < entry["peak_bytes"]
        assert entry["sent_bytes_per_step"] is None


def test_accelerate_step(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    page, (path,) = run_small(tmp_path, "accelerate_step", f"{TRAINING} --only fsdp2 --only fullshard")
    stored = json.loads(path.read_text())
    assert list(stored["contestants"]) == ["fsdp2", "fullshard"] and not stored["not_run"]
    assert stored["contestants"]["fullshard"]["time_ratio_to_fsdp2"]["median"] > 0
    assert "<!-- bench:accelerate_step:32 -->\nGPT of width 32" in page and "accelerate " in page


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("host_cost", "--units 2 --rounds 2 --steps-per-round 1 --only fsdp2", "2 units"),
        ("wrap_time", "--units 3 --rounds 2 --warmup-units 1", "3 units"),
        ("optimizer_cost", "--units 2 --rounds 2 --steps-per-round 1 --only fsdp2 --only flat", "16 parameters"),
        ("muon", "--width 32 --blocks 1 --rounds 1 --ranks 1", "4 matrices"),
    ],
)
def test_others(tmp_path: Path, name: str, options: str, said: str) -> None:
    """Files and the block of the page are written, and nobody fails."""
    page, (path,) = run_small(tmp_path, name, options)
    assert path.name.startswith(f"{name}_") and f"<!-- bench:{name} -->\n{said}" in page
    stored = json.loads(path.read_text())
    assert stored["benchmark"] == name and not stored.get("not_run") and not stored.get("failures")
    assert stored["environment"]["torch"] == torch.__version__
