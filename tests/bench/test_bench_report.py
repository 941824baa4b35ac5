"""Statistics, turns, tables between markers, plots, and results that say nothing about whose machine it was."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from bench.command_line import RESULTS, Options, UsageError
from bench.environment import REPOSITORY, Environment, current_environment, slug
from bench.statistics import (
    Spread,
    largest_difference,
    paired_ratios,
    paired_spread,
    round_medians,
    spread,
    turn_order,
)
from bench.stored import common_source, newest, of_one_machine
from bench.turns import each_that_runs, take_turns

from bench import claims, everything, figures, redraw, report

A = "a" * 12  # a commit
PAGE = "# Page\n\n<!-- bench:a -->\nold\n<!-- /bench -->\n\nkept\n\n<!-- bench:b -->\n<!-- /bench -->\n"


# ------------------------------------------------------------------ statistics


def test_spread_interpolates_between_order_statistics() -> None:
    """Of one value it is that value, and of none there is none."""
    assert spread([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.75, 3.25)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)
    assert f"{Spread(0.654, 0.601, 0.7):.2f}" == "0.65 (0.60 to 0.70)"
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_ratios_are_paired_by_round_and_not_taken_of_medians() -> None:
    """The machine became three times slower after two rounds; in every round we took half as long."""
    peer, ours = [2.0, 2.0, 6.0, 6.0, 6.0], [1.0, 1.0, 3.0, 3.0, 3.0]
    assert paired_ratios(ours, peer) == [0.5] * 5
    assert paired_spread([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]) == Spread(2.0, 1.5, 2.5)
    assert round_medians([[1.0, 9.0, 2.0], [4.0, 6.0]]) == [2.0, 5.0]
    with pytest.raises(ValueError, match="2 and 1"):
        paired_ratios([1.0, 2.0], [1.0])


def test_the_largest_difference_does_not_hide_nan() -> None:
    """Wherever it is."""
    assert largest_difference([1.0, 2.0, 4.0], [1.5, 2.0, 2.0]) == 2.0
    for position in range(3):
        values = [1.0, 2.0, 3.0]
        values[position] = math.nan
        assert math.isnan(largest_difference(values, [1.0, 2.0, 3.0]))


def test_turns_rotate_and_change_direction() -> None:
    """Everybody is first in some round, and of two each is first as often, and follows everybody else."""
    orders = [turn_order(["a", "b", "c"], index) for index in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]]
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert [turn_order(["a", "b"], index)[0] for index in range(4)] == ["a", "b", "b", "a"]
    assert {order[order.index("a") + 1] for order in orders if order[-1] != "a"} == {"b", "c"}


def test_contestants_take_turns_in_that_order() -> None:
    """Everyone once per round; who cannot run is left out, with the reason."""
    order: list[str] = []

    def build(name: str) -> str:
        if name == "b":
            raise ValueError("not today")
        return name

    built, failures = each_that_runs(["a", "b", "c"], build)
    assert list(built) == ["a", "c"] and failures == {"b": "ValueError: not today"}
    found = take_turns({name: lambda name=name: order.append(name) or len(order) for name in built}, rounds=4)
    assert [len(each) for each in found.values()] == [4, 4]
    assert "".join(order) == "accacaac"
    assert take_turns({}, rounds=3) == {}


# ------------------------------------------------------------------ pages


def test_replacing_a_block_leaves_the_rest_alone() -> None:
    """Again by the same it stays the same; one that is missing is appended, and one that is not closed refused."""
    text = report.replace_block(PAGE, "a", "new")
    assert text == PAGE.replace("\nold\n", "\nnew\n")
    for name in ("a", "b", "missing"):
        once = report.replace_block(PAGE, name, "| 1 |\n\\1 \\g<0>\n")
        assert report.replace_block(once, name, "| 1 |\n\\1 \\g<0>\n") == once
        assert once.count(f"<!-- bench:{name} -->") == 1
    assert report.replace_block("<!-- bench:ab -->\n<!-- /bench -->\n", "a", "x").startswith(
        "<!-- bench:ab -->\n<!-- /"
    )
    with pytest.raises(ValueError, match="bench:a"):
        report.replace_block("<!-- bench:a -->\n<!-- bench:b -->\nx\n<!-- /bench -->\n", "a", "new")


def test_results_are_written_as_json_page_and_plot(tmp_path: Path) -> None:
    """A missing page is created; JSON knows no NaN; the plot is linked relative to the page."""
    options = Options(results=tmp_path / "results", document=tmp_path / "docs" / "page.md", write_document=True)
    panels = [
        report.Bars("time", {"fsdp2": Spread(1.0, 1.0, 1.0), "fullshard": Spread(0.6, 0.5, 0.7)}),
        report.Bars("memory", {"fsdp2": 1.0, "fullshard": 0.7}, None),
        report.Curves("time by ranks", {"fullshard": {8: 1.0, 64: 2.0}}, "ranks", logarithmic=True),
    ]
    figures = {"losses": [1.0, math.nan], "pair": (math.inf, 2)}
    report.publish(options, "x", figures, ["| figures |"], title="A plot", panels=panels)
    (path,) = options.results.glob("*.json")
    stored = json.loads(path.read_text())
    assert (stored["losses"], stored["pair"]) == ([1.0, None], [None, 2])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    text = options.document.read_text()
    assert "<!-- bench:x -->\n| figures |" in text and f"![A plot](../results/{path.stem}.png)" in text
    assert report.plot(tmp_path / "none.png", "", [report.Bars("empty", {})]) is None


def test_tables_have_what_stands_in_the_entries() -> None:
    """Numbers, spreads, dashes for what is missing, and who could not run."""
    entries = {"a": {"x": {"y": 0.002}, "ratio": Spread(0.5, 0.4, 0.6).as_json()}, "b": {"x": None}}
    columns = [report.column("ms", "x", "y", spec=".0f", scale=1e3), report.column("/ b", "ratio")]
    lines = report.table("who", entries, columns, ["c"]).splitlines()
    assert lines == [
        "| who | ms | / b |",
        "| --- | ---: | ---: |",
        "| a | 2 | 0.50 (0.40 to 0.60) |",
        "| b | - | - |",
        "| c | cannot run | - |",
    ]
    (panel,) = report.bars(entries, {"ratio": ("ratio",)})
    assert panel.values == {"a": Spread(0.5, 0.4, 0.6)}
    assert report.verdict("step", 0.9, 0.8) == "step 0.90 of at most 0.80 (missed)"


def test_names_say_whose_allocator_is_left_alone() -> None:
    """What is fullshard-malloc on the command line has glibc's malloc as it comes; a peer with +our-malloc has ours."""
    assert report.label_of("bf16, fullshard-malloc") == "bf16, fullshard, glibc's default malloc"
    assert report.label_in_plot("fsdp2+our-malloc") == "FSDP2, fullshard's malloc setting"
    assert report.label_in_plot("ddp") == "DDP" and report.label_of("fullshard") == "fullshard"
    lines = report.table("who", {"fullshard-malloc": {}}, [], ["fsdp2+our-malloc"]).splitlines()
    assert lines[2:] == ["| fullshard, glibc's default malloc |", "| fsdp2, fullshard's malloc setting | cannot run |"]


# ------------------------------------------------------------------ stored results


def a_result(
    folder: Path, name: str, benchmark: str, *, commit: str = "a" * 12, cpu: str = "C", **stored: object
) -> None:
    """Store one, of this commit and processor."""
    made = Environment("2.13", "3.11", "Linux", cpu, 2, None, commit, f"2026-11-{10 + len(list(folder.iterdir()))}")
    whole = {"benchmark": benchmark, "environment": made.as_json(), **stored}
    report.write_json(folder / f"{name}_{made.name}.json", whole)


def test_pages_are_those_of_the_stored_results() -> None:
    """Every table, figure and claim; else run ``python -m bench redraw --write-document``."""
    found = list(redraw.blocks(newest(RESULTS)))
    assert {marker for _, marker, _ in found} >= {"claims", "figures", "shortfalls", "sources", "step:512"}
    for page, marker, block in found:
        text = page.read_text()
        assert f"<!-- bench:{marker} -->" in text, f"{page.name} has no place for {marker}"
        assert report.replace_block(text, marker, block) == text, f"{marker} in {page.name} is not that of the results"


def test_figures_are_of_one_machine_and_losses_stand_like_wins(tmp_path: Path) -> None:
    """Of two machines that of most results, else the newer one; what nobody measured says so, as does an odd source."""
    step = {"settings": {"width": 512}, "losses_that_disagree": {}}
    for cpu, ratio in (("old", 0.5), ("new", 1.25)):
        entry = {"time_ratio_to_fsdp2": Spread(ratio, ratio, ratio).as_json()}
        a_result(tmp_path, "step_512", "step", cpu=cpu, contestants={"fullshard": entry}, **step)
    a_result(tmp_path, "modes_bf16_512", "modes", cpu="new", commit="b" * 12, contestants={}, **step)
    a_result(tmp_path, "muon", "muon", cpu="new", commit="b" * 12 + " with changes", contestants={})
    a_result(tmp_path, "wrap_time", "wrap_time", cpu="new", contestants={})
    a_result(tmp_path, "scaling", "scaling", cpu="new", withdrawn="it was wrong")
    a_result(tmp_path, "wrap_time", "wrap_time", cpu="latest", contestants={})
    a_result(tmp_path, "step_1024", "step", cpu="latest", contestants={}, **step)
    results = newest(tmp_path)
    assert common_source(results) == (A, "new") and "scaling" not in results
    assert results["wrap_time"].source.machine == "new" and results["step_1024"].source.machine == "latest"
    assert "step_1024" not in of_one_machine(results), "no sentence has figures of two machines"
    assert figures.FIGURES[2].text(results) == "1.25 (1.25 to 1.25)"
    assert "- step, width 512, 2 CPU ranks: 1.25 (1.25 to 1.25) of FSDP2" in figures.shortfalls(results)
    assert "| FSDP2 | 1.25 (1.25 to 1.25) |  |" in figures.table(results)
    assert f"| FSDP2 | {figures.UNMEASURED} | at most 0.80 |" in figures.table(results)
    sources = figures.sources(results)
    assert "`aaaaaaaaaaaa` |  |" in sources and "`bbbbbbbbbbbb` | of another commit than most tables |" in sources
    assert "with uncommitted changes; of another commit than most tables" in sources
    said = claims.claims(results)
    assert "1.25" not in said and "**Step on CPU ranks.** Not measured yet." in said, "without its fair counterparts"
    assert "Several GPUs have not been measured." in said


def test_a_claim_loses_the_clause_that_lacks_a_value(tmp_path: Path) -> None:
    """Of two widths the one that is measured is said, with the faster peer's name; a spread is written if asked for."""
    ratios = {
        "time_ratio_to_fsdp2": 0.4,
        "time_ratio_to_better_peer_with_our_malloc": 0.61,
        "time_ratio_to_two_kept": 0.62,
    }
    entry = {
        key: Spread(value, 0.0, 1.0).as_json() | {"reference": "fsdp1+our-malloc"} for key, value in ratios.items()
    }
    without = {"time_ratio_to_better_peer": Spread(0.63, 0.0, 1.0).as_json()}
    for width, ours in ((512, entry), (1024, {**entry, "time_ratio_to_two_kept": None})):
        found = {"fullshard": ours, "fullshard-malloc": without}
        a_result(tmp_path, f"step_{width}", "step", settings={"width": width}, contestants=found)
    said = claims.claims(newest(tmp_path))
    assert "at width 512 0.61 of the time of FSDP1, the faster of FSDP1 and FSDP2, 0.62 of FSDP2's with" in said
    assert "and 0.40 of FSDP2's as it comes; without the setting, 0.63" in said and "1024" not in said
    assert f"{claims.Value(entry['time_ratio_to_fsdp2']):spread}" == "0.40 (0.00 to 1.00)"


def test_no_figure_flatters_alone() -> None:
    """Every clause with a flattering figure has its fair counterparts; all values of sentences are known, and used."""
    sentences = [sentence for paragraph in claims.CLAIMS.values() for sentence in paragraph]
    used = set()
    for text in (text for each in sentences for text in (each.begin, *each.clauses)):
        named = claims.names(text)
        used |= named
        assert all(others <= named for name, others in claims.COUNTERPARTS.items() if name in named), text
    assert used == set(claims.VALUES) and set(claims.COUNTERPARTS) <= used


def test_targets_of_steps_are_about_peers_with_our_malloc() -> None:
    """Those on CPU ranks, whoever the peer is; the picture has both of each pair."""
    steps = [each for each in figures.FIGURES if ", step, " in each.what or each.what.startswith("step, width")]
    judged = [each for each in steps if each.limit is not None and "counted" not in each.what]
    assert len(judged) == 2 * (2 + 4 + 2) and all(each.peer.endswith(figures.OUR_MALLOC) for each in judged)
    shown = {each.what for each in figures.FIGURES if each.headline}
    for one, other in (("fp32", "bf16"), ("on 100 modules", "on 100 modules and the first step")):
        assert sum(what.endswith(one) for what in shown) == sum(what.endswith(other) for what in shown) == 1


def test_everything_of_a_commit_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dirty tree is refused; what this commit has measured on this machine is left out; rounds follow the minutes."""
    clean = Environment("2.13", "3.11", "Linux", "C", 2, None, A, "2026-11-25")
    monkeypatch.setattr(everything, "current_environment", lambda: replace(clean, commit=A + " with changes"))
    with pytest.raises(UsageError, match="commit first"):
        everything.run(everything.Options(results=tmp_path))
    monkeypatch.setattr(everything, "STAGES", everything.STAGES[:2])
    monkeypatch.setattr(everything, "current_environment", lambda: clean)
    monkeypatch.setattr(everything.redraw, "run", lambda options: None)
    a_result(tmp_path, "step_512", "step", commit="c" * 12)
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(everything.subprocess, "run", run)
    assert everything.run(everything.Options(results=tmp_path, minutes=everything.FULL_MINUTES / 100))
    assert [command[:5] for command in ran] == [
        ["step", "--width", width, "--rounds", str(everything.LEAST_ROUNDS)] for width in ("512", "1024")
    ]
    a_result(tmp_path, "step_512", "step")
    ran.clear()
    assert everything.run(everything.Options(results=tmp_path)) and [command[2] for command in ran] == ["1024"]
    assert everything.FULL_MINUTES <= 64


def test_stored_results_are_drawn_again(tmp_path: Path) -> None:
    """Each with its figures, also of several measurements; those of other versions have none."""
    found = newest(RESULTS)
    for name in ("modes_bf16_512", "modes_hsdp_512", "muon"):
        shutil.copy(found[name].path, tmp_path)
    assert {path.name.partition("_5")[0] for path in redraw.draw(newest(tmp_path), tmp_path)} >= {"modes"}


def test_the_environment_names_neither_host_nor_path() -> None:
    """It says what kind of machine it was, and not which."""
    environment = current_environment()
    text = json.dumps(environment.as_json()) + environment.name
    assert socket.gethostname() not in text and str(REPOSITORY) not in text and str(Path.home()) not in text
    assert environment.cores >= 1 and environment.torch and environment.date.count("-") == 2
    assert slug("AMD EPYC (TM) 9B14") == "amd-epyc-tm-9b14" and slug("") == "unknown"
