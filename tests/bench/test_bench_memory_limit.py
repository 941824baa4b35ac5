"""Peaks over bounds: what a ledger records, what is read from it, what the bound counts, and one small run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bench.memory_limit.bound import Bound, Widths
from bench.memory_limit.ledger import Block, Ledger, Span, mark, range_of, recorded
from bench.memory_limit.reading import BOUNDARY, GRADIENT, STATE, Moment, Reading, read
from small_runs import run_small

KIB = 1024


def reading(moments: list[Moment], resting: int = 0, optimizer: int = 0) -> Reading:
    return Reading(0.0, resting, {"forward": 0, "backward": 0, "optimizer": optimizer}, {}, "backward", moments)


def test_a_ledger_sees_tensors_temporaries_and_resized_storages() -> None:
    """Each with its size, and the ranges in which it was made."""
    with recorded() as ledger:
        with range_of("outer"):
            kept = torch.empty(4 * KIB, dtype=torch.uint8)
            with range_of("inner"):
                storage = torch.empty(8 * KIB, dtype=torch.uint8).untyped_storage()
            storage.resize_(0)
            mark("between")
            storage.resize_(16 * KIB)
    assert kept.numel() == 4 * KIB
    sizes = {block.nbytes: block for block in ledger.blocks}
    assert set(sizes) == {4 * KIB, 8 * KIB, 16 * KIB}
    assert sizes[8 * KIB].ranges == ("outer", "inner") and sizes[16 * KIB].ranges == ("outer",)
    moment = ledger.span("between").begin
    assert [block.nbytes for block in ledger.alive(moment)] == [4 * KIB]
    outer = ledger.span("outer")
    assert ledger.peak(outer.begin, outer.end)[1] == 20 * KIB
    assert ledger.peak(outer.begin, moment)[1] == 12 * KIB


def test_a_reading_names_what_is_alive_at_the_peak() -> None:
    """By operations of the library, else by phases, and what a thread without ranges made as that; and gives a moment
    per interval between marks."""
    spans = [
        Span("measured step", 10, 100),
        Span("forward", 10, 40),
        Span(f"{BOUNDARY}|forward|blocks.0", 15, 16),
        Span("backward", 40, 80),
        Span(f"{BOUNDARY}|backward|blocks.0", 45, 46),
        Span(f"{GRADIENT}|blocks.0|77", 60, 61),
        Span("optimizer", 80, 100),
    ]
    blocks = [
        Block(1, 1000, 0, None, ("build",), ()),
        Block(2, 30, 20, 70, ("measured step", "forward"), ("aten::mm",)),
        Block(77, 500, 50, 65, ("measured step", "backward"), ()),
        Block(4, 7, 55, 66, ("measured step", "backward"), ("fullshard::reduce_scatter (blocks.0)", "aten::empty")),
        Block(5, 3, 56, 64, (), ()),
    ]
    found = read(Ledger(blocks, spans), 1.5)
    assert found.peaks == {"forward": 1030, "backward": 1540, "optimizer": 1000} and found.resting == 1000
    assert found.peak_phase == "backward" and found.peak == 1540
    assert found.at_peak == {
        f"{STATE}|": 1000,
        "gradients, workspace|": 500,
        "activations|": 30,
        "reduce_scatter|blocks.0": 7,
        "of other threads|": 3,
    }
    assert [(m.phase, m.unit) for m in found.moments] == [
        ("forward", ""),
        ("forward", "blocks.0"),
        ("backward", ""),
        ("backward", "blocks.0"),
    ]
    assert found.moments[-1] == Moment("backward", "blocks.0", 40, {"blocks.0": 500})
    assert Reading.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_the_sum_counts_neighbors_and_dtypes() -> None:
    """fp32: 16 bytes at rest, four units of 4 bytes, and the root twice; the largest place of uneven units."""
    bound = Bound([100, 100, 100], 10, 2, Widths())
    assert (bound.resident, bound.transient) == (16 * 310 / 2, 4 * 4 * 100 + 8 * 10)
    assert bound.sum(reading([Moment("forward", "", 5, {})])) == bound.resident + bound.transient + 5
    assert Bound([100, 100, 100], 0, 2, Widths(gathered=2, gradient=2)).transient == 10 * 100
    assert Bound([10, 100, 1000], 0, 1, Widths()).transient == 4 * (2 * 1000 + 100)
    assert Bound([7], 0, 4, Widths()).transient == 8 * 7  # a single unit has no neighbors


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (Moment("forward", "blocks.0", 9, {}), 9 + 4 * (1 + 2)),
        (Moment("forward", "blocks.2", 9, {}), 9 + 4 * 4),
        (Moment("backward", "blocks.2", 9, {"blocks.2": 3}), 9 + 4 * (4 + 2) + 3),
        (Moment("backward", "blocks.1", 9, {"blocks.2": 16, "blocks.1": 5}), 9 + 4 * (2 + 1) + 5 + 4 * 4 + 4 * 4 / 8),
        (Moment("backward", "", 9, {f"blocks.{i}": 4 for i in range(3)}), 9 + 4 * 1 + 4 * 7 / 8),
    ],
)
def test_what_a_moment_needs(moment: Moment, expected: float) -> None:
    """Of units of 1, 2 and 4 parameters on 8 ranks: beside shards and optimizer state."""
    bound = Bound([1, 2, 4], 0, 8, Widths())
    assert bound.at(moment, next_unit=0) == 12 * 7 / 8 + expected


def test_the_course_is_its_highest_moment() -> None:
    """Before the first unit the first is ahead, after the last one the last; the optimizer's step counts as well."""
    bound = Bound([1, 2, 4], 0, 1, Widths())
    low = [Moment("forward", "", 0, {}), Moment("forward", "blocks.0", 0, {})]
    assert bound.course(reading(low)) == 16 * 7  # all gradients at once
    assert bound.course(reading([*low, Moment("forward", "", 1000, {})])) == 12 * 7 + 1000 + 4 * 4
    assert bound.course(reading([Moment("forward", "", 1000, {})])) == 12 * 7 + 1000 + 4 * 1
    assert bound.course(reading(low, resting=84, optimizer=84 + 28 + 6)) == 16 * 7 + 6


def test_a_run_sets_peaks_beside_the_bound(tmp_path: Path) -> None:
    """Below the course it could only be by giving up overlap; memory has its names."""
    options = "--width 256 --blocks 3 --tokens 32 --ranks 4 --what fp32 --only fullshard"
    page, stored = run_small(tmp_path, "memory_limit", options)
    (cell,) = stored["cells"]
    alive = cell["reading"]["at_peak"]
    assert cell["error"] == "" and cell["reading"]["peak_phase"] == "backward"
    assert {"all_gather|blocks.1", f"{STATE}|", "gradients, workspace|"} <= set(alive)
    assert sum(alive.values()) == cell["reading"]["peaks"]["backward"]
    assert 1.0 <= cell["peak_over_course"] <= 1.05
    assert "| 256, 4 fake, fp32 |" in page and list(tmp_path.glob("*.png"))
