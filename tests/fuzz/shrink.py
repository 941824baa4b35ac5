"""Making a history that fails small: leave out operations, then blocks, then one feature after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.plan import BlockPlan, FrontEnd, HistoryPlan
from fuzz.running import Failure

__all__ = ["shrink", "smaller"]

Run = Callable[[HistoryPlan], "Failure | None"]


def shrink(failure: Failure, run: Run, most: int = 200) -> tuple[HistoryPlan, Failure]:
    """The smallest history found that fails alike, and its failure.

    Args:
        failure: What is to be shrunk.
        run: Lives a history.
        most: Histories to run at most.
    """
    plan, tried = failure.plan, 0
    progress = True
    while progress and tried < most:
        progress = False
        for candidate in smaller(plan):
            tried += 1
            found = run(candidate)
            if found is not None and found.kind.split("|")[-1] == failure.kind.split("|")[-1]:
                plan, failure, progress = candidate, Failure(candidate, found.text), True
                break
            if tried >= most:
                break
    return plan, failure


def smaller(plan: HistoryPlan) -> Iterator[HistoryPlan]:
    """Histories that are a little simpler, those that promise most first."""
    operations = plan.operations
    size = len(operations) // 2
    while size:
        for start in range(0, len(operations), size):
            yield replace(plan, operations=operations[:start] + operations[start + size :])
        size //= 2
    for blocks in _fewer(plan.model.blocks):
        yield replace(plan, model=replace(plan.model, blocks=blocks))
    for name in ("model", "optimizer", "front_end"):
        for value in _simpler(getattr(plan, name)):
            yield replace(plan, **{name: value})
    for index, operation in enumerate(operations):
        for key in operation.arguments:
            arguments = {other: value for other, value in operation.arguments.items() if other != key}
            changed = replace(operation, arguments=arguments)
            yield replace(plan, operations=(*operations[:index], changed, *operations[index + 1 :]))


def _fewer(blocks: tuple[BlockPlan, ...]) -> Iterator[tuple[BlockPlan, ...]]:
    for index, block in enumerate(blocks):
        before, after = blocks[:index], blocks[index + 1 :]
        if len(blocks) > 1 or block.inner:
            yield (*before, *block.inner, *after)
        for inner in _fewer(block.inner):
            yield (*before, replace(block, inner=inner), *after)
        if block.inner and len(block.inner) == 1:
            yield (*before, replace(block, inner=()), *after)
        for changed in _simpler(block):
            yield (*before, changed, *after)


def _simpler(value: Any) -> Iterator[Any]:
    """With one field as simple as can be."""
    for field in dataclasses.fields(value):
        if field.name in ("blocks", "inner", "name" if isinstance(value, FrontEnd) else ""):
            continue
        if field.name == "mesh":
            if len(value.mesh) == 1 and value.mesh != (2,):
                yield replace(value, mesh=(2,))
            if len(value.mesh) == 1 and value.mesh != (1,):
                yield replace(value, mesh=(1,))
            continue
        simple = "empty" if isinstance(value, BlockPlan) and field.name == "kind" else field.default
        if getattr(value, field.name) != simple:
            yield replace(value, **{field.name: simple})
