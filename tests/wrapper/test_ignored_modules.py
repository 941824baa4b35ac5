"""ignored_modules and ignored_states: what is neither sharded, moved, cast nor reduced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Block, Net, Snapshot, assert_trains_alike, batch, built, mean_square, units_of
from torch import nn

from compare import assert_close, assert_equal
from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from fullshard.comm import record
from fullshard.wrap import ModuleWrapPolicy
from pairwise import pairwise
from ranks import Rank, on_ranks

S = ShardingStrategy
BLOCKS = ModuleWrapPolicy({Block})
MODES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])

SPARE = "blocks.1."  # the part of the model that most tests leave alone
IGNORED: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "module": lambda m: {"ignored_modules": [m.blocks[1]]},
    "modules": lambda m: {"ignored_modules": {m.blocks[1], m.blocks[1].up}},
    "generator": lambda m: {"ignored_modules": (each for each in [m.blocks[1]])},
    "states": lambda m: {"ignored_states": [m.blocks[1]]},
    "parameters": lambda m: {"ignored_states": set(m.blocks[1].parameters())},
    "generated parameters": lambda m: {"ignored_states": m.blocks[1].parameters()},
}


def grads_on(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Of one rank's batch."""
    copied = copy.deepcopy(model)
    mean_square(copied, batch(rank, 0)).backward()
    return {name: p.grad for name, p in copied.named_parameters()}


def full_grads(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        return {name: p.grad.clone() for name, p in wrapped.named_parameters()}


@on_ranks(2)
@pairwise(kind=IGNORED, policy=[None, BLOCKS], use_orig_params=[False, True])
def test_ignored_parameters(rank: Rank, kind: str, policy: Any, use_orig_params: bool) -> None:
    """They stay the same objects, whole, with this rank's own gradients; the others are sharded and averaged."""
    model = built(Net)
    by_rank = [grads_on(model, r) for r in range(2)]
    spare = dict(model.blocks[1].named_parameters())
    values = {name: p.detach().clone() for name, p in spare.items()}
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, **IGNORED[kind](model)
    )
    inside = {id(p) for p in wrapped.parameters()}
    for name, parameter in spare.items():
        assert model.blocks[1].get_parameter(name) is parameter and id(parameter) in inside, name
        assert_equal(parameter.detach(), values[name], name)
    assert units_of(wrapped)[:2] == ["", "blocks.0"][: 1 + (policy is not None)]
    with record() as seen:
        mean_square(wrapped, batch(rank.rank, 0)).backward()
    most = sum(p.numel() for p in model.parameters()) * 2 + 64
    assert all(c.numel < most for c in seen)
    found = full_grads(wrapped)
    for name, gradient in found.items():
        mine, mean = by_rank[rank.rank][name], (by_rank[0][name] + by_rank[1][name]) / 2
        assert_close(gradient, mine if name.startswith(SPARE) else mean, name, 1e-5, 1e-7)
    state = wrapped.state_dict()
    assert state.keys() == built(Net).state_dict().keys()
    assert state[f"{SPARE}up.weight"].data_ptr() == spare["up.weight"].data_ptr()


@on_ranks(2)
def test_inherited_from_below(rank: Rank) -> None:
    """What a wrapper below ignores, those above ignore too, also where it is tied to one of their own modules."""
    model = built(Net)
    model.head = nn.Linear(6, 7)
    model.head.weight = model.blocks[0].up.weight
    shared, bias = model.head.weight, model.blocks[0].up.bias
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], ignored_states=[shared, bias])
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, use_orig_params=True)
    assert model.head.weight is shared and shared.shape == (7, 6) and bias.shape == (7,)
    with record() as seen:
        mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert shared.grad is not None and seen
    grads: list[Any] = [None, None]
    dist.all_gather_object(grads, shared.grad.cpu())
    assert not torch.equal(grads[0], grads[1])


@on_ranks(2)
def test_different_numbers_per_rank(rank: Rank) -> None:
    """Ranks may ignore different modules, as experts that each rank has of its own, if the rest is equal."""

    class Experts(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.net = Net()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.net(x)
            for expert in self.experts:
                x = x + expert(x)
            return x

    for policy in (None, BLOCKS):
        model = built(Experts, rank.rank + 1)
        wrapped = FullyShardedDataParallel(model, ignored_modules=model.experts, auto_wrap_policy=policy)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = mean_square(wrapped, batch(rank.rank, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert len(wrapped.state_dict()) == len(Net().state_dict()) + 2 * (rank.rank + 1)


@on_ranks(2)
@MODES
@pytest.mark.parametrize("front_end", ["wrapper", "fully_shard"])
def test_sharded_inside_ignored(rank: Rank, front_end: str, use_orig_params: bool) -> None:
    """A module below an ignored one may be sharded by hand: it still is, and is reduced; the ignored rest is not."""
    model = built(Net)
    by_rank = [grads_on(model, r) for r in range(2)]
    block = model.blocks[1]
    if front_end == "wrapper":
        block.up = FullyShardedDataParallel(block.up, use_orig_params=use_orig_params)
    else:
        fully_shard(block.up, mesh=rank.mesh)
    wrapped = FullyShardedDataParallel(model, ignored_modules=[block], use_orig_params=use_orig_params)
    mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert_close(block.down.weight.grad, by_rank[rank.rank][f"{SPARE}down.weight"], "ignored", 1e-5, 1e-7)
    for module, prefix in ((model.first, "first."), (getattr(block.up, "module", block.up), f"{SPARE}up.")):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            for name, p in module.named_parameters():
                mean = (by_rank[0][prefix + name] + by_rank[1][prefix + name]) / 2
                assert_close(p.grad, mean, prefix + name, 1e-5, 1e-7)


@on_ranks(2)
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_ignoring_everything(rank: Rank, argument: str) -> None:
    """Ignoring the module itself warns; nothing is sharded, and it still runs and trains on this rank alone."""
    model = built(Net)
    held = dict(model.named_parameters())
    expected = grads_on(model, rank.rank)
    with pytest.warns(UserWarning, match="ignored"):
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, **{argument: [model]})
    assert units_of(wrapped) == [""]
    with record() as seen:
        mean_square(wrapped, batch(rank.rank, 0)).backward()
    assert seen == []
    for name, parameter in model.named_parameters():
        assert parameter is held[name]
        assert_equal(parameter.grad, expected[name], name)
    assert list(wrapped.state_dict()) == list(built(Net).state_dict())


@on_ranks(2)
def test_elsewhere(rank: Rank) -> None:
    """What is ignored may lie outside of the module, as when one list serves several calls."""
    model = built(Net)
    reference = copy.deepcopy(model)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], ignored_modules=[nn.Linear(2, 2)])
    wrapped = FullyShardedDataParallel(model, ignored_states=list(nn.Linear(2, 2).parameters()))
    assert_trains_alike(wrapped, reference, rank)
    other = built(Net)
    other.blocks[0] = FullyShardedDataParallel(other.blocks[0], ignored_modules=[other.blocks[1]])
    FullyShardedDataParallel(other)
    assert other.blocks[1].up.weight.shape == (7, 6)  # those above ignore it as well


@on_ranks(2)
def test_nothing_is_cast_or_moved(rank: Rank) -> None:
    """Ignored modules compute in their own dtype, with their buffers; ranks keep their own values."""
    model = built(Net)
    spare = nn.BatchNorm1d(3)
    model.spare = spare
    with torch.no_grad():
        spare.weight.fill_(rank.rank + 1.0)
    FullyShardedDataParallel(
        model,
        ignored_modules=[spare],
        sync_module_states=True,
        mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16),
    )(batch(rank.rank, 0))
    assert spare.weight.dtype is torch.float32 is spare.running_mean.dtype
    assert_equal(spare.weight.detach(), torch.full((3,), rank.rank + 1.0), "weight")


def only_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


WRONG: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = {
    "both": (
        lambda m: {"ignored_modules": [m.first], "ignored_states": [m.head]},
        ValueError,
        "ignored_modules or ignored_states",
    ),
    "mixed": (
        lambda m: {"ignored_states": [m.first, m.head.weight]},
        ValueError,
        r"all parameters or all modules.*Linear.*Parameter",
    ),
    "parameters as modules": (
        lambda m: {"ignored_modules": only_parameters(m)},
        TypeError,
        "modules, found.*Parameter",
    ),
    "names": (lambda m: {"ignored_modules": ["first"]}, TypeError, "modules.*str"),
    "names of states": (lambda m: {"ignored_states": ["first.weight"]}, TypeError, "modules or parameters.*str"),
    "tensors": (lambda m: {"ignored_states": [torch.zeros(2)]}, TypeError, "modules or parameters.*Tensor"),
    "one module": (lambda m: {"ignored_modules": m.first}, TypeError, "a list.*Linear"),
    "one parameter": (lambda m: {"ignored_states": m.first.weight}, TypeError, "a list.*Parameter"),
    "number": (lambda m: {"ignored_modules": 3}, TypeError, "a list.*int"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(rank: Rank, name: str) -> None:
    """What cannot be ignored is named, and the module is left alone."""
    arguments, kind, match = WRONG[name]
    model = built(Net)
    before = Snapshot.of(model)
    for policy in (None, BLOCKS):
        with pytest.raises(kind, match=match):
            FullyShardedDataParallel(model, auto_wrap_policy=policy, **arguments(model))
        before.assert_unchanged(model)


@on_ranks(2)
def test_sharded_modules_cannot_be_ignored(rank: Rank) -> None:
    """Neither can modules of either front end."""
    model = built(Net)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    fully_shard(model.blocks[1], mesh=rank.mesh)
    for block in model.blocks:
        with pytest.raises(ValueError, match="not sharded"):
            FullyShardedDataParallel(model, ignored_modules=[block])


@on_ranks(2)
def test_empty_values(rank: Rank) -> None:
    """Empty lists, sets and generators ignore nothing."""
    nothing: list[Iterable[Any]] = [[], set(), iter(())]
    for value in nothing:
        for argument in ("ignored_modules", "ignored_states"):
            model = built(Net)
            reference = copy.deepcopy(model)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                wrapped = FullyShardedDataParallel(model, sharding_strategy=S.SHARD_GRAD_OP, **{argument: value})
            assert_trains_alike(wrapped, reference, rank, steps=1)
