"""Gather a tensor of which each rank holds one range of elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import broadcast, wait_tensor

__all__ = ["gather_ranges"]


def gather_ranges(
    whole: torch.Tensor, ranges: Iterable[tuple[int, int]], local: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Gather the ranges of elements, in the order of memory, that each rank of a group holds of a tensor. A collective.

    Few ranks hold any of one tensor, and each range is received in place.

    Args:
        whole: Dense memory of the tensor, to be filled.
        ranges: First element and number of elements of each rank.
        local: This rank's elements, dense.
        group: The process group.
    """
    flat, works = whole.as_strided((whole.numel(),), (1,)), []
    traced = torch.compiler.is_compiling()  # into a graph, which has no collectives that write to what they are given
    for source, (start, numel) in enumerate(ranges):
        part = flat.narrow(0, start, numel)
        if numel and source == group.rank():
            part.copy_(local.as_strided((numel,), (1,), local.storage_offset()))
        if not numel or group.size() == 1:
            continue
        if traced:
            part.copy_(wait_tensor(broadcast(part, source, group)))  # type: ignore[no-untyped-call]
        else:
            works.append(dist.broadcast(part, group=group, group_src=source, async_op=True))
    for work in works:
        if work is not None:
            work.wait()
