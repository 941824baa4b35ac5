"""Bounds on a step, and steps beside them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from bench.overlap.bound import UnitCosts, Window, keep_last, scheduled_seconds, step_bound
from bench.overlap.cells import Cell, Model, Rounds, even_units, measure, uneven_units
from bench.overlap.systems import SYSTEMS
from bench_command import run_small
from hypothesis import given, settings
from hypothesis import strategies as st

_seconds = st.integers(1, 40).map(float)
_units = st.lists(
    st.builds(UnitCosts, _seconds, _seconds, _seconds, _seconds, _seconds, st.integers(1, 9)), min_size=1, max_size=9
)
BY_NAME = {system.name: system for system in SYSTEMS}


@settings(max_examples=40, deadline=None)
@given(_units)
def test_one_ahead_is_the_formula(units: list[UnitCosts]) -> None:
    """Gathering one ahead takes what the sum over units of the larger of computation and link says."""
    units = keep_last(units)
    forward = units[0].gather + sum(max(unit.forward, after.gather) for unit, after in itertools.pairwise(units))
    order = units[::-1]
    backward = sum(
        max(
            unit.backward,
            (order[i + 1].regather if i + 1 < len(order) else 0) + (order[i - 1].reduce if i else 0),
        )
        for i, unit in enumerate(order)
    )
    expected = forward + units[-1].forward + backward + units[0].reduce
    assert scheduled_seconds(units, Window(1)) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(_units, st.integers(0, 4), st.booleans())
def test_no_schedule_is_below_computation_or_link(units: list[UnitCosts], depth: int, duplex: bool) -> None:
    """Whatever is gathered ahead."""
    bound = step_bound(units, Window(depth), duplex=duplex)
    assert bound.schedule >= bound.computation and bound.schedule >= bound.link - 1e-9
    assert bound.schedule >= bound.chain - 1e-9
    assert bound.seconds == bound.schedule


@settings(max_examples=40, deadline=None)
@given(_units, st.integers(0, 4))
def test_a_window_in_bytes_is_one_in_units_where_all_are_equal(units: list[UnitCosts], depth: int) -> None:
    """As many units ahead, as much memory, as many kept at the turn."""
    units = [units[0]] * len(units)
    some, same = Window(depth), Window(nbytes=depth * units[0].nbytes)
    assert step_bound(keep_last(units, some), some) == step_bound(keep_last(units, same), same)


def test_the_window_counts_bytes() -> None:
    """A unit larger than the window is gathered alone; none of it, nothing."""
    units = [UnitCosts(1, 1, 1, 1, 1, size) for size in (5, 1, 2, 9, 1)]
    assert [Window(nbytes=3).after(units, i) for i in range(5)] == [2, 1, 1, 1, 0]
    assert [Window(nbytes=0).after(units, i) for i in range(5)] == [0] * 5
    assert step_bound(units, Window(nbytes=3)).memory == 11  # the two and the nine behind it
    assert [unit.regather for unit in keep_last(units, Window(nbytes=10))] == [1, 1, 1, 0, 0]


def test_a_step_that_gathers_nothing_ahead() -> None:
    """Two units of 1 forward, 2 backward, 3 per gather and 4 per reduction, by hand."""
    units = [UnitCosts(1, 2, 3, 3, 4, 1)] * 2
    # 3+1+3+1 forward; 3+2 backward of the last; 3 and 2 of the first beside the last's 4; its own 4.
    assert scheduled_seconds(units, Window(0)) == 8 + 5 + max(4 + 3 + 2, 4) + 4
    assert step_bound(units, Window(0)).link == 20
    with pytest.raises(ValueError, match="needs a unit"):
        step_bound([])
    with pytest.raises(ValueError, match="at least 0"):
        Window(-1)


@pytest.mark.parametrize(("device", "ranks", "ratio"), [("streams", 8, 0.3), ("host", 1024, 1.0), ("streams", 64, 3.0)])
def test_one_unit_ahead_is_within_five_per_cent_of_the_bound(device: str, ranks: int, ratio: float) -> None:
    """What the schedule takes, the host's own work left out; nothing ahead is far above."""
    systems = [BY_NAME["fullshard"], BY_NAME["fullshard, none ahead"]]
    model = Model("even", even_units(5))
    measured = measure(Cell(model, device, ranks, ratio, "none"), systems, Rounds(1, 1, 1))
    assert not measured.failures
    assert measured.over_bound("fullshard").median <= 1.05
    assert measured.over_bound("fullshard, none ahead").median >= 1.2


@pytest.mark.parametrize("device", ["host", "streams"])
def test_more_ahead_gains_what_the_schedule_predicts(device: str) -> None:
    """Two units ahead and two reductions in flight: a fifth less than one of each, where units are uneven."""
    system = BY_NAME["fullshard, 2 ahead, 2 reductions"]
    measured = measure(Cell(Model("uneven", uneven_units()), device, 64, 1.0, "none"), [system], Rounds(1, 1, 1))
    window = Window(nbytes=2 * max(cost.nbytes for cost in measured.costs), reductions=2)
    predicted = step_bound(keep_last(measured.costs, window), window).schedule
    assert predicted < 0.8 * measured.bound.seconds
    assert measured.steps[system.name] == pytest.approx([predicted], rel=0.01)


def test_peers_overlap_by_streams_only() -> None:
    """FSDP2 and FSDP1 block on a CPU host; with streams that keep time they overlap."""
    systems = [BY_NAME["FSDP2"], BY_NAME["FSDP1 PRE"]]
    model = Model("even", even_units(5))
    blocked = measure(Cell(model, "host", 8, 1.0, "none"), systems, Rounds(1, 1, 1))
    streams = measure(Cell(model, "streams", 8, 1.0, "none"), systems, Rounds(1, 1, 1))
    for system in systems:
        assert blocked.over_bound(system.name).median > 1.5
        assert streams.over_bound(system.name).median < 1.1


def test_the_command_writes_figures_plot_and_document(tmp_path: Path) -> None:
    """One cell, two contestants."""
    options = "--ranks 8 --ratio 1 --device host --what even --rounds 1 --only fullshard --only FSDP2 --clock none"
    page, (path,) = run_small(tmp_path, "overlap", options)
    (cell,) = json.loads(path.read_text())["cells"]
    over = {name: entry["over_bound"]["median"] for name, entry in cell["contestants"].items()}
    assert list(over) == ["fullshard", "FSDP2"] and over["FSDP2"] > over["fullshard"]
    assert path.with_suffix(".png").exists() and "| fullshard |" in page
