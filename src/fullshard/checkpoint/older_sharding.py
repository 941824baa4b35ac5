"""``ShardedTensor``: torch's sharded tensors before DTensor, which some of its functions make to this day.

``torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict``, with which Lightning reads optimizers from
sharded checkpoints, is one of them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

__all__ = ["ShardedTensor", "gathered"]


def gathered(value: ShardedTensor) -> torch.Tensor:
    """All of a sharded tensor, on every rank of its group: one collective.

    Args:
        value: Cut into boxes, any number per rank.

    Returns:
        What it holds, with its shape and dtype, on the device that its group communicates on.
    """
    group, metadata = value._process_group, value.metadata()
    device = dist.distributed_c10d._get_pg_default_device(group)
    boxes: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(dist.get_world_size(group))]
    for shard in metadata.shards_metadata:
        owner = shard.placement.rank()  # type: ignore[union-attr]
        assert owner is not None
        boxes[dist.get_group_rank(group, owner)].append((list(shard.shard_offsets), list(shard.shard_sizes)))
    mine = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    longest = max(sum(math.prod(sizes) for _, sizes in owned) for owned in boxes)
    own = torch.zeros(longest, dtype=value.dtype, device=device)
    if boxes[dist.get_rank(group)]:
        parts = [mine[tuple(offsets)].detach().to(device).reshape(-1) for offsets, _ in boxes[dist.get_rank(group)]]
        torch.cat(parts, out=own[: sum(part.numel() for part in parts)])
    received = [torch.empty_like(own) for _ in boxes]
    dist.all_gather(received, own, group=group)
    whole = torch.empty(metadata.size, dtype=value.dtype, device=device)
    for owned, sent in zip(boxes, received, strict=True):
        at = 0
        for offsets, sizes in owned:
            box = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            box.copy_(sent[at : at + box.numel()].view(sizes))
            at += box.numel()
    return whole
