"""Making a history that fails small: leave out operations, then blocks, then one feature after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import MISSING, is_dataclass, replace
from typing import Any

from fuzz.plan import HistoryPlan
from fuzz.running import Failure


def shrink(failure: Failure, run: Callable[[HistoryPlan], Failure | None], most: int = 200) -> Failure:
    """Find the smallest history that fails alike; its failure.

    Args:
        failure: What is to be shrunk.
        run: Lives a history.
        most: Histories to run at most.
    """
    tried = 0
    progress = True
    while progress:
        progress = False
        for candidate in candidates(failure.plan):
            if tried == most:
                return failure
            tried += 1
            found = run(candidate)
            if found is not None and found.kind.split("|")[-1] == failure.kind.split("|")[-1]:
                failure, progress = found, True
                break
    return failure


def candidates(plan: HistoryPlan) -> Iterator[HistoryPlan]:
    """Histories that are a little simpler, those that promise most first: without half of the operations."""
    size = len(plan.operations) // 2
    while size:
        for start in range(0, len(plan.operations), size):
            yield replace(plan, operations=plan.operations[:start] + plan.operations[start + size :])
        size //= 2
    yield from smaller(plan)


def smaller(value: Any) -> Iterator[Any]:
    """Values like ``value`` with one entry or argument less, or with one field as simple as can be."""
    if isinstance(value, dict):
        for key in value:
            yield {other: held for other, held in value.items() if other != key}
    elif isinstance(value, tuple):
        for index, entry in enumerate(value):
            before, after = value[:index], value[index + 1 :]
            if is_dataclass(entry):
                yield (*before, *getattr(entry, "inner", ()), *after)
                yield before + after
                yield from ((*before, simpler, *after) for simpler in smaller(entry))
    elif is_dataclass(value):
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if field.default not in (MISSING, held) and field.name not in ("seed", "data"):
                yield replace(value, **{field.name: field.default})
            yield from (replace(value, **{field.name: simpler}) for simpler in smaller(held))
