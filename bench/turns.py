"""Contestants take turns, so that a drift of the machine touches all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def turn_order(names: Sequence[str], round_index: int) -> list[str]:
    """The order of turns in a round: reversed in every second, and rotated by one after every second.

    Rotation alone would give every contestant the same predecessor in all rounds; rotated and reversed in the same
    round, two contestants would always have the same order.
    """
    shift = round_index // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if round_index % 2 else order


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def each_that_runs(names: Iterable[str], action: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
    """``action(name)`` by name, and why it failed where it did."""
    results: dict[str, T] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            results[name] = action(name)
        except Exception as error:
            failures[name] = reason_of(error)
            print(f"{name} cannot run: {failures[name]}", flush=True)
    return results, failures


def take_turns(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every contestant once per round, in an order that changes; what it returned, by round."""
    found: dict[str, list[T]] = {name: [] for name in contestants}
    for index in range(rounds if contestants else 0):
        gc.collect()  # not in somebody's turn
        for name in turn_order(list(contestants), index):
            found[name].append(contestants[name]())
    return found


def compete(names: Iterable[str], build: Callable[[str], Any], rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Build everyone and let them take turns: what ``turn()`` returned by name and round, and who cannot run."""
    runners, failures = each_that_runs(names, build)
    return take_turns({name: runner.turn for name, runner in runners.items()}, rounds), failures
