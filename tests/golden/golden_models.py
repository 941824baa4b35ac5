"""The models of the golden traces, their losses, and the ways in which they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from engine.packed_tensor import Adapted, RoundedWeight, with_cast_weights
from fullshard import FullyShardedDataParallel, fully_shard, replicate
from fullshard.wrap import ModuleWrapPolicy
from models import Block, Branch, Mlp, Stack, batch, tokens
from ranks import Rank

Shard = Callable[[nn.Module, Rank], nn.Module]
Loss = Callable[[nn.Module, Rank, int], torch.Tensor]


# ---------------------------------------------------------------- models


def frozen_block() -> nn.Module:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    return model


def frozen_biases() -> nn.Module:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    return model


def checkpointed(use_reentrant: bool, inside: bool = False) -> Callable[[], nn.Module]:
    """Blocks whose activations are recomputed: around the units, or ``inside`` of each."""

    def make() -> nn.Module:
        model = Stack()
        for part in model.blocks if inside else [model]:
            part.checkpointed = use_reentrant
        return model

    return make


def norms() -> nn.Module:
    """Large layers and norms in turn."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.LayerNorm(16), nn.Linear(16, 16))))


def embedding() -> nn.Module:
    """An embedding, whose backward does not read its parameters, and a layer."""
    return nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 13))


def adapters() -> nn.Module:
    """Frozen packed weights, with trainable factors beside them."""
    model = Mlp(6, 6, 6)
    model.layers = nn.ModuleList(Adapted(6, 6) for _ in range(2))
    return model


def rounded() -> nn.Module:
    """Trainable weights that are rounded for the gather."""
    return with_cast_weights(Mlp(6, 6, 6), RoundedWeight)


# ---------------------------------------------------------------- losses


def square(model: nn.Module, rank: Rank, step: int) -> torch.Tensor:
    width = 16 if isinstance(model, nn.Sequential) else 6
    return model(batch(rank.rank, step, 4, width)).float().square().mean()


def cross_entropy(model: nn.Module, rank: Rank, step: int) -> torch.Tensor:
    ids = tokens(rank.rank, step, 2, 5)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def by_rank(model: Branch, rank: Rank, step: int) -> torch.Tensor:
    """Which of two layers computes depends on the rank; a third never does."""
    model.rank = rank.rank
    return square(model, rank, step)


def running(*blocks: int) -> Loss:
    """The loss of a forward that runs the blocks with these numbers."""
    return lambda model, rank, step: model(batch(rank.rank, step, 4, 6), run=blocks).square().mean()


# ---------------------------------------------------------------- sharding


def mesh_of(rank: Rank, shape: Sequence[int]) -> DeviceMesh:
    """1-D over all ranks without a shape; otherwise (replicate, shard)."""
    return rank.make_mesh(*shape, names=("replicate", "shard")) if shape else rank.mesh


def parts(model: nn.Module) -> list[nn.Module]:
    """The blocks, layers or children of a model."""
    return list(getattr(model, "blocks", None) or getattr(model, "layers", None) or model.children())


def by_parts(*shape: int, **options: Any) -> Shard:
    """``fully_shard`` on each part, then on the root."""

    def shard(model: nn.Module, rank: Rank) -> nn.Module:
        for part in parts(model):
            fully_shard(part, mesh=mesh_of(rank, shape), **options)
        return fully_shard(model, mesh=mesh_of(rank, shape), **options)

    return shard


def root_only(model: nn.Module, rank: Rank) -> nn.Module:
    return fully_shard(model, mesh=rank.mesh)


def nested(model: nn.Module, rank: Rank) -> nn.Module:
    """Units within units: one layer of each block, the block, the root."""
    for block in model.blocks:
        fully_shard(block.up, mesh=rank.mesh)
    return by_parts()(model, rank)


def several(model: nn.Module, rank: Rank) -> nn.Module:
    """One unit of two blocks, one of the other block, and the root."""
    fully_shard(list(model.blocks[:2]), mesh=rank.mesh)
    fully_shard(model.blocks[2], mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def replicated(**options: Any) -> Shard:
    """``replicate`` on each part, then on the root."""

    def shard(model: nn.Module, rank: Rank) -> nn.Module:
        for part in parts(model):
            replicate(part, mesh=rank.mesh, **options)
        return replicate(model, mesh=rank.mesh, **options)

    return shard


def wrapped(*shape: int, **options: Any) -> Shard:
    """The wrapper, with a unit for each block (or layer)."""

    def shard(model: nn.Module, rank: Rank) -> nn.Module:
        policy = ModuleWrapPolicy({Block} if any(isinstance(m, Block) for m in model.modules()) else {nn.Linear})
        return FullyShardedDataParallel(
            model, device_mesh=mesh_of(rank, shape), **{"auto_wrap_policy": policy, **options}
        )

    return shard


# ---------------------------------------------------------------- communication of a user's own


class _Message:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)


class OwnGather(_Message, fullshard.AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=async_op)


class OwnScatter(_Message, fullshard.ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=async_op)
