"""What all benchmarks share: statistics, turns, the command line, stored results, pages, figures and claims."""

from __future__ import annotations

import importlib
import json
import math
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest import mock

import pytest
from bench.__main__ import BENCHMARKS, listing, main, sentence_of
from bench.command_line import RESULTS, SHARED, Options, UsageError, option, parser_of, start
from bench.environment import REPOSITORY, Environment
from bench.everything import APART, STAGES
from bench.results import common_source, newest, of_one_machine, write_json
from bench.statistics import Spread, largest_difference, paired_ratios, paired_spread, round_medians, spread
from bench.turns import each_that_runs, take_turns, turn_order

from bench import claims, everything, figures, redraw, report

A = "a" * 12  # a commit
PAGE = "# Page\n\n<!-- bench:a -->\nold\n<!-- /bench -->\n\nkept\n\n<!-- bench:b -->\n<!-- /bench -->\n"


def test_ratios_are_paired_by_round_and_not_taken_of_medians() -> None:
    """A machine that became three times slower after two rounds changes no ratio; a loss that is NaN disagrees."""
    peer, ours = [2.0, 2.0, 6.0, 6.0, 6.0], [1.0, 1.0, 3.0, 3.0, 3.0]
    assert paired_ratios(ours, peer) == [0.5] * 5
    assert paired_spread([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]) == Spread(2.0, 1.5, 2.5)
    assert round_medians([[1.0, 9.0, 2.0], [4.0, 6.0]]) == [2.0, 5.0]
    assert spread([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.75, 3.25) and spread([7.0]) == Spread(7.0, 7.0, 7.0)
    for call in (lambda: paired_ratios([1.0, 2.0], [1.0]), lambda: spread([])):
        with pytest.raises(ValueError, match=r"2 and 1|at least one"):
            call()
    assert largest_difference([1.0, 2.0, 4.0], [1.5, 2.0, 2.0]) == 2.0
    assert math.isnan(largest_difference([1.0, math.nan, 3.0], [1.0, 2.0, 3.0]))


def test_contestants_take_turns_in_an_order_that_changes() -> None:
    """Everybody is first in some round, and of two each is first as often; who cannot run is left out, with why."""
    orders = [turn_order(["a", "b", "c"], index) for index in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]]
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert [turn_order(["a", "b"], index)[0] for index in range(4)] == ["a", "b", "b", "a"]
    order: list[str] = []

    def build(name: str) -> str:
        if name == "b":
            raise ValueError("not today")
        return name

    built, failures = each_that_runs(["a", "b", "c"], build)
    assert list(built) == ["a", "c"] and failures == {"b": "ValueError: not today"}
    found = take_turns({name: lambda name=name: order.append(name) or len(order) for name in built}, rounds=4)
    assert [len(each) for each in found.values()] == [4, 4] and "".join(order) == "accacaac"


def test_every_benchmark_is_listed_with_one_sentence() -> None:
    """Without an import of torch; an option that several have is explained alike; `make bench` leaves none out."""
    for name in BENCHMARKS:
        assert sentence_of(name).endswith(".") and f"  {name} " in listing()
        module = importlib.import_module(BENCHMARKS[name])
        actions = {action.dest: action for action in parser_of(name, module.Options, sentence_of(name))._actions}
        assert {"results", "document", "write_document"} <= set(actions)
        for each in fields(module.Options):
            assert each.name not in SHARED or actions[each.name].help.startswith(SHARED[each.name])
    assert "python -m bench all --write-document" in (REPOSITORY / "Makefile").read_text()
    assert {stage.split()[0] for stage in STAGES} | set(APART) == set(BENCHMARKS)
    code = "import sys; sys.argv = ['bench']; import bench.__main__ as b; b.main([]); assert 'torch' not in sys.modules"
    told = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == listing()


@dataclass(frozen=True, kw_only=True)
class Example(Options):
    width: tuple[int, ...] = (512, 1024)
    blocks: int | None = None
    only: tuple[str, ...] = option((), choices=("fsdp2", "fullshard"))
    ratio: float = option(0.5, "A ratio.")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of several values are repeated; who takes part is no setting; what went wrong is in the exit status."""
    found: list[Example] = []

    def run(arguments: str) -> int:
        return start("example", Example, found.append, "", arguments.split())

    assert run("") == run("--width 32 --width 64 --blocks 2 --only fsdp2 --ratio 0.25 --write-document") == 0
    assert found[0] == Example() and set(found[0].settings) == {"width", "blocks", "ratio"}
    assert found[1] == Example(width=(32, 64), blocks=2, only=("fsdp2",), ratio=0.25, write_document=True)
    for arguments in ("--blocks 0", "--only fsdp3", "--ratio -1", "--ratio nan", "--rounds 2", "--wid 3"):
        with pytest.raises(SystemExit) as stopped:
            run(arguments)
        told = capsys.readouterr().err
        assert stopped.value.code == 2
        assert ("known are fsdp2, fullshard" if "fsdp3" in arguments else "error:") in told
    assert start("example", Example, lambda _: False, "", ()) == 1
    with pytest.raises(SystemExit):
        start("example", Example, mock.Mock(side_effect=UsageError("too little memory")), "", ())
    assert "too little memory" in capsys.readouterr().err
    assert main(["nothing"]) == 2 and "known are step" in capsys.readouterr().err


def test_everything_of_a_commit_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with changes is refused; what this commit has measured on this machine is left out."""
    clean = Environment("2.13", "3.11", "Linux", "C", 2, None, A, "2026-11-25")
    monkeypatch.setattr(everything, "current_environment", lambda: replace(clean, commit=A + " with changes"))
    with pytest.raises(UsageError, match="commit first"):
        everything.run(everything.Options(results=tmp_path))
    monkeypatch.setattr(everything, "current_environment", lambda: clean)
    run = mock.Mock(side_effect=lambda command, **_: subprocess.CompletedProcess(command, int("modes" in command)))
    monkeypatch.setattr(everything.subprocess, "run", run)
    write_json(tmp_path / f"step_512_{clean.name}.json", {"environment": asdict(clean)})
    assert not everything.run(everything.Options(results=tmp_path)), "modes failed"
    ran = [" ".join(call.args[0][3:-2]) for call in run.call_args_list]
    assert ran == [each for each in STAGES if "step --width 512" not in each]


def test_replacing_a_block_leaves_the_rest_alone() -> None:
    """Again by the same it stays the same; one that is missing is appended, and one that is not closed refused."""
    assert report.replace_block(PAGE, "a", "new") == PAGE.replace("\nold\n", "\nnew\n")
    for name in ("a", "b", "missing"):
        once = report.replace_block(PAGE, name, "| 1 |\n\\1 \\g<0>\n")
        assert report.replace_block(once, name, "| 1 |\n\\1 \\g<0>\n") == once
        assert once.count(f"<!-- bench:{name} -->") == 1
    with pytest.raises(ValueError, match="bench:a"):
        report.replace_block("<!-- bench:a -->\n<!-- bench:b -->\nx\n<!-- /bench -->\n", "a", "new")


def test_results_are_written_as_json_page_and_plot(tmp_path: Path) -> None:
    """A missing page is created, and the plot linked; JSON knows no NaN; nobody's machine is named."""
    options = Options(results=tmp_path / "results", document=tmp_path / "docs" / "page.md", write_document=True)
    found = {"losses": [1.0, math.nan], "pair": (math.inf, 2)}
    report.publish(options, "x", found, ["| figures |"], title="A plot", plot=lambda path: path.write_bytes(b"PNG"))
    (path,) = options.results.glob("*.json")
    stored, text = json.loads(path.read_text()), options.document.read_text()
    assert (stored["losses"], stored["pair"]) == ([1.0, None], [None, 2])
    assert "<!-- bench:x -->\n| figures |" in text and f"![A plot](../results/{path.stem}.png)" in text
    private = (socket.gethostname(), str(REPOSITORY), str(tmp_path))
    assert not any(each in path.read_text() + text + path.name for each in private)


def test_tables_have_what_stands_in_the_entries() -> None:
    """Numbers, spreads, dashes for what is missing, who could not run, and whose allocator is as it comes."""
    entries = {"fullshard-malloc": {"x": {"y": 0.002}, "ratio": Spread(0.5, 0.4, 0.6).as_json()}, "b": {"x": None}}
    columns = [report.column("ms", "x", "y", spec=".0f", scale=1e3), report.column("/ b", "ratio")]
    assert report.table("who", entries, columns, ["fsdp2+our-malloc"]).splitlines() == [
        "| who | ms | / b |",
        "| --- | ---: | ---: |",
        "| fullshard, glibc's default malloc | 2 | 0.50 (0.40 to 0.60) |",
        "| b | - | - |",
        "| fsdp2, fullshard's malloc setting | cannot run | - |",
    ]


def a_result(folder: Path, name: str, benchmark: str, *, commit: str = A, cpu: str = "C", **stored: object) -> None:
    """Store one, of this commit and processor."""
    made = Environment("2.13", "3.11", "Linux", cpu, 2, None, commit, f"2026-11-{10 + len(list(folder.iterdir()))}")
    write_json(folder / f"{name}_{made.name}.json", {"benchmark": benchmark, "environment": asdict(made), **stored})


def test_pages_are_those_of_the_stored_results() -> None:
    """Every table, figure and claim; else run ``python -m bench redraw --write-document``."""
    found = list(redraw.blocks(newest(RESULTS)))
    assert {marker for _, marker, _ in found} >= {"claims", "figures", "shortfalls", "sources", "step:512", "gpu:host"}
    for page, marker, block in found:
        text = page.read_text()
        assert f"<!-- bench:{marker} -->" in text, f"{page.name} has no place for {marker}"
        assert report.replace_block(text, marker, block) == text, f"{marker} in {page.name} is not that of the results"
    written = [page for page in (REPOSITORY / "docs").rglob("*.md") if "<!-- bench:" in page.read_text()]
    markers = sum(page.read_text().count("<!-- bench:") for page in [*written, REPOSITORY / "README.md"])
    assert markers == len(found), "a block that nothing writes"


def test_figures_are_of_one_machine_and_losses_stand_like_wins(tmp_path: Path) -> None:
    """Of two machines that of most results, else the newer one; what nobody measured says so, as does an odd source."""
    step = {"settings": {"width": 512}, "losses_that_disagree": {}}
    for cpu, ratio in (("old", 0.5), ("new", 1.25)):
        entry = {"time_ratio_to_fsdp2": Spread(ratio, ratio, ratio).as_json()}
        a_result(tmp_path, "step_512", "step", cpu=cpu, contestants={"fullshard": entry}, **step)
    for name, cpu, commit in (
        ("modes_bf16_512", "new", "b" * 12),
        ("checkpoint_1024", "new", "b" * 12 + " with changes"),
        ("wrap_time", "new", A),
        ("wrap_time", "latest", A),
        ("step_1024", "latest", A),
    ):
        a_result(tmp_path, name, name.partition("_")[0], cpu=cpu, commit=commit, contestants={}, **step)
    a_result(tmp_path, "host_cost", "host_cost", cpu="new", withdrawn="it was wrong")
    results = newest(tmp_path)
    assert common_source(results) == (A, "new") and "host_cost" not in results
    assert results["wrap_time"].source.machine == "new" and results["step_1024"].source.machine == "latest"
    assert "step_1024" not in of_one_machine(results), "no sentence has figures of two machines"
    assert "- step, width 512, 2 CPU ranks: 1.25 (1.25 to 1.25) of FSDP2" in figures.shortfalls(results)
    for row in ("| FSDP2 | 1.25 (1.25 to 1.25) |  |", f"| FSDP2 | {figures.UNMEASURED} | at most 0.80 |"):
        assert row in figures.table(results)
    odd = "of another commit than most tables"
    for row in ("`aaaaaaaaaaaa` |  |", f"`bbbbbbbbbbbb` | {odd} |", f"with uncommitted changes; {odd}"):
        assert row in figures.sources(results)
    assert f"and 1.25 of FSDP2's as it comes; without the setting, {figures.UNMEASURED}" in claims.claims(results)


def test_no_figure_flatters_alone() -> None:
    """A claim that has a step's gain has it beside fair peers; targets of steps are about peers with our malloc."""
    (paragraph,) = (each for each in claims.TEXT.splitlines() if "{step_512}" in each)
    names = [f"{{{name}_{width}}}" for name in ("fair", "kept", "default", "faster") for width in (512, 1024)]
    assert all(name in paragraph for name in names)
    steps = [each for each in figures.FIGURES if ", step, " in each.what or each.what.startswith("step, width")]
    judged = [each for each in steps if each.limit is not None and "counted" not in each.what]
    assert len(judged) == 2 * (2 + 4 + 2) and all(each.peer.endswith(figures.OUR_MALLOC) for each in judged)
