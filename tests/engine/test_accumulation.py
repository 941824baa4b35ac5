"""Several backward passes before an optimizer step: with and without reduction, and what stays gathered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compare import assert_models_equal
from fullshard import fully_shard
from fullshard.comm import record
from models import (
    Branch,
    Mlp,
    Stack,
    assert_at_rest,
    batch,
    gathered,
    reference_backward,
    shard_blocks,
    square_loss,
    with_reference,
)
from ranks import Rank, on_ranks

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}


def set_sync(model: nn.Module, sync: bool, which: str) -> None:
    """Set it on all units, on the root alone, or on the first two blocks."""
    if which == "some":
        for block in model.blocks[:2]:
            block.set_requires_gradient_sync(sync)
    else:
        model.set_requires_gradient_sync(sync, recurse=which == "all")


@on_ranks(2)
@pytest.mark.parametrize("which", ["all", "root", "some"])
@pytest.mark.parametrize("pattern", ["NS", "SNS", "NSNNS", "SS"])
def test_interleavings(rank: Rank, pattern: str, which: str) -> None:
    """However (S)ynced and u(N)synced microbatches mix, the gradients add up to the reference's."""
    model, reference = with_reference(Stack(), rank)
    for _ in range(2):
        for module in (model, reference):
            module.zero_grad()
        for step, letter in enumerate(pattern):
            set_sync(model, letter == "S", which)
            square_loss(step)(model, rank.rank).backward()
            assert_at_rest(model)
            reference_backward(reference, rank.world_size, square_loss(step))
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2, 4)
def test_accumulation_equals_the_concatenated_batch(rank: Rank) -> None:
    """Microbatches without and then with reduction give the gradient of the batch that they make together."""
    model = shard_blocks(Mlp(6, 7, 3), rank)
    whole = copy.deepcopy(model)
    microbatches = [batch(rank.rank, step, 4, 6) for step in range(3)]
    for index, microbatch in enumerate(microbatches):
        model.set_requires_gradient_sync(index == 2)
        (model(microbatch).square().mean() / 3).backward()
    whole(torch.cat(microbatches)).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad.shape, ours.grad.dtype) == (ours.shape, ours.dtype)
        assert ours.grad.placements == ours.placements
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local(), msg=name)


@on_ranks(2)
@pytest.mark.parametrize(
    ("which", "expected"),
    [("all", []), ("root", ["blocks.0", "blocks.1", "blocks.2"]), ("some", ["", "blocks.2"])],
)
def test_unsynced_units_reduce_nothing(rank: Rank, which: str, expected: list[str]) -> None:
    """Only units that sync reduce; the others' ``.grad`` stays None until they do, and then they reduce once."""
    model = shard_blocks(Stack(), rank)
    set_sync(model, False, which)
    with record() as seen:
        for step in range(2):
            square_loss(step)(model, rank.rank).backward()
    assert sorted(c.unit for c in seen if c.kind == "reduce_scatter") == sorted(expected * 2)
    assert (model.first.weight.grad is None) == ("" not in expected)
    assert (model.blocks[0].up.weight.grad is None) == ("blocks.0" not in expected)
    set_sync(model, True, which)
    with record() as seen:
        square_loss(2)(model, rank.rank).backward()
    assert sorted(c.unit for c in seen if c.kind == "reduce_scatter") == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_two_unsynced_backwards_count_twice(rank: Rank) -> None:
    """The same microbatch three times, reduced at the last, gives exactly three times the sum of one."""
    model, reference = with_reference(Stack(), rank)
    for count in range(3):
        model.set_requires_gradient_sync(count == 2)
        square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, lambda m, r: 3 * square_loss()(m, r))
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_pending_gradient_of_a_unit_that_the_last_microbatch_skips(rank: Rank) -> None:
    """What a unit accumulated without reduction is reduced in the synced backward even if that skips the unit."""
    model, reference = with_reference(Stack(), rank)
    model.set_requires_gradient_sync(False)
    square_loss()(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, square_loss())
    model.set_requires_gradient_sync(True)

    def without_middle(module: nn.Module, number: int) -> torch.Tensor:
        return module(batch(number, 1, 4, 6), run=[0, 2]).square().mean()

    without_middle(model, rank.rank).backward()
    reference_backward(reference, rank.world_size, without_middle)
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_pending_gradient_of_a_parameter_used_on_one_rank_only(rank: Rank) -> None:
    """A gradient that one rank alone accumulated in an unsynced microbatch reaches all ranks with the next."""
    model = nn.Sequential(nn.Linear(6, 6), Branch())
    reference = copy.deepcopy(model)
    for layer in (*model, model):
        fully_shard(layer, mesh=rank.mesh)
    for step in range(2):

        def loss_of(module: nn.Module, number: int, step: int = step) -> torch.Tensor:
            module[1].rank = number if step == 0 else 0
            return square_loss(step)(module, number)

        model.set_requires_gradient_sync(step == 1)
        loss_of(model, rank.rank).backward()
        reference_backward(reference, rank.world_size, loss_of)
    assert model[1].odd.weight.grad is not None
    assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
def test_microbatches_with_last_backward_at_the_end(rank: Rank) -> None:
    """With ``set_is_last_backward`` False but for the last microbatch the gradients are those of all of them."""
    model, reference = with_reference(Stack(), rank)
    for _ in range(2):
        for module in (model, reference):
            module.zero_grad()
        for step in range(3):
            model.set_is_last_backward(step == 2)
            square_loss(step)(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, square_loss(step))
        assert_at_rest(model)
        assert_models_equal(model, reference, grads=True, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["first-in-first-out", "last-in-first-out"])
def test_pipeline_of_forwards_before_backwards(rank: Rank, order: tuple[int, ...]) -> None:
    """Three forwards, then their backwards in any order with only the last marked as last, equal the reference."""
    model, reference = with_reference(Stack(), rank)
    losses = [square_loss(step)(model, rank.rank) for step in range(3)]
    for count, step in enumerate(order):
        model.set_is_last_backward(count == 2)
        model.set_requires_gradient_sync(count == 2)
        losses[step].backward()
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_models_equal(model, reference, grads=True, **CLOSE)
    assert_at_rest(model)


@on_ranks(2)
def test_without_reshard_after_backward(rank: Rank) -> None:
    """With ``set_reshard_after_backward(False)`` parameters stay gathered for the next forward, till a step."""
    model, reference = with_reference(Stack(), rank)
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for step in range(3):
        with record() as seen:
            for microbatch in range(2):
                model.set_requires_gradient_sync(microbatch == 1)
                loss = square_loss(10 * step + microbatch)
                loss(model, rank.rank).backward()
                reference_backward(reference, rank.world_size, loss)
        assert len([c for c in seen if c.kind == "all_gather"]) == 4  # once for both microbatches
        assert gathered(model) == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert_models_equal(model, reference, grads=True, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.set_reshard_after_backward(True)
    square_loss()(model, rank.rank).backward()
    assert_at_rest(model)


@on_ranks(2)
def test_one_unit_keeps_its_parameters_after_backward(rank: Rank) -> None:
    """The setting without recursion concerns one unit, and ``reshard()`` frees what it kept."""
    model = shard_blocks(Stack(), rank)
    model.blocks[1].set_reshard_after_backward(False, recurse=False)
    square_loss()(model, rank.rank).backward()
    assert gathered(model) == ["blocks.1"]
    model.blocks[1].reshard()
    assert_at_rest(model)


@on_ranks(1)
def test_accumulation_on_a_single_rank(rank: Rank) -> None:
    """On one rank unsynced microbatches add up as well."""
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        square_loss(step)(model, 0).backward()
        assert (model.first.weight.grad is None) == (step < 2)
        square_loss(step)(reference, 0).backward()
    assert_models_equal(model, reference, grads=True)
