"""``ShardedTensor``, torch's sharded tensors before DTensor, which some of its functions still return.

``torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict``, with which Lightning reads optimizers from
sharded checkpoints, is one of them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

__all__ = ["ShardedTensor", "gather_sharded_tensor"]


def gather_sharded_tensor(value: ShardedTensor) -> torch.Tensor:
    """All-gather a ShardedTensor on every rank of its group: one collective.

    Args:
        value: A sharded tensor with any number of shards per rank.

    Returns:
        The full tensor, on the device that its group communicates on.
    """
    group, metadata = value._process_group, value.metadata()
    device = dist.distributed_c10d._get_pg_default_device(group)
    regions: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(dist.get_world_size(group))]
    for shard in metadata.shards_metadata:
        owner = shard.placement.rank()  # type: ignore[union-attr]
        assert owner is not None
        regions[dist.get_group_rank(group, owner)].append((list(shard.shard_offsets), list(shard.shard_sizes)))
    local_shards = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    most = max(sum(math.prod(sizes) for _, sizes in owned) for owned in regions)
    local = torch.zeros(most, dtype=value.dtype, device=device)
    if regions[dist.get_rank(group)]:
        parts = [
            local_shards[tuple(offsets)].detach().to(device).reshape(-1) for offsets, _ in regions[dist.get_rank(group)]
        ]
        torch.cat(parts, out=local[: sum(part.numel() for part in parts)])
    received = [torch.empty_like(local) for _ in regions]
    dist.all_gather(received, local, group=group)
    full = torch.empty(metadata.size, dtype=value.dtype, device=device)
    for owned, sent in zip(regions, received, strict=True):
        at = 0
        for offsets, sizes in owned:
            region = full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            region.copy_(sent[at : at + region.numel()].view(sizes))
            at += region.numel()
    return full
