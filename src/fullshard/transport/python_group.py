"""Process groups that have no back end of c10d's underneath, such as those written in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from fullshard.memory import Work
from fullshard.transport.base import Move, Parcel
from fullshard.transport.collective import CollectiveTransport

__all__ = ["PythonGroupTransport", "all_gather_flat"]

# Renamed between torch 2.11 and 2.13; the old names warn in the new ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(group: dist.ProcessGroup, region: torch.Tensor, piece: torch.Tensor) -> Work:
    """Start an all-gather on any process group.

    Args:
        group: The ranks.
        region: Is filled: ``world_size * numel`` elements, flat.
        piece: This rank's, ``numel`` elements of the same dtype, flat.
    """
    work: Work = _all_gather(region, piece, group=group, async_op=True)
    return work


class PythonGroupTransport(CollectiveTransport):
    """Through the functions of ``torch.distributed``, which know the methods that such a group overrides."""

    def _issue_gather(self, move: Move) -> Work:
        return all_gather_flat(self.group, move.region.view(torch.uint8), move.piece.view(torch.uint8))

    def _reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        def issue(move: Move, op: ReduceOp) -> Work:
            work: Work = _reduce_scatter(move.piece, move.region, op, self.reduce_group, async_op=True)
            return work

        return self._summed(self.reduce_group, parcels, issue)
