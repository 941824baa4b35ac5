"""Histories of fixed seeds, and that the fuzzer finds what it looks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from containers import CONTAINERS
from fuzz.comparison import Tolerance, difference
from fuzz.draw import WEIGHTS, draw
from fuzz.histories import DifferenceFound, History
from fuzz.losses import DOUBLE_BACKWARD, Loss
from fuzz.models import KINDS
from fuzz.operations import Operations
from fuzz.plan import BlockPlan, FrontEnd, HistoryPlan, ModelPlan, Operation, OptimizerPlan, every_block
from fuzz.running import Failure, run
from fuzz.sharding import message_sizes
from fuzz.shrink import shrink
from ranks import Rank, RankPool, on_ranks

SEEDS = range(50)  # `make fuzz` has as many as one likes
TRAIN = Operation("train", 1)
FRONT_ENDS = [
    FrontEnd(),
    FrontEnd("replicate"),
    FrontEnd("wrapper"),
    FrontEnd("wrapper", orig=False),
    FrontEnd("wrapper", fp16=True),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_histories(ranks: RankPool, seed: int) -> None:
    """Losses, parameters, gradients, and what is unsharded, are as without sharding, after every operation."""
    failure = run(ranks, draw(seed))
    assert failure is None, failure.text


# ---------------------------------------------------------------- that differences are found


def halve_a_gradient(history: History) -> None:
    _gradient(history).mul_(0.5)


def change_a_gradient_a_little(history: History) -> None:
    _gradient(history).view(-1)[:1].add_(1e-7)


def drop_a_gradient(history: History) -> None:
    pair = history.pairs[0]
    if pair.piece is not None and getattr(pair.piece, "handle", None) is not None:
        pair.piece.handle.flat.grad = None
    else:
        assert pair.held is not None
        pair.held.grad = None


def change_a_parameter(history: History) -> None:
    value = next(values[0] for values in (pair.values() for pair in history.pairs) if values and values[0].numel())
    value.view(-1)[value.abs().argmax()] *= 1.2


def change_the_loss(history: History) -> None:
    loss = torch.tensor(1.0, dtype=torch.float64)
    history.expect("loss", loss * 1.2, loss)


def leave_a_unit_unsharded(history: History) -> None:
    history.ours.model(Loss.of(history.plan, TRAIN).batch(0))


def _gradient(history: History) -> torch.Tensor:
    gradients = (pair.gradients()[0] for pair in history.pairs)
    return next(gradient for gradient in gradients if gradient is not None and gradient.numel())


CHANGES = [
    halve_a_gradient,
    change_a_gradient_a_little,
    drop_a_gradient,
    change_a_parameter,
    change_the_loss,
    leave_a_unit_unsharded,
]


@on_ranks(2)
@pytest.mark.parametrize("number", range(len(FRONT_ENDS)))
def test_differences_are_found(rank: Rank, number: int) -> None:
    """After a backward nothing differs; then one thing is changed by hand (on one rank), and all ranks find it."""
    front_end = FRONT_ENDS[number]
    for change in CHANGES:
        if change is change_a_gradient_a_little and front_end.fp16:
            continue
        if change is leave_a_unit_unsharded and front_end.name == "replicate":  # which keeps all, always
            continue
        plan = HistoryPlan(3, ModelPlan(tokens=True), front_end)
        with message_sizes(front_end):
            history = Operations(rank, plan)
            history.accumulate_gradients(Loss.of(plan, TRAIN))
            history._compare(-1)
            if rank.rank == 1 or change is leave_a_unit_unsharded:
                change(history)
            with pytest.raises(DifferenceFound, match="when made"):
                history._compare(-1)


def test_tolerance_is_of_the_largest_element() -> None:
    """A difference counts as a part of the largest element, and NaN is never right."""
    tolerance = Tolerance(1e-3, 0.0)
    expected = torch.tensor([0.0, 100.0])
    assert not list(difference("x", torch.tensor([0.09, 100.0]), expected, tolerance))
    assert list(difference("x", torch.tensor([0.11, 100.0]), expected, tolerance))
    assert list(difference("x", torch.tensor([torch.nan, 100.0]), expected, tolerance))
    assert list(difference("x", torch.tensor([0.0, 100.0, 0.0]), expected, tolerance))
    assert list(difference("x", expected.double(), expected, tolerance))


@on_ranks(2)
def test_sharded_values_are_looked_at(rank: Rank) -> None:
    """What is compared is what the modules hold: DTensors, each with this rank's part."""
    history = History(rank, HistoryPlan())
    assert all(isinstance(pair.held, DTensor) for pair in history.pairs)
    for pair in history.pairs:
        values = pair.values()
        assert values is not None and values[0].shape == values[1].shape


# ---------------------------------------------------------------- drawing and shrinking


def test_everything_is_drawn() -> None:
    """In a few hundred seeds every feature appears, and a seed gives the same plan again."""
    plans = [draw(seed) for seed in range(400)]
    assert plans == [draw(seed) for seed in range(400)]
    blocks = [block for plan in plans for block in every_block(plan.model)]
    assert {block.kind for block in blocks} == set(KINDS)
    assert {block.output for block in blocks} == {plan.model.output for plan in plans} == set(CONTAINERS)
    assert len({block.checkpoint for block in blocks}) == 5
    losses = {operation.arguments.get("loss") for plan in plans for operation in plan.operations}
    assert losses == {None, *DOUBLE_BACKWARD, "jvp"}
    operations = [operation for plan in plans for operation in plan.operations]
    assert {operation.name for operation in operations} == set(WEIGHTS)
    assert {operation.arguments.get("outside") for operation in operations} == {None, "called", "read", "backwards"}
    toggles = {operation.arguments.get("toggle", (0, ""))[1] for operation in operations}
    assert toggles == {"", "restored", "objects", "left", "after"}
    for name in ("tied_blocks", "tied_head", "head_unit", "block_unit", "large"):
        assert {getattr(plan.model, name) for plan in plans} == {True, False}, name
    fronts = {(plan.front_end.name, plan.front_end.mesh) for plan in plans}
    meshes = [(1,), (2,), (3,), (2, 2), (2, 1), (1, 2)]
    expected = {(name, mesh) for name in ("fully_shard", "wrapper") for mesh in meshes}
    assert fronts == expected | {("replicate", (2,)), ("replicate", (3,))}
    optimizers = {(plan.optimizer.name, plan.optimizer.mode) for plan in plans}
    assert len(optimizers) == 4 * 2


def test_plans_can_be_read_again() -> None:
    """What is printed of a plan makes the same plan."""
    names = {each.__name__: each for each in (BlockPlan, FrontEnd, HistoryPlan, ModelPlan, Operation, OptimizerPlan)}
    for seed in range(20):
        assert eval(repr(draw(seed)), names) == draw(seed)


def test_shrinking_keeps_what_fails() -> None:
    """A failure that needs a kind of block and an operation is shrunk to these."""

    def needs(kind: str, operation: str) -> Callable[[HistoryPlan], Failure | None]:
        def run(plan: HistoryPlan) -> Failure | None:
            kinds = {block.kind for block in every_block(plan.model)}
            names = {each.name for each in plan.operations}
            return Failure(plan, "after operation 0: x(1)\nwrong") if kind in kinds and operation in names else None

        return run

    plans = (plan for plan in map(draw, range(1000)) if needs("views", "clip")(plan))
    plan = next(plan for plan in plans if len(plan.model.blocks) > 2 and len(plan.operations) > 5)
    small = shrink(Failure(plan, "after operation 1: x(1)\nwrong"), needs("views", "clip")).plan
    assert [operation.name for operation in small.operations] == ["clip"]
    assert small.model == ModelPlan((BlockPlan("views"),))
    assert small.operations[0].data == next(each.data for each in plan.operations if each.name == "clip")
