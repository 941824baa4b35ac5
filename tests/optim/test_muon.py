"""Muon on sharded parameters: the bits of ``torch.optim.Muon`` on whole ones."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from compare import assert_close, assert_equal
from front_ends import assert_same_values
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard
from fullshard.optim import Muon, orthogonalize
from models import Mlp
from ranks import Rank, on_ranks

STEPS = 4
SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"lr": torch.tensor(0.02), "ns_steps": 3, "momentum": 0.5, "ns_coefficients": (2.0, -1.5, 0.5)},
]


def build() -> tuple[Mlp, Mlp]:
    """Matrices wide and tall, of sizes that no number of ranks divides, one with fewer rows than ranks; a reference."""
    torch.manual_seed(0)
    model = Mlp(6, 13, 10, 3, 7)
    return model, copy.deepcopy(model)


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights, by name: Muon's share."""
    return [(name, p) for name, p in model.named_parameters() if name.endswith("weight")]


def backward(model: nn.Module, step: int) -> None:
    """The same batch on all ranks: the mean of equal gradients has their bits."""
    torch.manual_seed(100 + step)
    model(torch.randn(4, 6)).square().mean().backward()


def assert_same_steps(model: nn.Module, reference: nn.Module, settings: dict[str, Any], **options: Any) -> Muon:
    """Both train some steps; all bits of all parameters are the same."""
    mine = Muon(matrices(model), **settings, **options)
    theirs = torch.optim.Muon([p for _, p in matrices(reference)], **settings)
    for step in range(STEPS):
        for net, optimizer in ((model, mine), (reference, theirs)):
            backward(net, step)
            optimizer.step()
            net.zero_grad()
    assert_same_values(model, reference)
    return mine


@on_ranks(1, 2)
def test_rows(rank: Rank) -> None:
    """``fully_shard`` on one axis, in one round, and in rounds of single matrices."""
    for round_bytes, settings in zip((64 * 1024 * 1024, 1, 1), SETTINGS, strict=True):
        model, reference = build()
        fully_shard(model.layers[1])
        fully_shard(model)
        mine = assert_same_steps(model, reference, settings, round_bytes=round_bytes)
        assert all(type(value["momentum_buffer"]) is DTensor for value in mine.state.values())
        if rank.world_size == 2:  # where one rank owns the largest matrix, the other one the three others
            assert len(mine.plan().rounds) == (1 if round_bytes > 1 else 3)


@on_ranks(4)
def test_columns_and_replicas(rank: Rank) -> None:
    """``Shard(1)``, even and uneven. Replicas compute the same, without communication."""
    model, reference = build()
    mesh = rank.make_mesh(2, 2, names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    mine = assert_same_steps(model, reference, SETTINGS[0])
    assert {len(exchanged.shard_group.ranks) for exchanged in mine.plan().rounds} == {2}


@on_ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name)
def test_wrapper(rank: Rank, strategy: ShardingStrategy) -> None:
    """The wrapper's ranges of rows, which end anywhere, and its replicated parameters."""
    model, reference = build()
    model.layers[1] = FSDP(model.layers[1], use_orig_params=True, sharding_strategy=strategy)
    assert_same_steps(FSDP(model, use_orig_params=True, sharding_strategy=strategy), reference, SETTINGS[0])


@on_ranks(4)
def test_beside_tensor_parallelism(rank: Rank) -> None:
    """Parts on two axes, strided ones among them: one owner among all four ranks."""
    mesh = rank.make_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.Linear(12, 5, bias=False))
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    mine, theirs = Muon(model.named_parameters()), torch.optim.Muon(reference.parameters())
    for step in range(3):
        torch.manual_seed(step)
        for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(sharded, DTensor)
            whole.grad = torch.randn_like(whole)
            spread = DTensor.from_local(whole.grad, sharded.device_mesh, [Replicate()] * 2, run_check=False)
            sharded.grad = spread.redistribute(placements=sharded.placements)
        mine.step()
        theirs.step()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert_equal(sharded.full_tensor(), whole.detach(), "parameter")
    assert [len(exchanged.shard_group.ranks) for exchanged in mine.plan().rounds] == [4]


@on_ranks(2)
def test_low_precision(rank: Rank) -> None:
    """bf16 parameters, with momentum in bf16, as torch's; without Nesterov torch normalizes its own momentum there."""
    model, reference = build()
    fully_shard(model.bfloat16())
    reference.bfloat16()
    mine, theirs = Muon(matrices(model)), torch.optim.Muon([p for _, p in matrices(reference)])
    for net, optimizer in ((model, mine), (reference, theirs)):
        torch.manual_seed(1)
        net(torch.randn(4, 6).bfloat16()).square().mean().backward()
        optimizer.step()
    assert_same_values(model, reference)


def test_alone() -> None:
    """Without any process group, on plain parameters, which may change their groups and freeze."""
    model, reference = build()
    assert_same_steps(model, reference, SETTINGS[1])
    model.layers[1].weight.requires_grad_(False)
    optimizer = Muon([model.layers[0].weight])
    optimizer.add_param_group({"params": [model.layers[1].weight], "lr": 0.5})
    before = model.layers[1].weight.clone()
    backward(model, 0)
    optimizer.step(closure=lambda: torch.tensor(1.0))
    assert_equal(model.layers[1].weight, before, "frozen")
    copied = copy.deepcopy(optimizer)
    assert pickle.loads(pickle.dumps(optimizer)).comm_dtype is torch.bfloat16
    assert copied.round_bytes == optimizer.round_bytes


@on_ranks(2)
def test_checkpoints(rank: Rank, tmp_path: Path) -> None:
    """State goes to an unsharded ``torch.optim.Muon`` and back through a checkpoint."""
    model, reference = build()
    fully_shard(model)
    mine = assert_same_steps(model, reference, SETTINGS[1])
    fullshard.save(tmp_path, model=model, optimizer=mine)
    plain, _ = build()
    theirs = torch.optim.Muon([p for _, p in matrices(plain)], **SETTINGS[1])
    fullshard.load(tmp_path, model=plain, optimizer=theirs)
    assert mine.param_groups[0].keys() >= theirs.param_groups[0].keys()
    for (name, sharded), (_, whole) in zip(matrices(model), matrices(plain), strict=True):
        buffer = mine.state[sharded]["momentum_buffer"]
        assert_equal(buffer.full_tensor(), theirs.state[whole]["momentum_buffer"], name)
    other, _ = build()
    fully_shard(other)
    again = Muon([p for _, p in matrices(other)], **SETTINGS[1])
    fullshard.load(tmp_path, model=other, optimizer=again)
    for net, optimizer in ((plain, theirs), (other, again)):
        backward(net, 77)
        optimizer.step()
    assert_same_values(other, plain)


def test_orthogonalize() -> None:
    """Singular values end near 1, vectors stay; a batch is its matrices; the argument stays as it is."""
    torch.manual_seed(0)
    for shape in ((20, 30), (30, 20)):
        batch = torch.randn(3, *shape)
        before = batch.clone()
        together = orthogonalize(batch)
        assert_equal(batch, before, "argument")
        assert together.dtype is torch.bfloat16 and together.shape == batch.shape
        for one, matrix in zip(together, batch, strict=True):
            assert_close(orthogonalize(matrix).float(), one.float(), "batched", rtol=0.05, atol=0.02)
            u, _, v = torch.linalg.svd(matrix, full_matrices=False)
            inner = u.T @ one.float() @ v.T
            assert float(inner.diagonal().min()) > 0.6 and float(inner.diagonal().max()) < 1.3
            assert float((inner - inner.diagonal().diag()).abs().max()) < 0.1
            in_fp32 = orthogonalize(matrix, dtype=torch.float32)
            assert in_fp32.dtype is torch.float32
            assert_close(in_fp32, one.float(), "fp32", rtol=0.05, atol=0.02)
    assert_equal(orthogonalize(torch.zeros(2, 3)), torch.zeros(2, 3).bfloat16(), "zeros")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr: expected"),
        ({"lr": torch.zeros(2)}, "one element"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"comm_dtype": torch.int8}, "comm_dtype"),
        ({"ns_dtype": torch.int8}, "ns_dtype"),
        ({"round_bytes": 0}, "round_bytes"),
    ],
)
def test_wrong_numbers(wrong: dict[str, Any], message: str) -> None:
    """Numbers out of range are refused with their names."""
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.zeros(2, 2))], **wrong)
