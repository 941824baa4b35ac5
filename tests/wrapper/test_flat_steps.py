"""What steps of wrapped models send, what stays afterwards, and units of little or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from wrapper_models import (
    adam,
    assert_at_rest,
    assert_like,
    assert_trains_alike,
    backward,
    units,
    with_reference,
    wrap,
)

from compare import assert_close
from fullshard import FlatParameter, ShardingStrategy
from fullshard.comm import record
from fullshard.engine.ownership import nested_units
from models import Mlp, Stack, batch, square_loss, tiny_units
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
STRATEGIES = pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
BLOCKS = ["blocks.0", "blocks.1"]


# -------------------------------------------------------------------- what is sent


@on_ranks(2)
@BOTH
def test_collectives_of_a_step(rank: Rank, original: bool) -> None:
    """One gather per unit and direction, in backward not of the root and of what ran last; one reduction per unit with
    the presence numbers behind.
    """
    with tiny_units():
        model = wrap(Stack(2), rank, BLOCKS, use_orig_params=original)
    root, block = 68, 162  # 36, 6 + 2, 18 + 2, 3 + 1 and 72, 12, 72, 6
    for step in range(3):
        with record() as forward:
            loss = square_loss(step)(model, rank.rank)
        with record() as backward_:
            loss.backward()
        assert [(c.kind, c.unit, c.numel) for c in forward] == [
            ("all_gather", "", root),
            ("all_gather", "blocks.0", block),
            ("all_gather", "blocks.1", block),
        ]
        gathers = [(c.unit, c.numel) for c in backward_ if c.kind == "all_gather"]
        assert gathers == [("blocks.0", block)]
        reductions = [(c.unit, c.numel) for c in backward_ if c.kind == "reduce_scatter"]
        assert reductions == [
            (unit, numel)
            for unit, size in (("blocks.1", block), ("blocks.0", block), ("", root))
            for numel in (size, 8)
        ]
        assert len(forward) + len(backward_) == len(forward) + len(gathers) + len(reductions)


@on_ranks(2)
@BOTH
@STRATEGIES
def test_collectives_of_strategies(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """FULL_SHARD gathers again in backward what did not run last, SHARD_GRAD_OP nothing, NO_SHARD all-reduces only."""
    with tiny_units():
        model = wrap(Stack(2), rank, BLOCKS, use_orig_params=original, sharding_strategy=strategy)
    for step in range(2):
        with record() as forward:
            loss = square_loss(step)(model, rank.rank)
        with record() as backward_:
            loss.backward()
        every = ["", "blocks.0", "blocks.1"]
        if strategy is ShardingStrategy.NO_SHARD:
            assert forward == [] and {c.kind for c in backward_} == {"all_reduce"}
            assert sorted(units(backward_, "all_reduce")) == every
            continue
        assert units(forward, "all_gather") == every and units(forward, "reduce_scatter") == []
        again = ["blocks.0"] if strategy is ShardingStrategy.FULL_SHARD else []
        assert units(backward_, "all_gather") == again
        assert units(backward_, "reduce_scatter") == ["blocks.1", "blocks.0", ""]


@on_ranks(2)
@BOTH
def test_nothing_is_sent_by_looking(rank: Rank, original: bool) -> None:
    """Parameters, names, optimizers and clearing gradients need no communication."""
    model = wrap(Stack(2), rank, BLOCKS, use_orig_params=original)
    square_loss()(model, rank.rank).backward()
    with record() as seen:
        optimizer = adam(model.parameters())
        optimizer.step()
        model.zero_grad()
        list(model.named_parameters())
        model.train()
        model.eval()
    assert seen == []


# -------------------------------------------------------------------- what stays


@on_ranks(2, 4)
@BOTH
@STRATEGIES
def test_nothing_stays_allocated(rank: Rank, original: bool, strategy: ShardingStrategy) -> None:
    """At rest a rank has its slices, gradients of their size, and memory for nothing else."""
    model = wrap(Stack(2), rank, BLOCKS, use_orig_params=original, sharding_strategy=strategy)
    whole = sum(p.numel() for p in Stack(2).parameters())
    for step in range(2):
        square_loss(step)(model, rank.rank).backward()
        assert_at_rest(model)
        for unit in nested_units(model):
            for parameter in unit.parameters:
                assert parameter.unsharded.grad is None
                if strategy is not ShardingStrategy.NO_SHARD:
                    assert parameter.unsharded.untyped_storage().nbytes() == 0
            for bucket in unit.buckets:
                assert all(plan.message.allocated_bytes == 0 for plan in bucket.plans)
        held = sum(bucket.shard_buffer.numel() for unit in nested_units(model) for bucket in unit.buckets)
        ranks = 1 if strategy is ShardingStrategy.NO_SHARD else rank.world_size
        assert held <= -(-whole // ranks) + 3 * (12 + rank.world_size)  # padding: up to 3 elements per parameter
        assert sum(p.grad.numel() for p in model.parameters() if p.grad is not None) <= held


@on_ranks(2)
@BOTH
def test_forward_without_grad_keeps_nothing(rank: Rank, original: bool) -> None:
    """After a forward without grad nothing is gathered, whatever the strategy keeps for backward."""
    model = wrap(Stack(2), rank, BLOCKS, use_orig_params=original, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(batch(0, 0, 4, 6))
        assert_at_rest(model)


# -------------------------------------------------------------------- units of little or nothing


class Odd(nn.Module):
    """Modules without parameters, with empty ones, and with one element, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Tanh()
        self.empty = nn.ParameterDict({"empty": nn.Parameter(torch.empty(0, 6))})
        self.one = nn.Linear(1, 1, bias=False)
        self.body = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.none(self.body(x))
        x = torch.cat([x, x @ self.empty["empty"].t()], dim=1)
        return self.one(x.reshape(-1, 1)).view_as(x)


@on_ranks(2, 3)
@BOTH
@pytest.mark.parametrize("wrapped", [["none", "one"], ["none", "one", "body"]], ids=["some", "all"])
def test_units_of_nothing(rank: Rank, original: bool, wrapped: list[str]) -> None:
    """Units without parameters, or with fewer elements than ranks, run and train."""
    model, reference = with_reference(Odd(), rank, wrapped, use_orig_params=original)
    assert list(model.module.none.parameters()) == []
    assert_trains_alike(model, reference, rank)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert model.state_dict()["empty.empty"].shape == (0, 6)


@on_ranks(2)
@BOTH
def test_root_without_own_parameters(rank: Rank, original: bool) -> None:
    """A root all of whose parameters are in units below has no parameter of its own, and still is the root."""
    model, reference = with_reference(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), rank, ["0", "1"])
    assert model.check_is_root() and not model[0].check_is_root()
    assert len(list(model.parameters())) == 2 and all(isinstance(p, FlatParameter) for p in model.parameters())
    assert_trains_alike(model, reference, rank)


@on_ranks(2)
@BOTH
def test_nothing_to_wrap(rank: Rank, original: bool) -> None:
    """A model without parameters runs."""
    model = wrap(nn.Sequential(nn.Tanh(), nn.Dropout(0.0)), rank, use_orig_params=original)
    assert list(model.parameters()) == []
    inputs = batch(0, 0, 2, 3).requires_grad_()
    model(inputs).sum().backward()
    assert_close(inputs.grad, 1 - torch.tanh(inputs.detach()) ** 2, "gradient", 1e-5)
    assert dict(model.state_dict()) == {}


@on_ranks(2)
@BOTH
def test_everything_ignored(rank: Rank, original: bool) -> None:
    """If all is ignored, parameters are left as they are: not sharded and not reduced."""
    plain = Mlp(6, 5, 3)
    before = dict(plain.named_parameters())
    model = wrap(plain, rank, use_orig_params=original, ignored_states=list(plain.parameters()))
    with record() as seen:
        square_loss()(model, rank.rank).backward()
    assert seen == []
    assert all(plain.get_parameter(name) is p and p.grad.shape == p.shape for name, p in before.items())


@on_ranks(3, 4)
@BOTH
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("dims", [(7, 5, 17), (1, 1, 2)], ids=str)
def test_sizes_that_ranks_do_not_divide(
    rank: Rank, original: bool, strategy: ShardingStrategy, dims: tuple[int, ...]
) -> None:
    """Uneven sizes over three and four ranks, fewer elements than ranks included."""
    model, reference = with_reference(
        Mlp(*dims), rank, ["layers.0", "layers.1"], use_orig_params=original, sharding_strategy=strategy
    )
    assert_trains_alike(model, reference, rank, loss=lambda step: square_loss(step, 4, dims[0]))
    assert_at_rest(model)


@on_ranks(2)
@BOTH
def test_gradients_are_those_of_the_mean_bit_by_bit(rank: Rank, original: bool) -> None:
    """Over two ranks gradients are exactly the mean of the ranks' gradients."""
    model, reference = with_reference(Stack(2), rank, BLOCKS, use_orig_params=original)
    for step in range(2):
        backward(model, reference, rank, square_loss(step))
        assert_like(model, reference, grads=True)
