"""The wrapper beside, inside and around what else makes modules distributed: right, or refused clearly."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from compare import assert_close, assert_equal, fqn_of
from front_ends import (
    CLOSE,
    assert_at_rest,
    assert_same_values,
    build,
    full_values,
    gathered,
    sgd,
    token_loss,
    train,
    train_reference,
    wrapped,
)
from fullshard import (
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.comm import record
from models import Language, LossOf, Stack, batch, reference_backward, square_loss
from pairwise import pairwise
from ranks import Rank, on_ranks

both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def assert_trains_right(
    model: nn.Module, reference: nn.Module, rank: Rank, loss_at: Callable[[int], LossOf] = square_loss
) -> None:
    """Four steps, a no_grad forward between them, and the values of the reference at the end."""
    losses = train(model, rank, loss_at, 2)
    with torch.no_grad():
        loss_at(9)(model, rank.rank)
    losses = torch.cat([losses, train(model, rank, loss_at, 2)])
    expected = torch.cat([train_reference(reference, rank, loss_at, 2) for _ in range(2)])
    assert_close(losses, expected, "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)
    assert gathered(model) == []


# -------------------------------------------------------------------- with the other front end

Wrap = Callable[..., nn.Module]


def with_wrapper(module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_mesh=rank.mesh, **options)


def with_fully_shard(module: nn.Module, rank: Rank, **_: Any) -> nn.Module:
    return fully_shard(module, mesh=rank.mesh)


def with_replicate(module: nn.Module, rank: Rank, **_: Any) -> nn.Module:
    return replicate(module, mesh=rank.mesh)


def without(module: nn.Module, rank: Rank, **_: Any) -> nn.Module:
    return module


FRONT_ENDS: dict[str, Wrap] = {
    "wrapper": with_wrapper,
    "no_shard": functools.partial(with_wrapper, sharding_strategy=ShardingStrategy.NO_SHARD),
    "grad_op": functools.partial(with_wrapper, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fully_shard": with_fully_shard,
    "replicate": with_replicate,
    "plain": without,
}
NESTINGS = [  # (around, inside, use_orig_params)
    ("wrapper", "fully_shard", False),
    ("wrapper", "fully_shard", True),
    ("fully_shard", "wrapper", False),
    ("fully_shard", "wrapper", True),
    ("wrapper", "replicate", False),
    ("wrapper", "no_shard", True),
    ("no_shard", "wrapper", False),
    ("grad_op", "fully_shard", True),
    ("fully_shard", "grad_op", False),
    ("no_shard", "replicate", True),
    ("no_shard", "fully_shard", False),
    ("plain", "wrapper", True),
]
OUTSIDE_AND_INSIDE = [("wrapper", "fully_shard", False), ("fully_shard", "wrapper", True)]


def nested(model: nn.Module, rank: Rank, outer: str, inner: str, **options: Any) -> nn.Module:
    """A copy of ``model``, its blocks in ``inner``, all of it in ``outer``."""
    model = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FRONT_ENDS[inner](block, rank, **options)
    return FRONT_ENDS[outer](model, rank, **options)


@on_ranks(2)
@pytest.mark.parametrize(("outer", "inner", "use_orig_params"), NESTINGS)
def test_front_ends_inside_each_other(rank: Rank, outer: str, inner: str, use_orig_params: bool) -> None:
    """Each front end and strategy inside each other trains as an unsharded model."""
    reference = build(Stack)
    if outer == "plain":  # nobody reduces gradients of what is in no unit
        reference.first.requires_grad_(False)
        reference.last.requires_grad_(False)
    model = nested(reference, rank, outer, inner, use_orig_params=use_orig_params)
    assert_trains_right(model, reference, rank)


@on_ranks(2)
@pytest.mark.parametrize(("outer", "inner", "use_orig_params"), OUTSIDE_AND_INSIDE)
def test_alternating_front_ends(rank: Rank, outer: str, inner: str, use_orig_params: bool) -> None:
    """Three levels: a unit in a unit of the other kind in a root, with tied weights and recomputed activations."""
    reference = build(Language)
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        block.down = FRONT_ENDS[inner](block.down, rank, use_orig_params=use_orig_params)
        if index == 0:
            model.blocks[0] = FRONT_ENDS[outer](block, rank, use_orig_params=use_orig_params)
    model = FRONT_ENDS[outer](model, rank, use_orig_params=use_orig_params)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.LayerNorm))
    assert_trains_right(model, reference, rank, token_loss)


@on_ranks(2)
def test_mixed_precision_in_both_front_ends(rank: Rank) -> None:
    """Wrappers in bfloat16 inside a ``fully_shard`` root in bfloat16 give the bits of the root's front end alone."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def trained(kind: str, **options: Any) -> tuple[nn.Module, torch.Tensor]:
        model = build(Stack)
        for index, block in enumerate(model.blocks):
            if kind == "fully_shard":
                fully_shard(block, mesh=rank.mesh, mp_policy=policy)
            else:
                precision = MixedPrecision(torch.bfloat16, torch.float32)
                model.blocks[index] = with_wrapper(block, rank, mixed_precision=precision, **options)
        fully_shard(model, mesh=rank.mesh, mp_policy=policy)
        return model, train(model, rank, square_loss, 4)

    expected, losses = trained("fully_shard")
    for use_orig_params in (False, True):
        model, found = trained("wrapper", use_orig_params=use_orig_params)
        assert_equal(found, losses, "losses")
        assert_same_values(model, expected)


@on_ranks(2)
@pytest.mark.parametrize(("outer", "inner", "use_orig_params"), OUTSIDE_AND_INSIDE)
def test_accumulation_over_both_front_ends(rank: Rank, outer: str, inner: str, use_orig_params: bool) -> None:
    """The root's way to accumulate without communication holds for units of the other kind."""
    reference = build(Stack)
    model = nested(reference, rank, outer, inner, use_orig_params=use_orig_params)
    with record() as seen:
        if outer == "wrapper":
            with model.no_sync():
                square_loss(0)(model, rank.rank).backward()
        else:
            model.set_requires_gradient_sync(False)
            square_loss(0)(model, rank.rank).backward()
            model.set_requires_gradient_sync(True)
    assert not [c for c in seen if c.kind == "reduce_scatter"]
    optimizer = sgd(model, 0.1)
    square_loss(1)(model, rank.rank).backward()
    optimizer.step()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        reference_backward(reference, rank.world_size, square_loss(step))
    theirs.step()
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
def test_wrapping_what_is_sharded_is_refused(rank: Rank) -> None:
    """One module is a unit of one front end: both orders raise, and leave the module as it was.

    ``replicate`` on a model with wrapped parts raises as on one with sharded parts, and changes nothing.
    """
    module = fully_shard(nn.Linear(4, 4), mesh=rank.mesh)
    with pytest.raises(ValueError, match=r"once|already"):
        with_wrapper(module, rank)
    wrapper = with_wrapper(nn.Linear(4, 4), rank)
    for again in (with_wrapper, with_fully_shard, with_replicate):
        with pytest.raises(ValueError, match=r"once|already"):
            again(wrapper, rank)
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
    assert_trains_right(with_wrapper(model, rank), reference, rank)


# -------------------------------------------------------------------- DistributedDataParallel


class Outer(nn.Module):
    """A: layers of its own around B, and C, which nobody is to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.spared, self.after = nn.Linear(6, 6), Stack(), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.spared(self.inner(torch.tanh(self.before(x)))))


@on_ranks(2)
@pytest.mark.parametrize(("use_orig_params", "ignores"), [(False, False), (True, False), (False, True)])
def test_ddp_around_a_wrapper(rank: Rank, use_orig_params: bool, ignores: bool) -> None:
    """DDP of a model with a wrapper inside, told to leave its parameters alone, trains as an unsharded model.

    DDP reduces what the wrapper ignores.
    """
    reference = build(Outer)
    model = copy.deepcopy(reference)
    spared = model.inner.blocks[1]
    ignored = [spared] if ignores else []
    left = {id(p) for module in ignored for p in module.parameters()}
    model.inner = FullyShardedDataParallel(
        model.inner, device_mesh=rank.mesh, ignored_modules=ignored, use_orig_params=use_orig_params
    )
    names = [n for n, p in model.named_parameters() if n.startswith("inner.") and id(p) not in left]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    assert not ignores or all(type(p) is nn.Parameter for p in spared.parameters())
    losses = train(ddp, rank, square_loss, 4)
    assert_close(losses, train_reference(reference, rank, square_loss, 4), "losses", **CLOSE)
    assert_same_values(model, reference, **CLOSE)


@on_ranks(2)
def test_ddp_that_is_not_told_is_refused(rank: Rank) -> None:
    """DDP that takes flat parameters for its own has overwritten shards: the first forward raises, on every rank."""
    model = build(Outer)
    model.inner = wrapped(model.inner, rank)
    ddp = DistributedDataParallel(model)
    with pytest.raises(FullshardError, match="DistributedDataParallel"):
        ddp(batch(rank.rank, 0, 4, 6))


@on_ranks(2)
@both_modes
def test_a_wrapper_ignores_what_ddp_reduces(rank: Rank, use_orig_params: bool) -> None:
    """A wrapper around a model of which DDP reduces one part."""
    reference = build(Outer)
    model = copy.deepcopy(reference)
    model.before = DistributedDataParallel(model.before)
    model = FullyShardedDataParallel(
        model, device_mesh=rank.mesh, ignored_modules=[model.before], use_orig_params=use_orig_params
    )
    losses = train(model, rank, square_loss, 4)
    assert_close(losses, train_reference(reference, rank, square_loss, 4), "losses", **CLOSE)
    for name, value in full_values(model).items():
        expected = dict(reference.named_parameters())[name.replace("before.module", "before")]
        assert_close(value, expected.detach(), name, **CLOSE)


# -------------------------------------------------------------------- tensor parallelism


class Parallel(nn.Module):
    """Blocks whose layers tensor parallelism cuts, between two that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def tensor_parallel(model: nn.Module, rank: Rank) -> tuple[nn.Module, Any]:
    """A copy cut over the second axis of a (2, 2) mesh, and the first axis, to shard over."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    model = copy.deepcopy(model)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, mesh["dp"]


def assert_same_whole(values: dict[str, Any], reference: nn.Module) -> None:
    """Require values, maybe DTensors of tensor parallelism, to be the parameters of ``reference``."""
    for name, parameter in reference.named_parameters():
        value = values[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert_close(value.detach(), parameter.detach(), name, **CLOSE)


@on_ranks(4)
@pairwise(
    nested_units=[True, False], strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], use_orig_params=[False, True]
)
def test_tensor_parallelism(rank: Rank, nested_units: bool, strategy: str, use_orig_params: bool) -> None:
    """Parameters that are DTensors on the other axis of a (2, 2) mesh train as unsharded ones."""
    reference = build(Parallel)
    model, mesh = tensor_parallel(reference, rank)
    options: dict[str, Any] = {
        "device_mesh": mesh,
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    if nested_units:
        for index, layer in enumerate(model.layers):
            model.layers[index] = FullyShardedDataParallel(layer, **options)
    model = FullyShardedDataParallel(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        number = mesh.get_local_rank()
        loss = square_loss(step)(model, number)
        loss.backward()
        for other in range(2):
            expected = square_loss(step)(reference, other)
            (expected / 2).backward()
            if other == number:
                assert_close(loss.detach(), expected.detach(), f"loss {step}", **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        assert_same_whole({fqn_of(name): p for name, p in model.named_parameters()}, reference)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    assert_same_whole(state, reference)


@on_ranks(4)
@pytest.mark.parametrize(("shape", "use_orig_params"), [((1, 2, 2), True), ((2, 1, 2), True), ((2, 2, 1), False)])
def test_hybrid_around_tensor_parallelism(rank: Rank, shape: tuple[int, int, int], use_orig_params: bool) -> None:
    """Two axes of a mesh replicate and shard what the third one cuts."""
    mesh = rank.make_mesh(*shape, names=("replicate", "shard", "tp"))
    reference = build(Parallel)
    model = copy.deepcopy(reference)
    for index, layer in enumerate(model.layers):
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model.layers[index] = layer
    model = FullyShardedDataParallel(
        model,
        device_mesh=mesh["replicate", "shard"],
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=use_orig_params,
    )
    batches = shape[0] * shape[1]
    number = rank.rank // shape[2]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        square_loss(step)(model, number).backward()
        reference_backward(reference, batches, square_loss(step))
        norm = model.clip_grad_norm_(0.05)
        assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05), "norm", **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        assert_same_whole({fqn_of(name): p for name, p in model.named_parameters()}, reference)


@on_ranks(4)
@both_modes
def test_tensor_parallelism_in_mixed_precision(rank: Rank, use_orig_params: bool) -> None:
    """Wrapped DTensors compute in bfloat16 and accumulate over microbatches as those of ``fully_shard`` do."""
    models = []
    for kind in ("wrapper", "fully_shard"):
        model, mesh = tensor_parallel(build(Parallel), rank)
        if kind == "wrapper":
            precision = MixedPrecision(torch.bfloat16, torch.float32)
            options: dict[str, Any] = {"mixed_precision": precision, "use_orig_params": use_orig_params}
            models.append(FullyShardedDataParallel(model, device_mesh=mesh, **options))
        else:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            models.append(fully_shard(model, mesh=mesh, mp_policy=policy))
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
        for step in range(4):
            loss = square_loss(step)(model, rank.rank // 2)
            loss.backward()
            losses.append(loss.detach())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(losses[:4], losses[4:], "losses")
