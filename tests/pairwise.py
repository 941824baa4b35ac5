"""Few combinations of many variants, all of which run: any two values meet, or each value occurs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with combinations of one value per axis, in which all pairs of values meet.

    All of them run, and every value meets every other: of three front ends, three strategies and six losses there are
    18 or a few more, not 54.
    """
    values = {name: list(axis) for name, axis in axes.items()}
    rows = [tuple(values[name][i] for name, i in zip(values, row, strict=True)) for row in indices(values.values())]
    return pytest.mark.parametrize(tuple(values), rows, ids=["-".join(map(label, row)) for row in rows])


def each_value(shift: int = 0, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with as few combinations as there are values on the longest axis: each value occurs.

    For what depends little on how axes meet. Tests that differ in ``shift`` (0 to 2) let other values meet: with three
    front ends and three strategies, the shifts together have all nine pairs.
    """
    values = [list(axis) for axis in axes.values()]
    count = max(map(len, values))
    rows = [tuple(axis[(i + shift * k) % len(axis)] for k, axis in enumerate(values)) for i in range(count)]
    return pytest.mark.parametrize(tuple(axes), rows, ids=["-".join(map(label, row)) for row in rows])


def label(value: Any) -> str:
    """What a value is called in the name of a test."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)


def indices(axes: Iterable[Sequence[Any]]) -> list[tuple[int, ...]]:
    """Rows of one index per axis that cover all pairs: the row that covers most new ones is taken, again and again."""
    sizes = [range(len(axis)) for axis in axes]
    if len(sizes) < 3:
        return list(itertools.product(*sizes))
    everything = list(itertools.product(*sizes))
    missing = {pair for row in everything for pair in pairs(row)}
    chosen = []
    while missing:
        best = max(everything, key=lambda row: sum(pair in missing for pair in pairs(row)))
        missing.difference_update(pairs(best))
        chosen.append(best)
    return sorted(chosen)


def pairs(row: tuple[int, ...]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs of (axis, index) in a row."""
    return list(itertools.combinations(enumerate(row), 2))
