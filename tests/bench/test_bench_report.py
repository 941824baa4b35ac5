"""Tables between markers, plots, and results that say nothing about whose machine it was."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from bench.environment import REPOSITORY, current_environment, slug
from bench.statistics import Spread

from bench import report

PAGE = "# Page\n\n<!-- bench:a -->\nold\n<!-- /bench -->\n\nkept\n\n<!-- bench:b -->\n<!-- /bench -->\n"


def test_replacing_a_block_leaves_the_rest_alone() -> None:
    text = report.replace_block(PAGE, "a", "new")
    assert text == PAGE.replace("\nold\n", "\nnew\n")
    assert report.replace_block(text, "b", "x") == text.replace("<!-- bench:b -->\n", "<!-- bench:b -->\nx\n")


def test_replacing_a_block_twice_changes_nothing_more() -> None:
    for name in ("a", "b", "missing"):
        once = report.replace_block(PAGE, name, "| 1 |\n\\1 \\g<0>\n")
        assert report.replace_block(once, name, "| 1 |\n\\1 \\g<0>\n") == once
        assert once.count(f"<!-- bench:{name} -->") == 1


def test_one_name_is_not_taken_for_a_longer_one() -> None:
    page = "<!-- bench:step:1024 -->\nlong\n<!-- /bench -->\n"
    text = report.replace_block(page, "step:10", "short")
    assert text.startswith(page)
    assert "<!-- bench:step:10 -->\nshort\n<!-- /bench -->" in text


def test_an_unclosed_marker_is_refused_and_swallows_no_other_block() -> None:
    with pytest.raises(ValueError, match="bench:a"):
        report.replace_block("<!-- bench:a -->\n<!-- bench:b -->\nx\n<!-- /bench -->\n", "a", "new")


def test_a_missing_page_is_created(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "performance.md"
    report.update_document(page, "host_cost", "| figures |")
    text = page.read_text()
    assert "<!-- bench:host_cost -->\n| figures |\n<!-- /bench -->" in text
    report.update_document(page, "host_cost", "| figures |")
    assert page.read_text() == text


def test_markdown_table() -> None:
    expected = "| a | b |\n| --- | ---: |\n| x | 1 |"
    assert report.markdown_table(["a", "b"], [["x", "1"]]) == expected
    assert report.markdown_table(["a", "b", "c"], [], ["y"]).endswith("| y | cannot run | - |")


def test_json_knows_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    report.write_json(path, {"losses": [1.0, float("nan")], "pair": (float("inf"), 2), "none": None})
    assert json.loads(path.read_text()) == {"losses": [1.0, None], "pair": [None, 2], "none": None}


def test_an_image_is_linked_relative_to_its_page(tmp_path: Path) -> None:
    link = report.image_link(tmp_path / "results" / "a.png", tmp_path / "docs" / "page.md", "A plot")
    assert link == "![A plot](../results/a.png)"


def test_a_plot_is_written(tmp_path: Path) -> None:
    panels = [
        report.Panel("time", {"fsdp2": Spread(1.0, 1.0, 1.0), "fullshard": Spread(0.6, 0.5, 0.7)}, 1.0),
        report.Panel("memory", {"fsdp2": 1.0, "fullshard": 0.7}),
    ]
    path = tmp_path / "plots" / "a.png"
    assert report.plot_bars(path, "title", panels)
    assert not report.plot_bars(tmp_path / "b.png", "title", [report.Panel("empty", {})])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_environment_names_neither_host_nor_path() -> None:
    environment = current_environment()
    text = json.dumps(environment.as_json()) + environment.name
    assert socket.gethostname() not in text
    assert str(REPOSITORY) not in text
    assert str(Path.home()) not in text.replace("//", "")
    assert environment.cores >= 1 and environment.torch and environment.date.count("-") == 2


def test_slug() -> None:
    assert slug("AMD EPYC (TM) 9B14") == "amd-epyc-tm-9b14"
    assert slug("") == "unknown"
