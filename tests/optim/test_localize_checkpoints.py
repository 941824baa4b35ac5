"""Checkpoints of localised optimizers, and those of others, are interchangeable; the wrapper's optimizers, too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint import state_dict as torch_state_dict

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard
from fullshard.optim import localize
from fullshard.wrap import ModuleWrapPolicy
from ranks import Rank, on_ranks


class Part(nn.Module):
    """Small parameters of even and uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Part(), Part(), nn.Linear(5, 3))


def sharded(rank: Rank, seed: int = 0) -> nn.Module:
    model = model_of(seed)
    fully_shard(model[0], mesh=rank.mesh)
    return fully_shard(model, mesh=rank.mesh)


def wrapped(rank: Rank, orig: bool, seed: int = 0) -> nn.Module:
    policy = ModuleWrapPolicy({Part})
    return FSDP(model_of(seed), process_group=rank.group, auto_wrap_policy=policy, use_orig_params=orig)


def train(rank: Rank, model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step + rank.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [found for key in sorted(value) for found in tensors_in(value[key])]
    if isinstance(value, torch.Tensor):
        return [value._local_tensor if hasattr(value, "_local_tensor") else value.detach()]
    return []


def assert_same(one: tuple[nn.Module, optim.Optimizer], other: tuple[nn.Module, optim.Optimizer]) -> None:
    mine, theirs = ([*(p.detach() for p in m.parameters()), o.state_dict()["state"]] for m, o in (one, other))
    pairs = [*zip(*([t for value in found for t in tensors_in(value)] for found in (mine, theirs)), strict=True)]
    assert len(pairs) > 20
    assert all(torch.equal(a, b) for a, b in pairs)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("how", ["fullshard", "torch"])
def test_checkpoints_go_both_ways(rank: Rank, how: str, shared_folder: str) -> None:
    """What a localised optimizer saved an unlocalised one loads and goes on from to the same bits, and the reverse."""
    for number, (saver, loader) in enumerate([(localize, lambda o: o), (lambda o: o, localize)]):
        model = sharded(rank)
        optimizer = saver(adamw(model))
        train(rank, model, optimizer, 3)
        again = sharded(rank, seed=1)
        other = loader(adamw(again))
        if number:
            train(rank, again, other, 2)  # what it has of its own is written over
        if how == "fullshard":
            folder = f"{shared_folder}/{number}"
            fullshard.save(folder, model, optimizer)
            fullshard.load(folder, again, other)
        else:
            states = copy.deepcopy(torch_state_dict.get_state_dict(model, optimizer))
            torch_state_dict.set_state_dict(again, other, model_state_dict=states[0], optim_state_dict=states[1])
        assert_same((model, optimizer), (again, other))
        train(rank, model, optimizer, 2)
        train(rank, again, other, 2)
        assert_same((model, optimizer), (again, other))


@pytest.fixture
def shared_folder(tmp_path: Path) -> str:
    return str(tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_the_wrappers_parameters(rank: Rank, orig: bool) -> None:
    """Plain pieces are stepped to the same bits, in runs where there are several; state dicts are the same."""
    models = wrapped(rank, orig), wrapped(rank, orig)
    optimizers = localize(adamw(models[0])), adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(rank, model, optimizer, 3)
    counts = [len(tensor.members) for tensor in vars(optimizers[0])["_fullshard_local_step"]._plan.tensors]
    assert (max(counts) > 1) == orig
    states = [FSDP.optim_state_dict(m, o) for m, o in zip(models, optimizers, strict=True)]
    assert str(states[0]) == str(states[1])
    to_load = FSDP.optim_state_dict_to_load(models[0], optimizers[0], states[1])
    optimizers[0].load_state_dict(to_load)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(rank, model, optimizer, 2)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
