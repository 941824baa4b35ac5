"""One model, sharded in every way there is, and what an unsharded copy of it holds."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fullshard.ragged  # noqa: F401 # adds the layout
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy, fully_shard, replicate
from ranks import Rank

Values = dict[str, Any]


class Model(nn.Module):
    """Uneven, tied, scalar, strided, half precision, frozen and tiny parameters, and buffers of all sorts."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.low = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("fleeting", torch.full((3,), 7.0), persistent=False)
        with torch.no_grad():
            for value in (*self.parameters(), self.norm.running_mean, self.norm.running_var):
                value.copy_(torch.rand(value.shape, generator=generator, device="cpu") + 0.5)
            self.counts += seed

    def reset_parameters(self) -> None:
        """Make what no file has."""
        self.fleeting.fill_(7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x) * self.scale + self.low.float().sum() * self.one + self.frozen.sum()
        x = x + self.conv(x.new_ones(1, 2, 4, 4)).mean()
        return self.head(x)


def _fully(rank: Rank, model: Model, *shape: int, **options: Any) -> nn.Module:
    mesh = rank.make_mesh(*shape, names=("replicate", "shard")) if shape else rank.mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _wrapped(rank: Rank, model: Model, **options: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, **options)
    return FSDP(model, **options)


def _mixture(rank: Rank, model: Model) -> nn.Module:
    fully_shard(model.blocks[0], mesh=rank.mesh)
    model.blocks[1] = FSDP(model.blocks[1], use_orig_params=True)
    return model


KINDS: dict[str, Callable[[Rank, Model], nn.Module]] = {
    "plain": lambda rank, model: model,
    "ddp": lambda rank, model: nn.parallel.DistributedDataParallel(model),
    "fully_shard": _fully,
    "columns": lambda rank, model: _fully(rank, model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None),
    "hybrid": lambda rank, model: _fully(rank, model, 2, rank.world_size // 2),
    "ragged": lambda rank, model: _fully(rank, model, layout="ragged"),
    "ragged rows": lambda rank, model: _fully(rank, model, 2, rank.world_size // 2, layout="ragged", granularity="row"),
    "replicate": lambda rank, model: replicate(model, mesh=rank.mesh),
    "flat": lambda rank, model: _wrapped(rank, model),
    "original": lambda rank, model: _wrapped(rank, model, use_orig_params=True),
    "whole": lambda rank, model: FSDP(model, use_orig_params=True),
    "no_shard": lambda rank, model: _wrapped(rank, model, sharding_strategy=ShardingStrategy.NO_SHARD),
    "low_buffers": lambda rank, model: _wrapped(
        rank, model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), use_orig_params=True
    ),
    "mixture": _mixture,
}


def build(rank: Rank, kind: str, seed: int = 0) -> nn.Module:
    """The model of that kind, with the values of ``Model(seed)``."""
    return KINDS[kind](rank, Model(seed))


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=lr, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Steps on batches that are equal on all ranks, so that all kinds compute the same. Returns the losses."""
    losses = []
    for step in range(first, last):
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reference(seed: int = 0) -> Values:
    """The state dict of the unsharded model."""
    return copy.deepcopy(Model(seed).state_dict())


def shared_folder(rank: Rank) -> Path:
    """A new folder that all ranks know."""
    names = [tempfile.mkdtemp(prefix="fullshard-test-") if rank.rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    assert names[0] is not None
    return Path(names[0])
