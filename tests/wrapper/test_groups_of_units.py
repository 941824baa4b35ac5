"""Units of one model on different groups of ranks, strategies mixed, and models on parts of the world."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_equal
from front_ends import (
    CLOSE,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    build,
    train,
    train_reference,
    wrapped,
)
from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.comm import record
from models import Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


@on_ranks(4)
@both_modes
def test_all_strategies_in_one_model(rank: Rank, use_orig_params: bool) -> None:
    """Every block with another strategy, on another mesh, below a root with a third: as an unsharded model."""
    reference = build(Stack, 5)
    model = copy.deepcopy(reference)
    for index, strategy in enumerate(ShardingStrategy):
        mesh = rank.make_mesh(2, 2) if strategy.hybrid else rank.mesh
        model.blocks[index] = FullyShardedDataParallel(
            model.blocks[index], sharding_strategy=strategy, device_mesh=mesh, use_orig_params=use_orig_params
        )
    model = FullyShardedDataParallel(model, device_mesh=rank.mesh, use_orig_params=use_orig_params)
    losses = train(model, rank, square_loss, 3)
    assert_close(losses, train_reference(reference, rank, square_loss, 3), "losses", **CLOSE)
    with model.no_sync():
        square_loss(0)(model, rank.rank).backward()
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)
    norm = model.clip_grad_norm_(0.01)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert_close(norm, expected, "norm", **CLOSE)
    assert_same_gradients(model, reference)
    assert_at_rest(model)


@on_ranks(4)
@both_modes
def test_models_on_halves_of_the_world(rank: Rank, use_orig_params: bool) -> None:
    """Two pairs of ranks train a model each; nothing goes from one pair to the other."""
    mesh = rank.make_mesh(2, 2, names=("model", "data"))
    half, place = divmod(rank.rank, 2)
    reference = build(Stack)
    where: Any = {"process_group": mesh["data"].get_group()} if use_orig_params else {"device_mesh": mesh["data"]}
    model = wrapped(reference, rank, use_orig_params=use_orig_params, **where)
    assert model.world_size == model.process_group.size() == 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2 + 2 * half):  # not even as many steps
        square_loss(100 * half + step)(model, place).backward()
        reference_backward(reference, 2, square_loss(100 * half + step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, reference, **CLOSE)


@on_ranks(4)
@both_modes
def test_a_unit_on_a_group_of_its_own(rank: Rank, use_orig_params: bool) -> None:
    """A block sharded over pairs, as an expert is, is averaged over its pair; the rest over all ranks."""
    mesh = rank.make_mesh(2, 2, names=("expert", "data"))
    pair = rank.rank // 2
    reference = build(Stack)
    model = copy.deepcopy(reference)
    model.blocks[1] = FullyShardedDataParallel(
        model.blocks[1], mesh["data"].get_group(), ShardingStrategy.SHARD_GRAD_OP, use_orig_params=use_orig_params
    )
    model = FullyShardedDataParallel(model, device_mesh=rank.mesh, use_orig_params=use_orig_params)
    references = [reference, copy.deepcopy(reference)]  # of each pair: they differ in the expert
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, *references)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square_loss(step)(model, rank.rank).backward()
        for other in range(4):
            (square_loss(step)(references[other // 2], other) / 2).backward()
        for (name, one), two in zip(reference.named_parameters(), references[1].parameters(), strict=True):
            if not name.startswith("blocks.1."):
                one.grad = two.grad = (one.grad + two.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(model, references[pair], **CLOSE)


@on_ranks(2)
@both_modes
def test_modules_added_after_wrapping(rank: Rank, use_orig_params: bool) -> None:
    """An adapter that is put into a wrapped module later belongs to no unit: it computes, is saved, is not reduced."""
    model = wrapped(build(Stack), rank, use_orig_params=use_orig_params)
    reference = build(Stack)

    class Adapted(nn.Module):
        """A layer and an adapter beside it."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            torch.manual_seed(8)
            self.adapter = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.adapter(x)

    model.module.last, reference.last = Adapted(model.module.last), Adapted(reference.last)
    x = batch(rank.rank, 0, 4, 6)
    assert_equal(model(x), reference(x), "output")
    state = model.state_dict()
    assert set(state) == set(reference.state_dict())
    assert_equal(state["last.adapter.weight"], reference.last.adapter.weight.detach(), "adapter")
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    assert_close(model.module.last.adapter.weight.grad, reference.last.adapter.weight.grad, "gradient", **CLOSE)


@on_ranks(2)
@both_modes
def test_evaluation_in_another_order(rank: Rank, use_orig_params: bool) -> None:
    """Forwards without gradients that run other units neither hang, nor warn, nor change training."""
    reference = build(Stack)
    model = wrapped(reference, rank, use_orig_params=use_orig_params)
    for step in range(3):
        losses = train(model, rank, lambda _, step=step: square_loss(step), 1)
        expected = train_reference(reference, rank, lambda _, step=step: square_loss(step), 1)
        assert_close(losses, expected, "loss", **CLOSE)
        model.eval()
        with torch.no_grad():
            for run in ([2, 0], [1], []):
                x = batch(0, step, 4, 6)
                assert_close(model(x, run=run), reference(x, run=run), f"output {run}", **CLOSE)
        model.train()
    with record() as seen:
        square_loss(0)(model, rank.rank).backward()
    assert len({c.unit for c in seen if c.kind == "all_gather"}) in (1, 4)
