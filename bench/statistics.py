"""Medians, quartiles and paired ratios: the only statistics the benchmarks report.

A noisy machine drifts, so absolute times of two contestants are never compared across a run. Every round runs
every contestant once; the ratio is taken *within* a round and then summarized over the rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A median and the quartiles around it, in the unit of the values."""

    median: float
    lower_quartile: float
    upper_quartile: float

    def as_json(self) -> dict[str, float]:
        return self._asdict()

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        return f"{self.median:{spec}} ({self.lower_quartile:{spec}} to {self.upper_quartile:{spec}})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (linear interpolation between order statistics, as ``numpy.quantile``)."""
    if not values:
        raise ValueError("spread needs at least one value")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, lower, upper)


def round_medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """One figure per round: the median of the steps a contestant ran in it."""
    return [statistics.median(steps) for steps in rounds]


def paired_ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """``values[i] / reference[i]`` for every round ``i``."""
    if len(values) != len(reference):
        raise ValueError(f"paired ratios need equally many rounds, got {len(values)} and {len(reference)}")
    return [value / base for value, base in zip(values, reference, strict=True)]


def paired_spread(values: Sequence[float], reference: Sequence[float]) -> Spread:
    return spread(paired_ratios(values, reference))


def largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest ``|values[i] - reference[i]|``; NaN if any is, which ``max`` alone would hide."""
    differences = [abs(value - base) for value, base in zip(values, reference, strict=True)]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)
