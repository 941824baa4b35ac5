"""Leaving features out of histories: those of faults that are known, so that others can be looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fuzz.outputs import UNKNOWN_CLASSES
from fuzz.plan import BlockPlan, HistoryPlan, Operation

__all__ = ["FEATURES", "without"]


def without(plan: HistoryPlan, features: Sequence[str]) -> HistoryPlan:
    """The history without some features, by their names in :data:`FEATURES`."""
    for feature in features:
        plan = FEATURES[feature](plan)
    return plan


def _each_block(plan: HistoryPlan, change: Callable[[BlockPlan], BlockPlan]) -> HistoryPlan:
    def changed(block: BlockPlan) -> BlockPlan:
        return change(replace(block, inner=tuple(changed(inner) for inner in block.inner)))

    blocks = tuple(changed(block) for block in plan.model.blocks)
    return replace(plan, model=replace(plan.model, blocks=blocks))


def _each_operation(plan: HistoryPlan, change: Callable[[Operation], Operation]) -> HistoryPlan:
    return replace(plan, operations=tuple(change(operation) for operation in plan.operations))


def _argument(plan: HistoryPlan, name: str) -> HistoryPlan:
    def changed(operation: Operation) -> Operation:
        arguments: dict[str, Any] = {key: value for key, value in operation.arguments.items() if key != name}
        return replace(operation, arguments=arguments)

    return _each_operation(plan, changed)


def _no_kinds(*kinds: str) -> Callable[[HistoryPlan], HistoryPlan]:
    def changed(block: BlockPlan) -> BlockPlan:
        return replace(block, kind="mlp") if block.kind in kinds else block

    return lambda plan: _each_block(plan, changed)


def _no_operation(name: str) -> Callable[[HistoryPlan], HistoryPlan]:
    return lambda plan: replace(plan, operations=tuple(each for each in plan.operations if each.name != name))


def _known_outputs(plan: HistoryPlan) -> HistoryPlan:
    def changed(block: BlockPlan) -> BlockPlan:
        return replace(block, output="tensor") if block.output in UNKNOWN_CLASSES else block

    plan = _each_block(plan, changed)
    if plan.model.output in UNKNOWN_CLASSES:
        plan = replace(plan, model=replace(plan.model, output="tensor"))
    return plan


def _no_overlap_on_wrappers(plan: HistoryPlan) -> HistoryPlan:
    if plan.front_end.name == "wrapper" and plan.optimizer.mode == "overlap":
        return replace(plan, optimizer=replace(plan.optimizer, mode="localize"))
    return plan


def _no_wrappers_on_one_rank(plan: HistoryPlan) -> HistoryPlan:
    if plan.front_end.name == "wrapper" and plan.front_end.world_size == 1:
        return replace(plan, front_end=replace(plan.front_end, mesh=(2,)))
    return plan


FEATURES: dict[str, Callable[[HistoryPlan], HistoryPlan]] = {
    "weights read directly": lambda plan: replace(plan, model=replace(plan.model, head="called")),
    "double backward": lambda plan: _argument(plan, "loss"),
    "aliased gradients": _no_kinds("views", "position", "positions"),
    "0-D parameters": _no_kinds("scalar", "small"),
    "localized optimizers": lambda plan: replace(plan, optimizer=replace(plan.optimizer, mode="plain")),
    "outputs of unknown classes": _known_outputs,
    "deep copies": _no_operation("copy"),
    "overlap on wrappers": _no_overlap_on_wrappers,
    "wrappers on one rank": _no_wrappers_on_one_rank,
    "regularizers": lambda plan: _argument(plan, "regularized"),
}
