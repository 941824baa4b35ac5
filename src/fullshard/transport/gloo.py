"""Gloo: every rank sends its pieces straight to every other rank.

Why not gloo's own collectives: one unit of 12.6 M fp32 parameters on two ranks of one machine (median of six,
docs/design/transports.md has the script): one flat all-gather 45 ms, one all-gather per parameter issued
together 20 ms, the direct exchange 14 ms; reduce-scatter 36 to 56 ms, all-reduce 26 ms, all-to-all and a
local sum 20 ms, the direct exchange and a local sum 14 ms. The exchange needs no staging copy of pieces of at least
``direct_bytes`` either, and it sums in rank order, so the result does not depend on how many messages were in flight.
All of that is for two ranks or more; a single rank has nothing to exchange and needs no transport.

[Note: Joined messages]
A message costs its latency, however small. So the small pieces of one launch, whichever units and dtypes they are of,
share one message per peer: they are copied into it one after another, and out of it on receipt. Sender and receiver
work out the same offsets, for sizes and dtypes are equal on all ranks. A piece that is alone travels by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.memory import Work
from fullshard.transport.base import Division, Kind, Move, Parcel, Transport
from fullshard.transport.groups import GroupRecord, record_of
from fullshard.transport.summation import fold

__all__ = ["GlooTransport"]

# Tags keep our messages apart from the user's own send/recv on the same group. They hold 14 bits of what the exchange
# is for and 16 of how many there were: ranks that got out of step, after a failure on some of them, then time out
# instead of taking another unit's weights for this one's.
_TAG, _COUNTED = 0x40000000, 0x10000

_Copy = tuple[torch.Tensor, torch.Tensor]  # target and source, in bytes


class GlooTransport(Transport):
    """CPU ranks over TCP.

    Gathers move bytes, of any dtype. Sums are in rank order and in the tensors' dtype; on more than two ranks those of
    bf16 and fp16 are in fp32, and rounded once, see :func:`~fullshard.transport.summation.fold`. A division before
    the sum multiplies the regions in place, in their dtype.
    """

    # Below this a message costs its latency rather than its bytes. A judgement, not yet swept.
    direct_bytes: int = 64 * 1024

    _record: GroupRecord

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._record = record_of(group)

    def _gather(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        moves = [move for move, _ in _moves(parcels)]
        exchange = self._exchange("gather", parcels)
        messages = exchange.pack([move.piece for move in moves])  # the same for every peer
        for peer in self._peers():
            exchange.send(peer, messages)
            exchange.receive(peer, [_part(move, peer) for move in moves])
        for move in moves:
            own = _part(move, self.rank)
            if own.data_ptr() != move.piece.data_ptr():
                own.copy_(move.piece)
        return [*exchange.arrivals, *exchange.sends]

    def _reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        moves = _moves(parcels)
        exchange = self._exchange("reduce", parcels)
        # Of the others' parts the first lands in the output itself, the rest beside it.
        first, *rest = self._others()
        parts = [
            {first: m.piece, **{peer: torch.empty_like(m.piece) for peer in rest}, self.rank: _part(m, self.rank)}
            for m, _ in moves
        ]
        for move, division in moves:
            _divide_before(move.region, division)
        for peer in self._peers():
            exchange.send(peer, exchange.pack([_part(move, peer) for move, _ in moves]))
            exchange.receive(peer, [part[peer] for part in parts])
        sums = [
            _Sum(part, move.piece, division, exchange.arrivals_of(index))
            for index, ((move, division), part) in enumerate(zip(moves, parts, strict=True))
        ]
        return [*sums, *exchange.sends]

    @property
    def sums_at_once(self) -> bool:  # type: ignore[override]
        """See [Note: All-reduce over gloo]."""
        return self.world_size == 2

    def _all_reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        """[Note: All-reduce over gloo]

        Two ranks exchange whole tensors and add them, in rank order, so that they get the same bits. More ranks cut
        each tensor into one share per rank (the last ones shorter, or empty), send the shares to their ranks, add
        there, and send the sums to all. That second exchange can only start once the first is done and nobody but
        wait() notices that. So wait() *issues* messages, and ranks have to wait for several all-reduces in the same
        order. Its tag is taken here, where the order of calls is the same on all ranks.
        """
        moves = _moves(parcels)
        for move, division in moves:
            _divide_before(move.region, division)
        shares = [_Shares(move.region, self.world_size) for move, _ in moves]
        exchange = self._exchange("all_reduce", parcels)
        whole = self.world_size == 2
        own = [share.whole if whole else share.of(self.rank) for share in shares]
        parts = [{self.rank: mine} for mine in own]
        for peer in self._peers():
            for part, mine in zip(parts, own, strict=True):
                part[peer] = torch.empty_like(mine)
            exchange.send(peer, exchange.pack([share.whole if whole else share.of(peer) for share in shares]))
            exchange.receive(peer, [part[peer] for part in parts])
        sums = [
            _Sum(part, mine, division, exchange.arrivals_of(index))
            for index, ((_, division), mine, part) in enumerate(zip(moves, own, parts, strict=True))
        ]
        # Sums and second exchange overwrite what was sent: it has to be gone first.
        works = [*exchange.sends, *sums]
        if whole:
            return works
        return [_Spread(works, self._exchange("all_reduce", parcels), shares, self._peers(), self.rank)]

    def _exchange(self, kind: Kind, parcels: Sequence[Parcel]) -> _Exchange:
        """A new exchange with the next tag, which ranks have in common only if kind, units and count are the same."""
        count = self._record.exchanges = (self._record.exchanges + 1) % _COUNTED
        what = "\0".join((kind, *(parcel.unit for parcel in parcels))).encode()
        tag = _TAG | (zlib.crc32(what) % 0x4000) * _COUNTED | count
        return _Exchange(self.group, tag, self.direct_bytes)

    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that not all ranks send to the same one at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _others(self) -> list[int]:
        """The other ranks in rank order."""
        return [rank for rank in range(self.world_size) if rank != self.rank]


class _Exchange:
    """The messages of one launch between this rank and its peers, all with one tag and all in flight together."""

    arrivals: list[_Arrival]
    sends: list[Work]
    _group: dist.ProcessGroup
    _tag: int
    _small: int  # tensors of fewer bytes are joined
    _by_index: dict[int, list[_Arrival]]

    def __init__(self, group: dist.ProcessGroup, tag: int, small: int) -> None:
        self._group, self._tag, self._small = group, tag, small
        self.arrivals, self.sends, self._by_index = [], [], {}

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The messages that carry ``tensors``: see [Note: Joined messages]."""
        joined, alone = self._sort(tensors)
        messages = [_bytes(tensors[index]) for index in alone]
        if joined:
            message, places = _join([tensors[index] for index in joined])
            for index, place in zip(joined, places, strict=True):
                place.copy_(_bytes(tensors[index]))
            messages.append(message)
        return messages

    def send(self, peer: int, messages: Sequence[torch.Tensor]) -> None:
        """Start sending what :meth:`pack` made."""
        self.sends += [self._group.send([message], peer, self._tag) for message in messages]

    def receive(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start receiving what ``peer`` packed of tensors of the same sizes."""
        joined, alone = self._sort(tensors)
        for index in alone:
            self._arrive(peer, _bytes(tensors[index]), [index], [])
        if joined:
            message, places = _join([tensors[index] for index in joined])
            copies = [(_bytes(tensors[i]), place) for i, place in zip(joined, places, strict=True)]
            self._arrive(peer, message, joined, copies)

    def arrivals_of(self, index: int) -> Sequence[_Arrival]:
        """What has to arrive until the tensors received at ``index`` are there, from all peers."""
        return self._by_index.get(index, [])

    def _arrive(self, peer: int, message: torch.Tensor, indices: Sequence[int], copies: Sequence[_Copy]) -> None:
        arrival = _Arrival(self._group.recv([message], peer, self._tag), copies)
        self.arrivals.append(arrival)
        for index in indices:
            self._by_index.setdefault(index, []).append(arrival)

    def _sort(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Indices of those that share a message, and of those that have their own. Empty ones do not travel."""
        joined = [index for index, tensor in enumerate(tensors) if 0 < tensor.nbytes < self._small]
        if len(joined) < 2:
            joined = []
        together = set(joined)
        return joined, [index for index, t in enumerate(tensors) if t.nbytes and index not in together]


class _Arrival:
    """One message on its way here. Several may wait for it: asked twice, gloo would wait for a second message."""

    __slots__ = ("_copies", "_error", "_work")

    def __init__(self, work: Work, copies: Sequence[_Copy]) -> None:
        self._work: Work | None = work
        self._copies = copies
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Wait and unpack; if it failed, raise, every time."""
        if self._work is not None:
            work, self._work = self._work, None
            try:
                work.wait()
            except RuntimeError as error:
                self._error = error
            else:
                for target, place in self._copies:
                    target.copy_(place)
            self._copies = ()
        if self._error is not None:
            raise self._error


class _Sum:
    """Waits for all parts of one move, by rank, and adds them in the order of the ranks."""

    __slots__ = ("_arrivals", "_division", "_parts", "_target")

    def __init__(
        self,
        parts: dict[int, torch.Tensor],
        target: torch.Tensor,
        division: Division,
        arrivals: Sequence[_Arrival],
    ) -> None:
        self._parts, self._target, self._division, self._arrivals = parts, target, division, arrivals

    def wait(self) -> None:
        """Finish the receives, sum and divide."""
        _wait_for_all(self._arrivals)
        terms = [self._parts[rank] for rank in sorted(self._parts)]
        fold(terms, self._target, 1 / self._division.after)


class _Shares:
    """A flat tensor cut into one share per rank: equal ones, but that the last may be shorter or empty."""

    __slots__ = ("_size", "whole")

    def __init__(self, whole: torch.Tensor, world_size: int) -> None:
        self.whole, self._size = whole, -(-whole.numel() // world_size)

    def of(self, rank: int) -> torch.Tensor:
        """The share of ``rank``."""
        start = min(rank * self._size, self.whole.numel())
        return self.whole.narrow(0, start, min(self._size, self.whole.numel() - start))


class _Spread:
    """Second half of an all-reduce: once the own shares are summed, sends them to all. It issues when waited for."""

    __slots__ = ("_exchange", "_peers", "_rank", "_shares", "_works")

    def __init__(
        self, works: Sequence[Work], exchange: _Exchange, shares: Sequence[_Shares], peers: Sequence[int], rank: int
    ) -> None:
        self._works, self._exchange, self._shares = works, exchange, shares
        self._peers, self._rank = peers, rank

    def wait(self) -> None:
        """Finish both halves; if the first failed, the second is not started, and the others time out."""
        _wait_for_all(self._works)
        exchange = self._exchange
        messages = exchange.pack([shares.of(self._rank) for shares in self._shares])
        for peer in self._peers:
            exchange.send(peer, messages)
            exchange.receive(peer, [shares.of(peer) for shares in self._shares])
        _wait_for_all([*exchange.arrivals, *exchange.sends])


def _wait_for_all(works: Sequence[Work]) -> None:
    """Wait for every work, also after a failure, for they write to memory that is used again; raise the first one."""
    first: RuntimeError | None = None
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first


def _moves(parcels: Sequence[Parcel]) -> list[tuple[Move, Division]]:
    """All moves of a launch with how they are divided."""
    return [(move, parcel.division) for parcel in parcels for move in parcel.moves]


def _part(move: Move, rank: int) -> torch.Tensor:
    numel = move.piece.numel()
    return move.region.narrow(0, rank * numel, numel)


def _divide_before(region: torch.Tensor, division: Division) -> None:
    if division.before != 1:
        region.mul_(1 / division.before)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which gloo sends whatever they mean."""
    return tensor.view(torch.uint8)


def _join(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A message with room for all ``tensors``, and each one's place in it, in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += tensor.nbytes
    message = torch.empty(end, dtype=torch.uint8, device="cpu")
    return message, [message.narrow(0, start, t.nbytes) for start, t in zip(offsets, tensors, strict=True)]
