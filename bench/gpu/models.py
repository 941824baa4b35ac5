"""What the parts train, and the systems that shard it: the same calls with the same options for each."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.contestants import COMPOSABLE, FSDP2, FULLSHARD, UNSHARDED, shard_units
from bench.models import GPT, Block, GPTShape, batch_of, next_token_loss

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

    def __init__(self, system: str, shape: GPTShape, ranks: int, device: torch.device, dtype: str = "fp32") -> None:
        torch.manual_seed(0)
        with device:
            self.model = GPT(shape)
        if system != PLAIN:
            options: dict[str, Any] = {}
            if dtype == "bf16":
                policy = importlib.import_module(COMPOSABLE[system]).MixedPrecisionPolicy
                options["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            shard_units(system, self.model, Block, init_device_mesh(device.type, (ranks,)), **options)
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
