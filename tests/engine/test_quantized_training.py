"""Quantized communication: what models compute with, what becomes of gradients, and what stays exact."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packed_tensor import Adapted
from torch import nn
from user_collectives import Gather

from compare import assert_close, assert_equal, assert_models_equal
from front_ends import COMPOSABLE, assert_trains_alike, full, sharded_with_reference
from fullshard import (
    CPUOffloadPolicy,
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
    unsharded,
)
from fullshard.checkpoint import full_tensors
from fullshard.comm import Collective, record
from fullshard.comm_hooks import DefaultState, reduce_scatter_hook
from fullshard.policy import CommQuantization
from fullshard.wrap import ModuleWrapPolicy
from models import Block, Branch, Stack, batch, reference_backward, shard_blocks, square_loss
from ranks import Rank, on_ranks

BLOCK = 16
DIM = 9  # neither two nor four ranks divide it
INT8 = CommQuantization(all_gather="int8", reduce="int8", block=BLOCK, min_bytes=100)
REPLICAS = CommQuantization(reduce="int8", block=BLOCK, min_bytes=100)
LOSS = square_loss(0, 4, DIM)


def build() -> Stack:
    torch.manual_seed(3)
    return Stack(2, DIM)


def is_large(parameter: torch.Tensor) -> bool:
    """Whether :data:`INT8` quantizes it."""
    return parameter.nbytes >= INT8.min_bytes


def quantized(values: torch.Tensor, name: str, block: int) -> torch.Tensor:
    """What quantized communication makes of flat values, written as plainly as possible."""
    limit = 127 if name == "int8" else 448
    blocks = []
    for part in values.to(torch.float32).split(block):
        scale = part.abs().max() / limit
        codes = part / scale if scale >= 2**-126 else torch.zeros_like(part)
        codes = codes.round() if name == "int8" else codes.to(torch.float8_e4m3fn).to(torch.float32)
        blocks.append(codes * scale)
    return torch.cat(blocks).to(values.dtype)


def by_rows(full: torch.Tensor, ranks: int, own: int | None = None, name: str = "int8") -> torch.Tensor:
    """``full`` with every rank's rows quantized, but for those of rank ``own``."""
    chunks = torch.chunk(full, ranks)
    return torch.cat([c if r == own else quantized(c.flatten(), name, BLOCK).view_as(c) for r, c in enumerate(chunks)])


def unsharded_in_forward(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded parameters in one forward."""
    with unsharded(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_on_all_ranks(tensor: torch.Tensor, rank: Rank, what: str) -> None:
    found = [torch.empty_like(tensor) for _ in range(rank.world_size)]
    dist.all_gather(found, tensor.contiguous())
    for other in found:
        assert_equal(other, tensor, what)


@on_ranks(2)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_full_parameters(rank: Rank, name: Any) -> None:
    """Large parameters are every rank's rows quantized, the same bits on all; small ones, and shards, are exact."""
    reference = build()
    model = shard_blocks(copy.deepcopy(reference), rank)
    model.set_comm_quantization(CommQuantization(all_gather=name, block=BLOCK, min_bytes=100))
    for fqn, held in unsharded_in_forward(model).items():
        exact = reference.get_parameter(fqn).detach()
        expected = by_rows(exact, rank.world_size, name=name) if is_large(exact) else exact
        assert_close(held, expected, fqn, rtol=1e-6, atol=1e-7)
        assert torch.equal(held, exact) != is_large(exact), fqn
        assert_on_all_ranks(held, rank, fqn)
    assert_models_equal(model, reference)


@on_ranks(2, 4)
def test_gradients(rank: Rank) -> None:
    """Those of the quantized model; each rank adds its own part exactly to the quantized ones of the others."""
    world, hybrid = rank.world_size, rank.world_size == 4
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard")) if hybrid else rank.mesh
    reference = build()
    model = copy.deepcopy(reference)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    model.set_comm_quantization(INT8, REPLICAS if hybrid else None)
    with torch.no_grad():
        for parameter in reference.parameters():
            if is_large(parameter):
                parameter.copy_(by_rows(parameter, 2))
    own = []
    for sender in range(world):
        reference.zero_grad()
        LOSS(reference, sender).backward()
        own.append({name: p.grad for name, p in reference.named_parameters()})
    with record() as seen:
        LOSS(model, rank.rank).backward()
    assert {c.dtype for c in seen if c.kind == "all_reduce"} == ({torch.int8} if hybrid else set())
    for name, parameter in model.named_parameters():
        parts = [own[sender][name] for sender in range(world)]
        found = full(parameter.grad)
        assert_on_all_ranks(found, rank, name)
        if not hybrid:
            chunks = [by_rows(part, world, own=r) for r, part in enumerate(parts)] if is_large(parts[0]) else parts
            assert_close(found, sum(chunks) / world, name, rtol=1e-4, atol=2e-6)
        steps = 3 if hybrid else sum(part.abs().max() for part in parts) / max(part.abs().max() for part in parts) / 2
        bound = steps * max(part.abs().max() for part in parts) / 254 if is_large(parts[0]) else 0.0
        assert (found - sum(parts) / world).abs().max() <= 1.01 * bound + 1e-6, name
    (LOSS(model, rank.rank) * (math.inf if rank.rank == 1 else 1.0)).backward()
    # An inf in one rank's loss makes gradients of all ranks not finite, so that a scaler skips the step.
    assert not full(model.blocks[0].up.weight.grad).isfinite().any()


def train_closely(
    model: Any, reference: nn.Module, rank: Rank, syncs: Sequence[bool] = (True,), steps: int = 3
) -> list[Collective]:
    """Train both with SGD, the model with a backward for each of ``syncs``; the collectives of the last backward."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(steps):
        for sync in syncs:
            with record() as seen, contextlib.nullcontext() if sync else COMPOSABLE.no_sync(model):
                square_loss(step, 4, DIM)(model, rank.rank).backward()
            reference_backward(reference, rank.world_size, square_loss(step, 4, DIM))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Require weights to be as near as quantized communication leaves them after a few steps."""
    assert (found.to(expected.device) - expected).abs().max() < 0.02 * expected.abs().max() + 0.01


@on_ranks(2)
@pytest.mark.parametrize("case", ["bf16", "offload", "no_sync", "replicas", "int reshard"])
def test_modes(rank: Rank, case: str) -> None:
    """Each mode trains close to an unsharded model, and quantization is active."""
    options: dict[str, Any] = {
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "replicas": {"mesh": rank.make_mesh(2, 1, names=("replicate", "shard"))},
        "int reshard": {"reshard_after_forward": 1},
    }.get(case, {})
    model, reference = sharded_with_reference(COMPOSABLE, rank, build(), **options)
    model.set_comm_quantization(INT8, REPLICAS)
    train_closely(model, reference, rank, (False, True) if case == "no_sync" else (True,))
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_on_all_ranks(full(found).detach(), rank, name)
        assert_near(full(found), expected)
    report = model.comm_quantization_report()
    assert report.active and report.ratio < (1.0 if case == "bf16" else 0.8), str(report)


@on_ranks(2)
@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1)], ids=["shard", "replicate"])
def test_gradients_of_some_ranks_only(rank: Rank, mesh_shape: tuple[int, int]) -> None:
    """Whether there is a gradient is not quantized away, however large others are and small the block of numbers."""
    torch.manual_seed(0)
    model = Branch()
    model.rank = rank.rank
    fully_shard(model, mesh=rank.make_mesh(*mesh_shape, names=("replicate", "shard")))
    every = CommQuantization(reduce="int8", block=BLOCK, min_bytes=0)
    model.set_comm_quantization(every, every)
    (1e6 * model(batch(rank.rank, 0, 4, 6)).square().mean()).backward()
    assert model.even.weight.grad is not None and model.odd.weight.grad is not None
    assert model.never.weight.grad is None
    for layer in (model.even, model.odd):
        gradient = full(layer.weight.grad)
        assert_on_all_ranks(gradient, rank, "gradient")
        assert gradient.abs().max() > 0


@on_ranks(2)
def test_wrapper(rank: Rank) -> None:
    """Slices are quantized; what it summons, saves and loads is exact all the same."""
    reference = build()
    model = FullyShardedDataParallel(copy.deepcopy(reference), auto_wrap_policy=ModuleWrapPolicy({Block}))
    model.set_comm_quantization(INT8)
    seen = train_closely(model, reference, rank, steps=2)
    assert {c.dtype for c in seen if c.kind == "all_gather"} == {torch.int8}
    assert {c.dtype for c in seen if c.kind == "reduce_scatter"} == {torch.int8, torch.float32}  # who has gradients
    report = model.comm_quantization_report()
    assert report.active and report.ratio < 0.4
    with record() as seen, FullyShardedDataParallel.summon_full_params(model, writeback=False):
        summoned = [parameter.detach().clone() for parameter in model.module.parameters()]
    assert {c.dtype for c in seen} == {torch.float32}
    assert model.comm_quantization_report() == report, "exact all-gathers are not counted"
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    for found, saved, expected in zip(summoned, state.values(), reference.parameters(), strict=True):
        assert_equal(saved, found, "saved")
        assert_near(found, expected)
    with pytest.raises(ValueError, match="quantized communication is enabled"):
        model.register_comm_hook(DefaultState(rank.group), reduce_scatter_hook)
    model.set_comm_quantization()
    model.register_comm_hook(DefaultState(rank.group), reduce_scatter_hook)
    with pytest.raises(ValueError, match="has a communication hook"):
        model.set_comm_quantization(INT8)


@on_ranks(2)
def test_what_leaves_the_model_is_exact(rank: Rank) -> None:
    """Exports and state dicts have the very values, before, between and after quantized forwards."""
    reference = build()
    model = shard_blocks(copy.deepcopy(reference), rank)
    model.set_comm_quantization(INT8)
    for _ in range(2):
        exported = dict(full_tensors(model))
        for name, expected in reference.named_parameters():
            assert_equal(exported[name], expected.detach(), name)
        LOSS(model, rank.rank)
        with torch.no_grad():
            LOSS(model, rank.rank)
    model.reshard()
    assert_models_equal(model, reference)
    for name, value in full_tensors(model):
        assert_equal(value, reference.get_parameter(name).detach(), name)
        LOSS(model, rank.rank)


@on_ranks(2)
def test_subclasses_are_not_quantized(rank: Rank) -> None:
    """What a tensor subclass sends is not quantized, whatever its size; other parameters are."""
    torch.manual_seed(5)
    model = Adapted(8, 64)
    expected, seen = model.weight.unpacked(), []
    model.down.register_forward_pre_hook(lambda *_: seen.append(model.weight.unpacked().clone()))
    fully_shard(model, mesh=rank.mesh)
    model.set_comm_quantization(CommQuantization(all_gather="int8", reduce="int8", block=BLOCK, min_bytes=0))
    with record() as sent:
        model(batch(rank.rank, 0, 3, 8)).sum().backward()
    assert_equal(seen[0], expected, "packed")
    assert {c.kind for c in sent if c.dtype is torch.int8} == {"all_gather", "reduce_scatter"}  # of the adapters


@on_ranks(2)
def test_switched_on_and_off(rank: Rank) -> None:
    """It may change between steps, optimizers go on, and without arguments all is exact again; or for one unit."""
    reference = build()
    model = shard_blocks(copy.deepcopy(reference), rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dtypes = []
    for arguments in ({}, {"shard": INT8}, {"shard": CommQuantization(reduce="int8", min_bytes=100)}, {}):
        model.set_comm_quantization(**arguments)
        with record() as seen:
            LOSS(model, rank.rank).backward()
        dtypes.append(
            [torch.int8 in {c.dtype for c in seen if c.kind == kind} for kind in ("all_gather", "reduce_scatter")]
        )
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == [[False, False], [True, True], [False, True], [False, False]]
    values = dict(full_tensors(model))
    for name, held in unsharded_in_forward(model).items():
        assert_equal(held, values[name], name)
    report = model.comm_quantization_report()
    assert not report.active and "nothing was communicated" in str(report)
    model.blocks[0].set_comm_quantization(INT8, recurse=False)
    twin = copy.deepcopy(model)  # which counts bytes of its own
    with record() as seen:
        LOSS(twin, rank.rank).backward()
    assert {c.unit for c in seen if c.dtype is torch.int8} == {"blocks.0"}
    active = [each.comm_quantization_report().active for each in (twin, twin.blocks[0], twin.blocks[1], model)]
    assert active == [True, True, False, False]


@on_ranks(2)
def test_report(rank: Rank) -> None:
    """Bytes are those that were recorded, and full ones those of the same step in full precision."""
    model = shard_blocks(build(), rank)
    with record() as plain:
        LOSS(model, rank.rank).backward()
    model.set_comm_quantization(INT8)
    with record() as seen:
        LOSS(model, rank.rank).backward()
    report = model.comm_quantization_report()
    assert [(t.axis, t.kind) for t in report.traffic] == [("shard", "all_gather"), ("shard", "reduce_scatter")]
    for traffic in report.traffic:
        assert traffic.nbytes == sum(c.nbytes for c in seen if c.kind == traffic.kind)
        assert traffic.full_bytes == sum(c.nbytes for c in plain if c.kind == traffic.kind)
        assert traffic.collectives == sum(c.kind == traffic.kind for c in seen)
    assert report.ratio == report.nbytes / report.full_bytes < 0.6
    assert all(0 < traffic.quantized_bytes <= traffic.full_bytes for traffic in report.traffic)
    assert "shard      all_gather" in str(report)

    # q / 8 + s / k bytes per value: for large even parameters nothing else is sent.
    even = fully_shard(nn.Linear(128, 256, bias=False), mesh=rank.mesh)
    even.set_comm_quantization(CommQuantization(all_gather="fp8", reduce="int8", block=64))
    even(torch.ones(2, 128)).sum().backward()
    kinds = {t.kind: t for t in even.comm_quantization_report().traffic}
    values = 128 * 256 // 2
    assert (kinds["all_gather"].nbytes, kinds["all_gather"].full_bytes) == (values * (1 + 4 / 64), values * 4)
    assert abs(kinds["reduce_scatter"].nbytes - values * (1 + 4 / 64)) < 200  # and who has gradients


@on_ranks(2)
def test_refusals(rank: Rank) -> None:
    """What cannot be together says so on all ranks, and leaves the model as it was."""
    model = shard_blocks(build(), rank)
    LOSS(model, rank.rank)  # units have names now
    model.blocks[1].set_custom_all_gather(Gather())
    with pytest.raises(ValueError, match=r"unit 'blocks\.1' has custom collectives"):
        model.set_comm_quantization(INT8)
    assert not model.comm_quantization_report().active
    model.blocks[1].set_custom_all_gather(None)
    model.set_comm_quantization(INT8)
    with pytest.raises(ValueError, match="has quantized communication"):
        model.blocks[1].set_custom_all_gather(Gather())
    with pytest.raises(FullshardError, match="in the middle of a step"), unsharded(model):
        model.set_comm_quantization()
    LOSS(model, rank.rank).backward()
    assert model.comm_quantization_report().active


@on_ranks(1)
def test_one_rank(rank: Rank) -> None:
    """Alone there is nothing to send: the values are exact and the report says so."""
    model, reference = sharded_with_reference(COMPOSABLE, rank, build())
    for quantization in (None, INT8):
        model.set_comm_quantization(quantization)
        assert_trains_alike(model, reference, rank, lambda _: LOSS, steps=2, rtol=1e-6, atol=1e-7)
    report = model.comm_quantization_report()
    assert not report.active and report.ratio == 1.0 and not report.traffic
