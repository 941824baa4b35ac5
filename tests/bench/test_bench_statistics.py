"""The ratios every benchmark reports, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from bench.statistics import (
    Spread,
    largest_difference,
    paired_ratios,
    paired_spread,
    round_medians,
    spread,
    turn_order,
)


def test_spread_interpolates_between_order_statistics() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.75, 3.25)
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)


def test_spread_of_one_value_is_that_value() -> None:
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_spread_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_ratios_are_paired_by_round_and_not_taken_of_medians() -> None:
    # The machine became three times slower after two rounds; in every round we took half as long.
    peer = [2.0, 2.0, 6.0, 6.0, 6.0]
    ours = [1.0, 1.0, 3.0, 3.0, 3.0]
    assert paired_ratios(ours, peer) == [0.5] * 5
    assert paired_spread(ours, peer) == Spread(0.5, 0.5, 0.5)
    assert paired_spread([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]) == Spread(2.0, 1.5, 2.5)


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="2 and 1"):
        paired_ratios([1.0, 2.0], [1.0])


def test_one_figure_per_round() -> None:
    assert round_medians([[1.0, 9.0, 2.0], [4.0, 6.0]]) == [2.0, 5.0]


def test_the_largest_difference_does_not_hide_nan() -> None:
    assert largest_difference([1.0, 2.0, 4.0], [1.5, 2.0, 2.0]) == 2.0
    for position in range(3):
        values = [1.0, 2.0, 3.0]
        values[position] = math.nan
        assert math.isnan(largest_difference(values, [1.0, 2.0, 3.0]))


def test_turns_rotate_and_change_direction() -> None:
    names = ["a", "b", "c"]
    orders = [turn_order(names, index) for index in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert orders[0] == ["a", "b", "c"]
    assert orders[1] == ["c", "b", "a"]
    assert orders[2] == ["b", "c", "a"]
    assert [turn_order(["a", "b"], index)[0] for index in range(4)] == ["a", "b", "b", "a"]
    assert {order[0] for order in orders} == set(names)
    followers_of_a = {order[order.index("a") + 1] for order in orders if order[-1] != "a"}
    assert followers_of_a == {"b", "c"}


def test_spread_as_text() -> None:
    assert f"{Spread(0.654, 0.601, 0.7):.2f}" == "0.65 (0.60 to 0.70)"
