"""The transport of an axis with one rank: nothing is sent; values are copied and scaled in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.base import CommRequest, Transport
from fullshard.memory import Work

__all__ = ["SingleRankTransport"]


class SingleRankTransport(Transport):
    """Transport of an axis of size 1: no process group, no collectives, and ``fullshard.comm.record`` sees none.

    An all-gather copies the shard into the unsharded memory unless they share memory, and casts it in the same step. A
    reduce-scatter copies in the other direction and scales; an all-reduce scales.
    """

    direct_bytes: int = 0
    tiny_bytes: int = -1  # without messages there are none to share
    casts: bool = True

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        _copy([(operand.unsharded, operand.shard) for request in requests for operand in request.operands])
        return []

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        _copy([(operand.shard, operand.unsharded) for request in requests for operand in request.operands])
        return self._all_reduce(requests)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        for _, operands, scaling in requests:
            factor = scaling.before * scaling.after
            if factor != 1 and operands:
                torch._foreach_mul_([operand.shard for operand in operands], 1 / factor)
        return []


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into the first tensor of each pair what is in the second, unless they share their memory."""
    for target, source in pairs:  # of any dtype, which torch's functions of lists are not
        if target is not source and (not source.data_ptr() or target.data_ptr() != source.data_ptr()):
            target.copy_(source)
