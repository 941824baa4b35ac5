"""Several backwards before a step of the optimizer: with and without synchronization, in any order."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch

from front_ends import (
    COMPOSABLE,
    FRONT_ENDS,
    ORIGINAL,
    FrontEnd,
    assert_same_gradients,
    both_backward,
    build,
    each_front_end,
    gathered,
    sharded_with_reference,
    unwrapped,
)
from fullshard import FullshardError, PhaseError
from fullshard.comm import Collective, record
from models import Stack, reference_backward, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks


def counts(seen: list[Collective]) -> Counter[str]:
    """How many launches for a unit there were of each kind."""
    return Counter(kind for kind, _, _ in {(c.kind, c.unit, c.launch) for c in seen})


def microbatch(
    front_end: FrontEnd, model: Any, reference: Any, rank: Rank, step: int, sync: bool = False
) -> list[Collective]:
    """A backward of both models, the sharded one's with or without synchronization; its collectives."""
    with contextlib.nullcontext() if sync else front_end.no_sync(model), record() as seen:
        square_loss(step)(model, rank.rank).backward()
    assert bool({c.kind for c in seen} - {"all_gather"}) == sync
    reference_backward(reference, rank.world_size, square_loss(step))
    return seen


@on_ranks(2)
@each_front_end
def test_unsharded_parameters_without_sync(rank: Rank, front_end: FrontEnd) -> None:
    """With SHARD_GRAD_OP the wrapper keeps them from a microbatch that is not synchronized to the next."""
    with tiny_units():
        model, reference = sharded_with_reference(front_end, rank, build(Stack, 3), strategy="SHARD_GRAD_OP")
    for expected in (4, 4 if front_end.composable else 0):
        seen = microbatch(front_end, model, reference, rank, 0)
        assert counts(seen) == Counter(all_gather=expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert len(gathered(model)) == (0 if front_end.composable else 4)
    microbatch(front_end, model, reference, rank, 1, sync=True)
    assert gathered(model) == []
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_front_end
def test_some_units_without_sync(rank: Rank, front_end: FrontEnd) -> None:
    """A unit inside may accumulate while the others reduce, and is reduced with the next microbatch."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 3))
    with front_end.no_sync(model.blocks[1]), record() as seen:
        square_loss(0)(model, rank.rank).backward()
    assert sorted({c.unit for c in seen if c.kind == "reduce_scatter"}) == ["", "blocks.0", "blocks.2"]
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, remedy=["synchronize", "zero_grad"])
def test_dtype_moves_in_between_are_refused(rank: Rank, remedy: str, front_end: FrontEnd) -> None:
    """``to(dtype)`` would lose gradients that wait: it names both ways out, and either works."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    with front_end.no_sync(model):
        square_loss()(model, rank.rank).backward()
    with pytest.raises(FullshardError, match=r"unit '.*' has unreduced gradients.*synchronize_gradients\(\)"):
        model.double()
    model.float()  # what had been moved
    if remedy == "synchronize":
        model.synchronize_gradients()
        reference_backward(reference, rank.world_size, square_loss())
    else:
        model.zero_grad()
    assert_same_gradients(model, reference)
    model.double()
    assert_same_gradients(model, reference.double())


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, trains=[(True, False, True), (False, True, True), (True, True, False)])
def test_freezing_in_between(rank: Rank, front_end: FrontEnd, trains: tuple[bool, ...]) -> None:
    """What has accumulated before a parameter is frozen is kept; what is unfrozen later starts then."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    for step, flag in enumerate(trains):
        for module in (model, reference):
            block = unwrapped(module).blocks[0]
            (block if front_end.flat else unwrapped(block).up).requires_grad_(flag)
        microbatch(front_end, model, reference, rank, step, sync=step == 2)
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_front_end
def test_no_sync_around_the_backward_only(rank: Rank, front_end: FrontEnd) -> None:
    """Entered between forward and backward, it counts for that backward; the wrapper's may be nested."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    loss = square_loss(0)(model, rank.rank)
    with record() as seen, front_end.no_sync(model):
        if not front_end.composable:
            with model.no_sync():
                pass
        loss.backward()
    assert counts(seen)["reduce_scatter"] == 0
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_no_sync_in_a_step_is_refused(rank: Rank) -> None:
    """In a forward it raises, and the step goes on."""
    model = ORIGINAL.wrap(build(Stack, 1), rank)
    errors = []

    def enter(*_: Any) -> None:
        with pytest.raises(PhaseError, match="between steps") as caught, model.no_sync():
            pass
        errors.append(caught.value)

    handle = unwrapped(model).last.register_forward_pre_hook(enter)
    output = model(torch.ones(2, 6))
    handle.remove()
    assert len(errors) == 1
    output.sum().backward()


@on_ranks(2)
def test_a_unit_reduced_again_while_its_first_reduction_is_in_flight(rank: Rank) -> None:
    """Both need the memory of the unit's message: the second waits for it, however many may be in flight."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 1), [])
    model.set_reduce_scatter_max_input_buffers(4)
    for step, last in enumerate((False, False, True)):
        model.set_is_last_backward(last)
        both_backward(model, reference, rank, square_loss(step))
    assert_same_gradients(model, reference)
