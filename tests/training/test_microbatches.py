"""Several backwards before a step of the optimizer: with and without synchronization, in any order."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch

from compare import assert_close
from front_ends import (
    CLOSE,
    COMPOSABLE,
    FLAT,
    FRONT_ENDS,
    ORIGINAL,
    STRATEGIES,
    FrontEnd,
    adam,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    both_backward,
    build,
    each_front_end,
    gathered,
    sgd,
    sharded_with_reference,
    unwrapped,
)
from fullshard import FullshardError, PhaseError
from fullshard.comm import Collective, record
from models import Stack, batch, reference_backward, square_loss, tiny_units
from pairwise import each_value
from ranks import Rank, on_ranks

each_wrapper = pytest.mark.parametrize("front_end", [ORIGINAL, FLAT], ids=str)


def counts(seen: list[Collective]) -> Counter[str]:
    """How many launches for a unit there were of each kind."""
    return Counter(kind for kind, _, _ in {(c.kind, c.unit, c.launch) for c in seen})


def accumulate(front_end: FrontEnd, model: Any, reference: Any, rank: Rank, pattern: str, first: int = 0) -> None:
    """One microbatch per letter on both models, (S)ynchronized or u(N)synchronized."""
    for number, letter in enumerate(pattern):
        with front_end.no_sync(model) if letter == "N" else contextlib.nullcontext(), record() as seen:
            square_loss(first + number)(model, rank.rank).backward()
        assert bool({c.kind for c in seen} - {"all_gather"}) == (letter == "S")
        reference_backward(reference, rank.world_size, square_loss(first + number))


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES, pattern=["NNNS", "SNS", "NSNNS", "SS"])
def test_any_order_of_microbatches(rank: Rank, front_end: FrontEnd, strategy: str, pattern: str) -> None:
    """However microbatches with and without synchronization alternate, gradients are those of all at the last."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2), strategy=strategy)
    optimizers = adam(model.parameters()), adam(reference.parameters())
    for step in range(2):
        accumulate(front_end, model, reference, rank, pattern, first=10 * step)
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
@each_front_end
@pytest.mark.parametrize(("strategy", "first", "again"), [("FULL_SHARD", 5, 5), ("SHARD_GRAD_OP", 4, 0)])
def test_collectives_without_sync(rank: Rank, front_end: FrontEnd, strategy: str, first: int, again: int) -> None:
    """Nothing is reduced, nothing is in ``.grad``; the wrapper keeps what its strategy keeps till a sync."""
    with tiny_units():
        model = front_end.wrap(build(Stack, 3), rank, strategy=strategy)
    for expected in (first, first if front_end.composable else again):
        with record() as seen, front_end.no_sync(model):
            square_loss()(model, rank.rank).backward()
        assert counts(seen) == Counter(all_gather=expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        kept = strategy == "SHARD_GRAD_OP" and not front_end.composable
        assert len(gathered(model)) == (4 if kept else 0)
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert counts(seen)["reduce_scatter"] == 4
    assert gathered(model) == []


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


# -------------------------------------------------------------------- what may happen in between


@on_ranks(2)
@each_value(front_end=FRONT_ENDS, strategy=STRATEGIES)
def test_clearing_gradients_in_between(rank: Rank, front_end: FrontEnd, strategy: str) -> None:
    """``zero_grad`` drops what waits for a reduction as well, set to None or to zero."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 1), strategy=strategy)
    for to_none in (True, False):
        with front_end.no_sync(model):
            square_loss(5)(model, rank.rank).backward()
        model.zero_grad(set_to_none=to_none)
        accumulate(front_end, model, reference, rank, "NS")
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


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
@each_value(front_end=FRONT_ENDS, when=["frozen later", "unfrozen later", "frozen in the last"])
def test_freezing_in_between(rank: Rank, when: str, front_end: FrontEnd) -> None:
    """What has accumulated before a parameter is frozen is kept; what is unfrozen later starts then."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    for step in range(3):
        trains = {"frozen later": step != 1, "unfrozen later": step != 0, "frozen in the last": step != 2}[when]
        for module in (unwrapped(model), reference):
            part = module.blocks[0] if front_end.flat else unwrapped(module.blocks[0]).up
            part.requires_grad_(trains)
            if front_end.flat and module is reference:
                module.blocks[0].requires_grad_(trains)
        accumulate(front_end, model, reference, rank, "S" if step == 2 else "N", first=step)
    assert_same_gradients(model, reference)


@on_ranks(2)
@each_front_end
def test_no_sync_around_the_backward_only(rank: Rank, front_end: FrontEnd) -> None:
    """Entered between forward and backward, it counts for that backward."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 2))
    loss = square_loss(0)(model, rank.rank)
    with record() as seen, front_end.no_sync(model):
        loss.backward()
    assert counts(seen)["reduce_scatter"] == 0
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


# -------------------------------------------------------------------- the context of the wrapper


@on_ranks(2)
@each_wrapper
def test_no_sync_may_be_nested(rank: Rank, front_end: FrontEnd) -> None:
    """The inner context ends without ending the outer one."""
    model, reference = sharded_with_reference(front_end, rank, build(Stack, 1))
    with model.no_sync():
        with model.no_sync():
            square_loss(0)(model, rank.rank).backward()
        with record() as seen:
            square_loss(1)(model, rank.rank).backward()
        assert counts(seen)["reduce_scatter"] == 0
    square_loss(2)(model, rank.rank).backward()
    for step in range(3):
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


# -------------------------------------------------------------------- settings of the composable front end


@on_ranks(2)
@each_value(order=[(0, 1, 2), (2, 1, 0)], sync=["at the last", "each", "each", "at the last"])
def test_only_the_last_backward_finishes(rank: Rank, sync: str, order: tuple[int, ...]) -> None:
    """Forwards, then their backwards in any order, all but the last with ``set_is_last_backward(False)``."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack))
    for start in (0, 10):
        losses = [square_loss(start + step)(model, rank.rank) for step in range(3)]
        for count, step in enumerate(order):
            model.set_is_last_backward(count == 2)
            model.set_requires_gradient_sync(count == 2 or sync == "each")
            losses[step].backward()
            reference_backward(reference, rank.world_size, square_loss(start + step))
        assert_same_gradients(model, reference)
        assert_at_rest(model)


@on_ranks(2)
def test_parameters_kept_after_backward(rank: Rank) -> None:
    """With ``set_reshard_after_backward(False)`` parameters stay unsharded for the next forward, till a step."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack), strategy="SHARD_GRAD_OP")
    model.set_reshard_after_backward(False)
    every = ["", "blocks.0", "blocks.1", "blocks.2"]
    optimizers = [sgd(m, 0.5) for m in (model, reference)]
    for step in range(3):
        with record() as seen:
            accumulate(COMPOSABLE, model, reference, rank, "NS", first=10 * step)
        assert len([c for c in seen if c.kind == "all_gather"]) == 4  # once for both microbatches
        assert gathered(model) == every
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert_close(model(batch(0, 0, 2, 6)), reference(batch(0, 0, 2, 6)), "evaluation", **CLOSE)
        for module in (model, *model.blocks):
            module.reshard()
    model.set_reshard_after_backward(True)
    square_loss()(model, rank.rank).backward()
    assert_at_rest(model)
    model.blocks[1].set_reshard_after_backward(False, recurse=False)
    square_loss()(model, rank.rank).backward()
    assert gathered(model) == ["blocks.1"]
    model.blocks[1].reshard()
    assert_at_rest(model)


@on_ranks(2)
def test_a_unit_reduced_again_while_its_first_reduction_is_in_flight(rank: Rank) -> None:
    """Both need the memory of the unit's message: the second waits for it, however many may be in flight."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(Stack, 1), [])
    model.set_reduce_scatter_max_input_buffers(4)
    for step, last in enumerate((False, False, True)):
        model.set_is_last_backward(last)
        both_backward(model, reference, rank, square_loss(step))
    assert_same_gradients(model, reference)
