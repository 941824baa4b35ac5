"""Configurations that are run, and planned: the same functions build both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.models import GPT, Block, GPTShape, next_token_loss
from fullshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fullshard.activation_checkpoint import apply_activation_checkpointing
from fullshard.planning.cluster import Cluster
from fullshard.planning.dry_run import Step, dry_run
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
        tokens: Of a microbatch on a rank; 0: as is usual for the width.
        blocks_per_unit: Consecutive blocks that are one unit; 0: the whole model is one unit.
        blocks: Of the model; 0: as is usual for the width.
    """

    width: int
    ranks: int
    precision: str = "fp32"
    checkpoint: bool = False
    microbatches: int = 1
    replicas: int = 1
    front_end: str = COMPOSABLE
    tokens: int = 0
    blocks_per_unit: int = 1
    blocks: int = 0

    @property
    def shape(self) -> GPTShape:
        """Of the model and of a microbatch."""
        blocks, tokens = {512: (6, 256), 1024: (8, 64)}[self.width]
        return GPTShape(self.width, self.blocks or blocks, self.tokens or tokens)

    @property
    def name(self) -> str:
        """For tables."""
        return ", ".join(
            [f"{self.width}", self.precision, f"{self.ranks} ranks"]
            + ["recomputation"] * self.checkpoint
            + [f"{self.tokens} tokens"] * (self.tokens > 0)
            + [f"{self.blocks_per_unit or 'all'} blocks per unit"] * (self.blocks_per_unit != 1)
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
            blocks = [module for module in model.modules() if isinstance(module, Block)]
            for first in range(0, len(blocks) if self.blocks_per_unit else 0, max(1, self.blocks_per_unit)):
                unit = blocks[first : first + self.blocks_per_unit]
                fully_shard(unit if len(unit) > 1 else unit[0], **options)
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


TIMED_RANKS = (1, 2, 4)


def timed_cases(ranks: int) -> list[Case]:
    """Four ways to train on 1,024 tokens per rank and step."""
    return [
        Case(512, ranks, tokens=1024),
        Case(512, ranks, tokens=1024, checkpoint=True),
        Case(512, ranks, tokens=256, microbatches=4, blocks_per_unit=2),
        Case(512, ranks, tokens=512, microbatches=2, blocks_per_unit=0),
    ]


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


def plan_of(case: Case, cluster: Cluster, steps: int) -> Step:
    """Plan a case: the last of so many steps.

    Args:
        case: A configuration.
        cluster: The machine.
        steps: As many as a run makes, if its optimizer state or its order of units matters.
    """
    shape = case.shape
    tokens = torch.zeros(shape.tokens // shape.sequence, shape.sequence, dtype=torch.int64, device="meta")
    return dry_run(
        lambda: case.build("meta"),
        lambda model: next_token_loss(model, (tokens, tokens)),
        cluster=cluster,
        ranks=case.ranks,
        microbatches=case.microbatches,
        steps=steps,
    )
