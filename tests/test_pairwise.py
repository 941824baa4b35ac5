"""The parametrization by pairs: complete, and small."""

from __future__ import annotations

import itertools

import pytest

from pairwise import each_value, indices, pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [((3,), 3), ((3, 4), 12), ((3, 3, 6), 22), ((2, 2, 2, 2), 8), ((5, 4, 3, 2), 26)]
)
def test_any_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    """Every pair of values of two axes is in a row, no row comes twice, and rows are few."""
    rows = indices([range(size) for size in sizes])
    met = {pair for row in rows for pair in pairs(row)}
    assert met == {pair for row in itertools.product(*map(range, sizes)) for pair in pairs(row)}
    assert len(set(rows)) == len(rows) <= most


def test_each_value_occurs() -> None:
    """Of every axis, in as many rows as the longest has; shifts together have all pairs of three by three."""
    (_, rows), kwargs = (mark := each_value(1, a="xyz", b=range(5)).mark).args, mark.kwargs
    assert {row[0] for row in rows} == set("xyz") and [row[1] for row in rows] == [1, 2, 3, 4, 0]
    assert len(set(kwargs["ids"])) == 5
    met = {row for shift in range(3) for row in each_value(shift, a="xyz", b=range(3)).mark.args[1]}
    assert met == set(itertools.product("xyz", range(3)))
