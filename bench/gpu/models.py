"""What the parts train, and the systems that shard it: the same calls with the same options for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.contestants import FSDP2, FULLSHARD, UNSHARDED, distribute
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.wrap import ModuleWrapPolicy

PLAIN = UNSHARDED
SHARDED = (FSDP2, FULLSHARD)
SHAPES = {
    "tiny": GPTShape(width=64, blocks=3, tokens=64),
    "small": GPTShape(width=768, blocks=12, tokens=2048),
    "medium": GPTShape(width=1280, blocks=24, tokens=8192),
}


class Trainer:
    """One system's GPT, its optimizer and a batch, on the device."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]

    def __init__(self, system: str, shape: GPTShape, device: torch.device, dtype: str = "fp32") -> None:
        torch.manual_seed(0)
        with device:
            model = GPT(shape)
        self.model = distribute(system, model, Block, device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = batch_of(shape, 0, 0, device)

    def step(self) -> Tensor:
        """One step; the loss."""
        loss = next_token_loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(self, count: int) -> list[Tensor]:
        """The losses of so many steps."""
        return [self.step() for _ in range(count)]


class Perceptron(nn.Module):
    """A norm and a four times wider MLP, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def perceptrons(width: int, device: torch.device, ranks: int, **options: Any) -> nn.Module:
    """Four of them in units of fullshard, the same whenever it is called; by the wrapper if its flag is an option."""
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(Perceptron(width) for _ in range(4)))
    mesh = init_device_mesh(device.type, (ranks,))
    if "use_orig_params" in options:
        policy = ModuleWrapPolicy({Perceptron})
        return FullyShardedDataParallel(model, device_mesh=mesh, auto_wrap_policy=policy, **options)
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
