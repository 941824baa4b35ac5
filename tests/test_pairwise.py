"""The parametrization by pairs: complete, and small."""

from __future__ import annotations

import itertools

import pytest

from pairwise import indices, pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [((3,), 3), ((3, 4), 12), ((3, 3, 6), 22), ((2, 2, 2, 2), 8), ((5, 4, 3, 2), 26)]
)
def test_any_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    """Every pair of values of two axes is in a row, no row comes twice, and rows are few."""
    rows = indices([range(size) for size in sizes])
    met = {pair for row in rows for pair in pairs(row)}
    assert met == {pair for row in itertools.product(*map(range, sizes)) for pair in pairs(row)}
    assert len(set(rows)) == len(rows) <= most
