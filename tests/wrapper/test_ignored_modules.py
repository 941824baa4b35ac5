"""ignored_modules and ignored_states: what is neither sharded, moved, cast nor reduced.

What happens to ignored parameters in training is tested for all front ends in tests/training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wrapped import BLOCKS, Net, Snapshot, backward, both_forms, built, loss_at, train, units_of

from compare import assert_close, assert_equal
from front_ends import full_gradients
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, fully_shard
from fullshard.comm import record
from ranks import Rank, on_ranks

SPARE = "blocks.1."  # the part of the model that most tests leave alone
IGNORED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "module": lambda m: {"ignored_modules": [m.blocks[1]]},
    "modules": lambda m: {"ignored_modules": {m.blocks[1], m.blocks[1].up}},
    "generator": lambda m: {"ignored_modules": (each for each in [m.blocks[1]])},
    "states": lambda m: {"ignored_states": [m.blocks[1]]},
    "parameters": lambda m: {"ignored_states": set(m.blocks[1].parameters())},
    "generated parameters": lambda m: {"ignored_states": m.blocks[1].parameters()},
}


def gradients_on(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Of one rank's batch."""
    copied = copy.deepcopy(model)
    loss_at()(copied, rank).backward()
    return {name: p.grad for name, p in copied.named_parameters()}


@on_ranks(2)
def test_ways_to_ignore(rank: Rank) -> None:
    """What is ignored stays the same objects, whole, with this rank's own gradients; the others are averaged."""
    by_rank = [gradients_on(built(), r) for r in range(2)]
    for number, arguments in enumerate(IGNORED.values()):
        model = built()
        spare = dict(model.blocks[1].named_parameters())
        values = {name: p.detach().clone() for name, p in spare.items()}
        orig, policy = number % 2 == 1, None if number % 3 else BLOCKS
        wrapped = FSDP(model, auto_wrap_policy=policy, use_orig_params=orig, **arguments(model))
        assert units_of(wrapped)[:2] == (["", "blocks.0"] if policy else [""])
        for name, parameter in spare.items():
            assert getattr(model.blocks[1], "module", model.blocks[1]).get_parameter(name) is parameter, name
            assert_equal(parameter.detach(), values[name], name)
        backward(rank, wrapped)
        for name, gradient in full_gradients(wrapped).items():
            mine, mean = by_rank[rank.rank][name], (by_rank[0][name] + by_rank[1][name]) / 2
            assert_close(gradient, mine if name.startswith(SPARE) else mean, name, 1e-5, 1e-7)


@on_ranks(2)
def test_inherited_from_below(rank: Rank) -> None:
    """What a wrapper below ignores, those above ignore too, where it is tied to one of their modules, or their own."""
    model = built()
    model.spare, model.head = nn.Linear(2, 2), nn.Linear(5, 9)
    model.head.weight = model.blocks[0].up.weight
    shared, bias, spare = model.head.weight, model.blocks[0].up.bias, model.spare.weight
    model.blocks[0] = FSDP(model.blocks[0], ignored_states=[shared, bias])
    model.blocks[1] = FSDP(model.blocks[1], ignored_states=[spare])
    wrapped = FSDP(model, auto_wrap_policy=BLOCKS, use_orig_params=True)
    assert model.head.weight is shared and shared.shape == (9, 5) and bias.shape == (9,)
    assert model.spare.weight is spare and spare.shape == (2, 2)
    backward(rank, wrapped)
    gradients: list[Any] = [None, None]
    dist.all_gather_object(gradients, shared.grad.cpu())
    assert not torch.equal(*gradients)


@on_ranks(2)
def test_different_numbers_per_rank(rank: Rank) -> None:
    """Ranks may ignore different modules, as experts that each rank has of its own, if the rest is equal."""
    model = built(lambda: nn.Sequential(Net(), *(nn.Linear(3, 3) for _ in range(rank.rank + 1))))
    wrapped = FSDP(model, ignored_modules=list(model[1:]), auto_wrap_policy=BLOCKS)
    with torch.no_grad():
        before = loss_at()(wrapped, rank.rank)
    for _ in range(3):
        train(rank, wrapped)
    assert loss_at()(wrapped, rank.rank) < before
    assert len(wrapped.state_dict()) == len(Net().state_dict()) + 2 * (rank.rank + 1)


@on_ranks(2)
@both_forms
def test_sharded_inside_ignored(rank: Rank, orig: bool) -> None:
    """A module below an ignored one may be sharded by hand: it still is, and is reduced; the ignored rest is not."""
    model = built()
    by_rank = [gradients_on(model, r) for r in range(2)]
    block = model.blocks[1]
    if orig:
        block.up = FSDP(block.up, use_orig_params=True)
    else:
        fully_shard(block.up, mesh=rank.mesh)
    wrapped = FSDP(model, ignored_modules=[block], use_orig_params=orig)
    backward(rank, wrapped)
    found = full_gradients(wrapped)
    assert_close(found[f"{SPARE}down.weight"], by_rank[rank.rank][f"{SPARE}down.weight"], "ignored", 1e-5, 1e-7)
    for name in ("first.weight", f"{SPARE}up.weight", f"{SPARE}up.bias"):
        assert_close(found[name], (by_rank[0][name] + by_rank[1][name]) / 2, name, 1e-5, 1e-7)


@on_ranks(2)
def test_ignoring_everything(rank: Rank) -> None:
    """Ignoring the module itself warns; nothing is sharded or sent, and it still runs."""
    model = built()
    held = list(model.parameters())
    with pytest.warns(UserWarning, match="ignored"):
        wrapped = FSDP(model, auto_wrap_policy=BLOCKS, ignored_states=[model])
    with record() as seen:
        backward(rank, wrapped)
    assert seen == [] and units_of(wrapped) == [""]
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))


@on_ranks(2)
def test_nothing_is_cast_or_moved(rank: Rank) -> None:
    """Ignored modules, which may be others than the model's, keep their dtypes, buffers and each rank's values."""
    model = built()
    model.spare = spare = nn.BatchNorm1d(3)
    with torch.no_grad():
        spare.weight.fill_(rank.rank + 1.0)
    wrapped = FSDP(
        model,
        ignored_modules=[spare, nn.Linear(2, 2)],
        sync_module_states=True,
        mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16),
    )
    backward(rank, wrapped)
    assert spare.weight.dtype is torch.float32 is spare.running_mean.dtype
    assert_equal(spare.weight.detach(), torch.full((3,), rank.rank + 1.0), "weight")


WRONG: list[tuple[Callable[[Any], dict[str, Any]], type[Exception], str]] = [
    (
        lambda m: {"ignored_modules": [m.first], "ignored_states": [m.last]},
        ValueError,
        "ignored_modules or ignored_states",
    ),
    (
        lambda m: {"ignored_states": [m.first, m.last.weight]},
        ValueError,
        r"all parameters or all modules.*Linear.*Parameter",
    ),
    (lambda m: {"ignored_modules": [*m.parameters()]}, TypeError, "expected Module, found a Parameter"),
    (lambda m: {"ignored_modules": ["first"]}, TypeError, "expected Module, found a str"),
    (lambda m: {"ignored_states": ["first.weight"]}, TypeError, "expected Module or Parameter, found a str"),
    (lambda m: {"ignored_states": [torch.zeros(2)]}, TypeError, "expected Module or Parameter, found a Tensor"),
    (lambda m: {"ignored_modules": m.first}, TypeError, "an iterable.*Linear"),
    (lambda m: {"ignored_states": m.first.weight}, TypeError, "an iterable.*Parameter"),
    (lambda m: {"ignored_modules": 3}, TypeError, "an iterable.*int"),
]


@on_ranks(2)
def test_wrong_values(rank: Rank) -> None:
    """What cannot be ignored, sharded modules too, is named, and the module left alone. Empty lists ignore nothing."""
    model = built()
    before = Snapshot.of(model)
    for arguments, kind, match in WRONG:
        for policy in (None, BLOCKS):
            with pytest.raises(kind, match=match):
                FSDP(model, auto_wrap_policy=policy, **arguments(model))
            before.assert_unchanged(model)
    model.blocks[0] = FSDP(model.blocks[0], ignored_modules=iter(()), ignored_states=None)
    fully_shard(model.blocks[1], mesh=rank.mesh)
    for block in model.blocks:
        with pytest.raises(ValueError, match="not sharded"):
            FSDP(model, ignored_modules=[block])
    backward(rank, FSDP(model, ignored_states=[]))
