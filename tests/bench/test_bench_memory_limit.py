"""Peaks over bounds: what a ledger records, what is read from it, what the bound counts, and one small run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer
from bench.comparison import Record
from bench.memory_limit_bound import Bound, Widths
from bench.memory_limit_labels import BOUNDARY
from bench.memory_limit_ledger import Block, Ledger, Span, mark, range_of, recorded
from bench.memory_limit_reading import ACTIVATIONS, STATE, Moment, Reading, read
from bench.memory_limit_worker import Assignment

from bench import memory_limit, memory_limit_faults

KIB = 1024


def reading(moments: list[Moment], resting: int = 0, optimizer: int = 0) -> Reading:
    return Reading(0.0, resting, {"forward": 0, "backward": 0, "optimizer": optimizer}, {}, "backward", moments)


# ---------------------------------------------------------------- the ledger


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


def test_a_peak_counts_what_was_there_before() -> None:
    """Blocks from before the interval are live at its beginning; freed ones are not."""
    ledger = Ledger([Block(1, 100, 0, None, (), ()), Block(2, 50, 1, 5, (), ()), Block(3, 20, 6, 9, (), ())])
    assert ledger.peak(2, 4) == (2, 150)
    assert ledger.peak(5, 8) == (6, 120)
    assert ledger.block_at(2, 4) is ledger.blocks[1] and ledger.block_at(2, 5) is None


def test_a_reading_names_what_is_alive_at_the_peak() -> None:
    """By labels, else by phases; and gives a moment per interval between marks."""
    spans = [
        Span("measured step", 10, 100),
        Span("forward", 10, 40),
        Span(f"{BOUNDARY}|forward|blocks.0", 15, 16),
        Span("backward", 40, 80),
        Span(f"{BOUNDARY}|backward|blocks.0", 45, 46),
        Span("full gradients|blocks.0|77", 60, 61),
        Span("optimizer", 80, 100),
    ]
    blocks = [
        Block(1, 1000, 0, None, ("build",), ()),
        Block(2, 30, 20, 70, ("measured step", "forward"), ()),
        Block(77, 500, 50, 65, ("measured step", "backward"), ()),
        Block(4, 7, 55, 66, ("measured step", "backward", "reduce message|blocks.0"), ()),
    ]
    found = read(Ledger(blocks, spans), 1.5)
    assert found.peaks == {"forward": 1030, "backward": 1537, "optimizer": 1000} and found.resting == 1000
    assert found.peak_phase == "backward" and found.peak == 1537
    expected = {f"{STATE}|": 1000, "full gradients|blocks.0": 500, f"{ACTIVATIONS}|": 30, "reduce message|blocks.0": 7}
    assert found.at_peak == expected
    assert [(m.phase, m.unit) for m in found.moments] == [
        ("forward", ""),
        ("forward", "blocks.0"),
        ("backward", ""),
        ("backward", "blocks.0"),
    ]
    assert found.moments[-1] == Moment("backward", "blocks.0", 37, {"blocks.0": 500})
    assert Reading.from_json(json.loads(json.dumps(asdict(found)))) == found


# ---------------------------------------------------------------- the bound


def test_the_sum_of_equal_units() -> None:
    """fp32: 16 bytes at rest, four units of 4 bytes, and the root twice."""
    bound = Bound([100, 100, 100], 10, 2, Widths())
    assert bound.resident == 16 * 310 / 2
    assert bound.transient == 4 * 4 * 100 + 8 * 10
    assert bound.sum(reading([Moment("forward", "", 5, {})])) == bound.resident + bound.transient + 5


def test_units_in_bf16_take_ten_bytes() -> None:
    """Two gathered, gradients in bf16, those in flight in fp32."""
    assert Bound([100, 100, 100], 0, 2, Widths(gathered=2, gradient=2)).transient == 10 * 100


def test_uneven_units_count_their_neighbours() -> None:
    """Backward of the middle: itself twice, the one before gathered, the one after in flight."""
    assert Bound([10, 100, 1000], 0, 1, Widths()).transient == 4 * (2 * 1000 + 100)
    assert Bound([1000, 100, 10], 0, 1, Widths()).transient == 4 * (2 * 1000 + 100)


def test_a_single_unit_has_no_neighbours() -> None:
    """Forward takes its parameters, backward its gradients too."""
    assert Bound([7], 0, 4, Widths()).transient == 8 * 7


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


# ---------------------------------------------------------------- the runs


def test_assignments_survive_the_command_line() -> None:
    given = Assignment(("fullshard",), ("fp32", "bf16"), 32, 2, 16, 8)
    assert Assignment.from_argument(given.as_argument()) == given


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="fsdp3"):
        memory_limit.main(only=["fsdp3"])


def test_a_run_sets_peaks_beside_the_bound(tmp_path: Path) -> None:
    """Below the course it could only be by giving up overlap. The page is written too."""
    page = tmp_path / "memory.md"
    page.write_text("<!-- bench:memory_limit -->\n<!-- /bench -->\n")
    memory_limit.main(  # in this process, to import torch only once more: in the one that trains
        *([256], 3, 32, [4], ["fp32"], ["fullshard"]),
        device="cpu",
        results=tmp_path,
        document=page,
        write_document=True,
    )
    (path,) = tmp_path.glob("memory_limit_*.json")
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["error"] == "" and 1.0 <= cell["peak_over_course"] <= 1.05
    assert cell["reading"]["peak_phase"] == "backward"
    alive = cell["reading"]["at_peak"]
    assert {"full parameters|blocks.1", "full gradients|blocks.2"} <= set(alive)
    assert sum(alive.values()) == cell["reading"]["peaks"]["backward"]
    assert path.with_suffix(".png").exists() and "| 256, 4 fake, fp32 |" in page.read_text()
    assert str(tmp_path) not in path.read_text()


def test_faults_are_compared_with_an_untouched_allocator_of_the_same_system() -> None:
    def record(faults: list[int], seconds: float, peak: int) -> Record:
        counted = {"faults": faults, "user_seconds": [seconds] * 2, "system_seconds": [seconds] * 2}
        memory = {"baseline": 100, "peak": peak, "resting": 0, **counted}
        return Record([1.0], [[seconds], [seconds]], [memory, memory])

    summary = memory_limit_faults.summarise(
        {"fullshard, untouched": record([40, 60], 2.0, 300), "fullshard, 32 MiB": record([4, 4], 1.0, 320)}
    )
    kept = summary["fullshard, 32 MiB"]
    assert kept["faults"]["median"] == 4 and summary["fullshard, untouched"]["faults"]["median"] == 50
    assert kept["processor_seconds_ratio"]["median"] == 0.5 and kept["peak_ratio"] == pytest.approx(1.1)
    assert "| fullshard, 32 MiB | 4 |" in memory_limit_faults.table(summary, {})
    assert memory_limit_faults.Setting.parse("16+huge").name == "16 MiB, huge pages"
