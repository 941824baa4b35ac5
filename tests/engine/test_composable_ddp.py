"""torch's composable DistributedDataParallel around sharded modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed._composable import replicate as ddp
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import fully_shard
from models import Stack
from pairwise import each_value
from ranks import Rank, on_ranks


@on_ranks(2)
@each_value(sharding=[fully_shard, fullshard.replicate], ddp_first=[False, True])
def test_around_sharded_blocks(rank: Rank, sharding: Any, ddp_first: bool) -> None:
    """It averages the gradients of what is not sharded, and leaves the sharded parameters alone."""
    torch.manual_seed(0)
    reference = Stack()
    model = copy.deepcopy(reference)
    if ddp_first:
        ddp(model)
    for block in model.blocks:
        sharding(block)
        checkpoint(block)  # which has an entry of its own in the same registry
    if not ddp_first:
        ddp(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False) for each in (model, reference)]
    for batch in torch.randn(2, 2, 5, 6):
        model(batch[rank.rank]).square().mean().backward()
        (sum(reference(part).square().mean() for part in batch) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor) == name.startswith("blocks"), name
        torch.testing.assert_close(p.full_tensor() if isinstance(p, DTensor) else p, q)


@on_ranks(2)
def test_on_a_sharded_module(rank: Rank) -> None:
    """It refuses what is sharded as a whole, as it does with torch's own."""
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        ddp(fully_shard(Stack()))
    copied = copy.deepcopy(fully_shard(Stack()))
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        ddp(copied)
