"""Configurations that are run, and planned: the same functions build both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.models import GPT, Block, GPTShape
from fullshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.wrap import ModuleWrapPolicy

GLOO_RANKS, FAKE_RANKS = 2, 64
COMPOSABLE, FLAT = "fully_shard", "wrapper, flat"


@dataclass(frozen=True)
class Case:
    """A configuration.

    Args:
        width: Of the GPT.
        ranks: Two on gloo, or one of more on a fake group.
        precision: ``fp32``, or ``bf16`` with reductions in fp32.
        checkpoint: Whether blocks are recomputed.
        microbatches: Of a step.
        replicas: More than 1: HSDP.
        front_end: Which.
    """

    width: int
    ranks: int
    precision: str = "fp32"
    checkpoint: bool = False
    microbatches: int = 1
    replicas: int = 1
    front_end: str = COMPOSABLE

    @property
    def shape(self) -> GPTShape:
        """Of the model and of a microbatch."""
        blocks, tokens = {512: (6, 256), 1024: (8, 64)}[self.width]
        return GPTShape(self.width, blocks, tokens)

    @property
    def name(self) -> str:
        """For tables."""
        return ", ".join(
            [f"{self.width}", self.precision, f"{self.ranks} ranks"]
            + ["recomputation"] * self.checkpoint
            + [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
            + [f"{self.replicas} replicas"] * (self.replicas > 1)
            + [self.front_end] * (self.front_end != COMPOSABLE)
        )

    def mesh(self, device: str) -> DeviceMesh:
        """All ranks."""
        if self.replicas == 1:
            return init_device_mesh(device, (self.ranks,))
        shape = (self.replicas, self.ranks // self.replicas)
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def sharded(self, model: nn.Module, device: str) -> nn.Module:
        """Shard a model as the case says."""
        if self.checkpoint:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        half = self.precision == "bf16"
        if self.front_end == COMPOSABLE:
            options: dict[str, Any] = {"mesh": self.mesh(device)}
            if half:
                options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in [module for module in model.modules() if isinstance(module, Block)]:
                fully_shard(block, **options)
            return fully_shard(model, **options)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_mesh=self.mesh(device),
            sharding_strategy=ShardingStrategy.FULL_SHARD if self.replicas == 1 else ShardingStrategy.HYBRID_SHARD,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if half else None,
        )

    def build(self, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The sharded model on a device, and its optimizer."""
        with torch.device(device):
            model = GPT(self.shape)
        sharded = self.sharded(model, device)
        return sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-3)


def memory_cases() -> Iterator[Case]:
    """Forty."""
    for width in (512, 1024):
        for precision in ("fp32", "bf16"):
            for ranks in (GLOO_RANKS, FAKE_RANKS):
                yield Case(width, ranks, precision)
                yield Case(width, ranks, precision, checkpoint=True)
                yield Case(width, ranks, precision, microbatches=8)
                yield Case(width, ranks, precision, replicas=2)
                yield Case(width, ranks, precision, front_end=FLAT)
