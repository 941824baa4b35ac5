"""A small model with everything that weights can be, in all the forms in which ranks hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullshard.ragged  # noqa: F401 # adds the layout
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank


class Block(nn.Module):
    """Layers of odd sizes, a scalar, and buffers: saved, of integers, and not saved."""

    offset: torch.Tensor
    calls: torch.Tensor
    cache: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.up, self.down = nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim, bias=False)
        self.register_buffer("offset", torch.randn(dim))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def reset_parameters(self) -> None:
        self.cache.fill_(7.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x + self.offset)))


class Net(nn.Module):
    """Two blocks between an embedding and a head that is tied to it; a frozen parameter that is not contiguous."""

    def __init__(self, dim: int = 6, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.mix = nn.Parameter(torch.randn(5, dim).t(), requires_grad=False)
        self.low = nn.Parameter(torch.randn(3, dim).bfloat16())
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.words(tokens))
        return self.head(x + (x @ self.mix).sum(-1, keepdim=True) + (x @ self.low.float().t()).sum(-1, keepdim=True))


def build(seed: int = 1, **sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


def _fully(rank: Rank, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh, **options)
    return fully_shard(model, mesh=rank.mesh, **options)


def _cut_elsewhere(rank: Rank, model: nn.Module) -> nn.Module:
    def place(parameter: nn.Parameter) -> Any:
        from torch.distributed.tensor import Shard

        return Shard(1) if parameter.dim() == 2 else None

    return _fully(rank, model, shard_placement_fn=place)


def _hybrid(rank: Rank, model: nn.Module) -> nn.Module:
    mesh = rank.make_mesh(2, rank.world_size // 2, names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _wrapped(rank: Rank, model: nn.Module, **options: Any) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), process_group=rank.group, **options)


FORMS: dict[str, Callable[[Rank, nn.Module], nn.Module]] = {
    "plain": lambda rank, model: model,
    "ddp": lambda rank, model: DistributedDataParallel(model, process_group=rank.group),
    "fully_shard": _fully,
    "one unit": lambda rank, model: fully_shard(model, mesh=rank.mesh),
    "columns": _cut_elsewhere,
    "ragged": lambda rank, model: fully_shard(model, mesh=rank.mesh, layout="ragged", granularity=2),
    "hybrid": _hybrid,
    "wrapper": _wrapped,
    "wrapper, original": lambda rank, model: _wrapped(rank, model, use_orig_params=True),
    "wrapper, replicated": lambda rank, model: _wrapped(rank, model, sharding_strategy=ShardingStrategy.NO_SHARD),
}


def form(name: str, rank: Rank, model: nn.Module) -> nn.Module:
    """``model`` in one of the forms; hybrid ones need an even number of ranks."""
    return FORMS[name](rank, model)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a plain model: what an export of it in any form has, tied parameters under each name."""
    return {name: value.detach().clone() for name, value in copy.deepcopy(model).state_dict().items()}
