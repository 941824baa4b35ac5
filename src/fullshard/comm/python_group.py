"""Process groups that have no back end of c10d's underneath, such as those written in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from fullshard.comm.base import CommRequest, Operand
from fullshard.comm.collective import CollectiveTransport
from fullshard.memory import Work

__all__ = ["PythonGroupTransport", "all_gather_flat"]

# Renamed between torch 2.11 and 2.13; the old names warn in the new ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(group: dist.ProcessGroup, unsharded: torch.Tensor, shard: torch.Tensor) -> Work:
    """Start an all-gather on any process group.

    Args:
        group: The ranks.
        unsharded: Is filled: ``world_size * numel`` elements, flat.
        shard: This rank's, ``numel`` elements of the same dtype, flat.
    """
    work: Work = _all_gather(unsharded, shard, group=group, async_op=True)
    return work


class PythonGroupTransport(CollectiveTransport):
    """Through the functions of ``torch.distributed``, which know the methods that such a group overrides."""

    def _issue_gather(self, operand: Operand) -> Work:
        return all_gather_flat(self.group, operand.unsharded.view(torch.uint8), operand.shard.view(torch.uint8))

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        def issue(operand: Operand, op: ReduceOp) -> Work:
            work: Work = _reduce_scatter(operand.shard, operand.unsharded, op, self.reduce_group, async_op=True)
            return work

        return self._summed(self.reduce_group, requests, issue)
