"""Write the checkpoints that test_stored.py loads: small, of every kind of parameter, by both front ends on two ranks.

    PYTHONPATH=src:tests python tests/checkpoint/stored/write.py FOLDER NAME

adds ``FOLDER/NAME/fully_shard``, ``FOLDER/NAME/flat`` and ``FOLDER/NAME/torch``, each with what it holds in
``expected.safetensors``: whole tensors, unsharded without the code under test. Checkpoints are added for each new
format; those that are there stay as they are.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fullshard
from checkpoint.kinds import train
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import StateDictType, fully_shard

EXTRAS = {"step": 3, "position": {"file": "a.txt", "seen": [1, 2.5, None]}, "small": torch.arange(3)}


class StoredModel(nn.Module):
    """Uneven, tied, scalar, strided, half-precision and frozen parameters, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))])
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.low = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("counts", torch.arange(4) + seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x * self.scale + self.low.float().sum() + self.frozen.sum()
        return self.head(x + self.conv(x.new_ones(1, 2, 4, 4)).mean())


def shard(kind: str, seed: int) -> nn.Module:
    """Return the model of a front end: ``plain``, ``fully_shard``, ``flat`` or ``original``."""
    model = StoredModel(seed)
    if kind == "fully_shard":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif kind in ("flat", "original"):
        original = kind == "original"
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FSDP(block, use_orig_params=original)
        return FSDP(model, use_orig_params=original)
    return model


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW on the trained parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, betas=(0.8, 0.9), foreach=False)


def whole(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return model and AdamW state as whole tensors, by name: from DTensors, or by summoning parameters."""
    if kind in ("flat", "original"):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            weights = model.state_dict()
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    else:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        weights = model.state_dict()
        state = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
    found = {f"model.{name}": value for name, value in weights.items()}
    found |= {f"{name}.{key}": value for name, values in state.items() for key, value in values.items()}
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.detach().cpu().contiguous().clone() for name, value in full.items()}


def _write(rank: int, folder: Path, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for kind in ("fully_shard", "flat", "torch"):
        model = shard("fully_shard" if kind == "torch" else kind, 1)
        optimizer = adamw(model, 0.01)
        train(model, optimizer, 0, 3)
        if kind == "torch":
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder / kind)
        else:
            fullshard.save(folder / kind, model, optimizer, **EXTRAS)
        expected = whole(kind, model, optimizer)
        if rank == 0:
            save_file(expected, folder / kind / "expected.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (Path(sys.argv[1]) / sys.argv[2], f"{scratch}/meeting")
        torch.multiprocessing.spawn(_write, arguments, nprocs=2)
