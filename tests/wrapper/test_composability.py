"""The wrapper beside, inside and around what else makes modules distributed, on groups of all sorts."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from wrapped import both_forms

from compare import assert_close, fqn_of
from front_ends import (
    CLOSE,
    assert_at_rest,
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    build,
    full_values,
    token_loss,
    train,
    train_reference,
    wrapped,
)
from fullshard import FullshardError, ShardingStrategy, fully_shard, replicate
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.comm import record
from models import Language, Stack, batch, reference_backward, square_loss
from ranks import Rank, on_ranks

S = ShardingStrategy


# -------------------------------------------------------------------- with the other front end


def with_wrapper(module: nn.Module, rank: Rank, strategy: S = S.FULL_SHARD, orig: bool = False) -> nn.Module:
    return FSDP(module, device_mesh=rank.mesh, sharding_strategy=strategy, use_orig_params=orig)


FRONT_ENDS: dict[str, Callable[..., nn.Module]] = {
    "wrapper": with_wrapper,
    "no_shard": functools.partial(with_wrapper, strategy=S.NO_SHARD),
    "grad_op": functools.partial(with_wrapper, strategy=S.SHARD_GRAD_OP),
    "fully_shard": lambda module, rank, **_: fully_shard(module, mesh=rank.mesh),
    "replicate": lambda module, rank, **_: replicate(module, mesh=rank.mesh),
    "plain": lambda module, rank, **_: module,
}


def nested(model: nn.Module, rank: Rank, outer: str, inner: str, **options: Any) -> nn.Module:
    """A copy of ``model``, its blocks in ``inner``, all of it in ``outer``."""
    model = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FRONT_ENDS[inner](block, rank, **options)
    return FRONT_ENDS[outer](model, rank, **options)


@on_ranks(2)
@pytest.mark.parametrize(
    ("outer", "inner", "orig"),
    [
        ("wrapper", "fully_shard", False),
        ("wrapper", "replicate", True),
        ("no_shard", "wrapper", False),
        ("grad_op", "fully_shard", True),
        ("fully_shard", "grad_op", False),
        ("plain", "wrapper", True),
    ],
)
def test_front_ends_inside_each_other(rank: Rank, outer: str, inner: str, orig: bool) -> None:
    """Each front end and strategy inside each other trains as an unsharded model, also with ``no_sync``."""
    reference = build(Stack)
    if outer == "plain":  # nobody reduces gradients of what is in no unit
        reference.first.requires_grad_(False)
        reference.last.requires_grad_(False)
    model = nested(reference, rank, outer, inner, orig=orig)
    assert_trains_alike(model, reference, rank)
    if outer == "plain":
        return
    with record() as seen:
        if outer == "fully_shard":
            model.set_requires_gradient_sync(False)
            square_loss(0)(model, rank.rank).backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                square_loss(0)(model, rank.rank).backward()
    assert not [c for c in seen if c.kind == "reduce_scatter"]
    square_loss(1)(model, rank.rank).backward()
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize(
    ("outer", "inner", "orig"), [("wrapper", "fully_shard", False), ("fully_shard", "wrapper", True)]
)
def test_alternating_front_ends(rank: Rank, outer: str, inner: str, orig: bool) -> None:
    """Three levels: a unit in a unit of the other kind in a root, with tied weights and recomputed activations."""
    reference = build(Language)
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        block.down = FRONT_ENDS[inner](block.down, rank, orig=orig)
        if index == 0:
            model.blocks[0] = FRONT_ENDS[outer](block, rank, orig=orig)
    model = FRONT_ENDS[outer](model, rank, orig=orig)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.LayerNorm))
    assert_trains_alike(model, reference, rank, token_loss)


@on_ranks(2)
def test_wrapping_what_is_sharded_is_refused(rank: Rank) -> None:
    """One module is a unit of one front end: all others raise, and leave the module as it was."""
    module = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
    with pytest.raises(ValueError, match=r"once|already"):
        with_wrapper(module, rank)
    wrapper = with_wrapper(nn.Linear(4, 4), rank)
    for again in ("wrapper", "fully_shard", "replicate"):
        with pytest.raises(ValueError, match=r"once|already"):
            FRONT_ENDS[again](wrapper, rank)
    for one in (module, wrapper):
        one(batch(rank.rank, 0, 2, 4)).sum().backward()
        assert_at_rest(one)
    reference = build(Stack)
    for inner in ("wrapper", "no_shard"):
        model = nested(reference, rank, "plain", inner)
        with pytest.raises(ValueError, match="replicate"):
            replicate(model, mesh=rank.mesh)
        assert type(model) is Stack
        assert_same_values(model, reference)
    assert_trains_alike(with_wrapper(model, rank), reference, rank)


# -------------------------------------------------------------------- DistributedDataParallel


def outer() -> nn.Sequential:
    """Layers around a model, and one that nobody is to shard."""
    layers = {"before": nn.Linear(6, 6), "tanh": nn.Tanh(), "inner": Stack(), "spared": nn.Linear(3, 3)}
    return nn.Sequential(OrderedDict(**layers, after=nn.Linear(3, 2)))


@on_ranks(2)
@both_forms
def test_ddp_around_and_inside_a_wrapper(rank: Rank, orig: bool) -> None:
    """DDP reduces what a wrapper inside of it ignores, and a wrapper ignores what DDP inside of it reduces."""
    reference = build(outer)
    model = copy.deepcopy(reference)
    spared = model.inner.blocks[1]
    left = {id(p) for p in spared.parameters()}
    model.inner = FSDP(model.inner, device_mesh=rank.mesh, ignored_modules=[spared], use_orig_params=orig)
    names = [n for n, p in model.named_parameters() if n.startswith("inner.") and id(p) not in left]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    inside = copy.deepcopy(reference)
    inside.before = DistributedDataParallel(inside.before)
    inside = FSDP(inside, device_mesh=rank.mesh, ignored_modules=[inside.before], use_orig_params=orig)
    expected = train_reference(reference, rank, square_loss, 4)
    assert_close(train(DistributedDataParallel(model), rank, square_loss, 4), expected, "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    assert_close(train(inside, rank, square_loss, 4), expected, "losses", **CLOSE)
    named = dict(reference.named_parameters())
    for name, value in full_values(inside).items():
        assert_close(value, named[name.replace("before.module", "before")].detach(), name, **CLOSE)


@on_ranks(2)
def test_ddp_that_is_not_told_is_refused(rank: Rank) -> None:
    """DDP that takes flat parameters for its own has overwritten shards: the first forward raises, on every rank."""
    model = build(outer)
    model.inner = wrapped(model.inner, rank)
    ddp = DistributedDataParallel(model)
    with pytest.raises(FullshardError, match="DistributedDataParallel"):
        ddp(batch(rank.rank, 0, 4, 6))


# -------------------------------------------------------------------- tensor parallelism


def cut_model() -> nn.Sequential:
    """Blocks whose layers tensor parallelism cuts, between two that it does not."""
    blocks = (nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3))


def assert_same_whole(values: dict[str, Any], reference: nn.Module) -> None:
    """Require values, maybe DTensors of tensor parallelism, to be the parameters of ``reference``."""
    for name, parameter in reference.named_parameters():
        value = values[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert_close(value.detach(), parameter.detach(), name, **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "strategy", "orig"),
    [
        ((2, 2), S.FULL_SHARD, False),
        ((2, 2), S.NO_SHARD, True),
        ((1, 2, 2), S.HYBRID_SHARD, True),
        ((2, 1, 2), S.HYBRID_SHARD, False),
    ],
)
def test_around_tensor_parallelism(rank: Rank, shape: tuple[int, ...], strategy: ShardingStrategy, orig: bool) -> None:
    """Parameters that are DTensors on the last axis of a mesh, sharded on the others, train as unsharded ones."""
    names = ("replicate", "shard", "tp")[-len(shape) :]
    mesh = rank.make_mesh(*shape, names=names)
    where = mesh[names[:-1]] if strategy.hybrid else mesh["shard"]
    reference = build(cut_model)
    model = copy.deepcopy(reference)
    options: dict[str, Any] = {"device_mesh": where, "use_orig_params": orig, "sharding_strategy": strategy}
    for index in (1, 2):
        parallelize_module(model[index], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if orig:
            model[index] = FSDP(model[index], **options)
    model = FSDP(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for step in range(2):
        square_loss(step)(model, rank.rank // 2).backward()
        reference_backward(reference, 2, square_loss(step))
        norm = model.clip_grad_norm_(0.05)
        assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05), "norm", **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(model, writeback=False):
        assert_same_whole({fqn_of(name): p for name, p in model.named_parameters()}, reference)
    state, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizers[0])["state"]
    assert list(state) == list(reference.state_dict())
    assert_same_whole(state, reference)
    for name, parameter in reference.named_parameters():
        expected = optimizers[1].state[parameter]["momentum_buffer"]
        assert_close(moments[name]["momentum_buffer"], expected, f"momentum of {name}", **CLOSE)


# -------------------------------------------------------------------- groups of ranks


@on_ranks(4)
def test_a_unit_on_a_group_of_its_own(rank: Rank) -> None:
    """A block sharded over pairs, as an expert is, is averaged over its pair; the rest over all ranks."""
    mesh = rank.make_mesh(2, 2, names=("expert", "data"))
    pair = rank.rank // 2
    reference = build(Stack)
    model = copy.deepcopy(reference)
    model.blocks[1] = FSDP(model.blocks[1], mesh["data"].get_group(), S.SHARD_GRAD_OP)
    model = FSDP(model, device_mesh=rank.mesh, use_orig_params=True)
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
