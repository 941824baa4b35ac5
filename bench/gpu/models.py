"""What the parts train, and the systems that shard it: the same calls with the same options for each."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.contestants import FSDP2, FULLSHARD, UNSHARDED, distribute
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
        return [self.step() for _ in range(count)]
