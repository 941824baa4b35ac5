"""Gloo: every rank sends its pieces straight to every other rank.

Why not gloo's own collectives: one unit of 12.6 M fp32 parameters on two ranks of one machine (median of six,
docs/design/transports.md has the script): one flat all-gather 45 ms, one all-gather per parameter issued
together 20 ms, the direct exchange 14 ms; reduce-scatter 36 to 56 ms, all-reduce 26 ms, all-to-all and a
local sum 20 ms, the direct exchange and a local sum 14 ms. The exchange needs no staging copy either, and it
sums in rank order, so the result does not depend on how many messages were in flight.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from fullshard.memory import Work
from fullshard.transport.base import Move, Transport

__all__ = ["GlooTransport"]

# Tags keep our messages apart from the user's own send/recv on the same group. They hold 14 bits of what the exchange
# is for and 16 of how many there were: ranks that got out of step, after a failure on some of them, then time out
# instead of taking another unit's weights for this one's.
_TAG, _COUNTED = 0x40000000, 0x10000


class GlooTransport(Transport):
    """CPU ranks over TCP."""

    # Below this a message costs its latency rather than its bytes. A judgement, not yet swept.
    direct_bytes: ClassVar[int] = 64 * 1024

    _exchanges: int

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._exchanges = 0

    def _next_tag(self, kind: bytes, unit: str) -> int:
        self._exchanges = (self._exchanges + 1) % _COUNTED
        return _TAG | (zlib.crc32(kind + unit.encode()) % 0x4000) * _COUNTED | self._exchanges

    def _gather(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        works: list[Work] = []
        tag = self._next_tag(b"gather ", unit)
        for peer in self._peers():
            for move in moves:
                works.append(self.group.send([move.piece], peer, tag))
                works.append(self.group.recv([_part(move, peer)], peer, tag))
        for move in moves:
            _part(move, self.rank).copy_(move.piece)
        return works

    def _reduce(self, moves: Sequence[Move], unit: str) -> Sequence[Work]:
        scratch = [self._scratch(move) for move in moves]
        incoming: list[dict[int, Work]] = [{} for _ in moves]
        tag = self._next_tag(b"reduce ", unit)
        outgoing: list[list[Work]] = [[] for _ in moves]
        for peer in self._peers():
            for index, move in enumerate(moves):
                outgoing[index].append(self.group.send([_part(move, peer)], peer, tag))
                incoming[index][peer] = self.group.recv([scratch[index][peer]], peer, tag)
        return [_RankOrderMean(move, self.rank, scratch[i], incoming[i], outgoing[i]) for i, move in enumerate(moves)]

    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that not all ranks send to the same one at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _scratch(self, move: Move) -> dict[int, torch.Tensor]:
        """Where each peer's part lands: the first in rank order in the output itself, the others beside it."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return {peer: move.piece if peer == others[0] else torch.empty_like(move.piece) for peer in others}


class _RankOrderMean:
    """Waits for all parts of one move and averages them in the order of the ranks."""

    __slots__ = ("_incoming", "_move", "_outgoing", "_parts", "_rank")

    def __init__(
        self,
        move: Move,
        rank: int,
        parts: dict[int, torch.Tensor],
        incoming: dict[int, Work],
        outgoing: Sequence[Work],
    ) -> None:
        self._move, self._rank, self._parts = move, rank, parts
        self._incoming, self._outgoing = incoming, outgoing

    def wait(self) -> None:
        """Finish the receives, sum, divide, then make sure that the region may be freed."""
        total, world_size = self._move.piece, len(self._parts) + 1
        for rank, part in self._summands():
            if rank != self._rank:
                self._incoming[rank].wait()
            if part is not total:
                total.add_(part)
        total.mul_(1 / world_size)
        for work in self._outgoing:
            work.wait()

    def _summands(self) -> list[tuple[int, torch.Tensor]]:
        """All parts in rank order. The one that landed in the output comes first.

        That is rank 0's, except on rank 0, where it is rank 1's: the sum of two does not depend on their order.
        """
        own = (self._rank, _part(self._move, self._rank))
        parts = sorted([own, *self._parts.items()])
        if self._rank == 0:
            parts[0], parts[1] = parts[1], parts[0]
        return parts


def _part(move: Move, rank: int) -> torch.Tensor:
    numel = move.piece.numel()
    return move.region.narrow(0, rank * numel, numel)
