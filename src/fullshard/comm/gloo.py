"""Gloo: every rank sends its shards straight to every other rank.

Why not gloo's own collectives: one unit of 12.6 M fp32 parameters on two ranks of one machine (median of six,
docs/design/transports.md has the script): one flat all-gather 45 ms, one all-gather per parameter issued
together 20 ms, the direct exchange 14 ms; reduce-scatter 36 to 56 ms, all-reduce 26 ms, all-to-all and a
local sum 20 ms, the direct exchange and a local sum 14 ms. The exchange needs no staging copy of shards of at least
``direct_bytes`` either, and it sums in rank order, so the result does not depend on how many messages were in flight.
All of that is for two ranks or more; a single rank has a transport of its own, which sends nothing.

[Note: Joined messages]
A message costs its latency, however small. So the small shards of one launch, whichever units and dtypes they are of,
share one message per peer: they are copied into it one after another, and out of it on receipt. Sender and receiver
work out the same offsets, for sizes and dtypes are equal on all ranks. A shard that is alone is sent by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.base import CommRequest, GradScaling, Kind, Operand, Transport
from fullshard.comm.groups import GroupRecord, record_of
from fullshard.comm.summation import fold
from fullshard.memory import Work

__all__ = ["GlooTransport"]

# Tags keep our messages apart from the user's own send/recv on the same group. They hold 14 bits of what the exchange
# is for and 16 of how many there were: ranks that got out of step, after a failure on some of them, then time out
# instead of taking another unit's weights for this one's.
_TAG, _COUNTED = 0x40000000, 0x10000

_Copy = tuple[torch.Tensor, torch.Tensor]  # target and source, in bytes


class GlooTransport(Transport):
    """CPU ranks over TCP.

    All-gathers send bytes, of any dtype. Sums are in rank order and in the tensors' dtype; on more than two ranks those
    of bf16 and fp16 are in fp32, and rounded once, see :func:`~fullshard.comm.summation.fold`. Scaling before the sum
    multiplies the inputs in place, in their dtype.
    """

    # Below this a message costs its latency rather than its bytes. A judgement, not yet swept.
    direct_bytes: int = 64 * 1024

    _record: GroupRecord

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._record = record_of(group)

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        operands = [operand for operand, _ in _operands(requests)]
        exchange = self._exchange("all_gather", requests)
        messages = exchange.pack([operand.shard for operand in operands])  # the same for every peer
        for peer in self._peers():
            exchange.send(peer, messages)
            exchange.receive(peer, [_part(operand, peer) for operand in operands])
        for operand in operands:
            own = _part(operand, self.rank)
            if own.data_ptr() != operand.shard.data_ptr():
                own.copy_(operand.shard)
        return [*exchange.arrivals, *exchange.sends]

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        operands = _operands(requests)
        exchange = self._exchange("reduce_scatter", requests)
        # Of the others' parts the first is received in the output itself, the rest beside it.
        first, *rest = self._others()
        parts = [
            {first: m.shard, **{peer: torch.empty_like(m.shard) for peer in rest}, self.rank: _part(m, self.rank)}
            for m, _ in operands
        ]
        for operand, scaling in operands:
            _scale_before(operand.unsharded, scaling)
        for peer in self._peers():
            exchange.send(peer, exchange.pack([_part(operand, peer) for operand, _ in operands]))
            exchange.receive(peer, [part[peer] for part in parts])
        sums = [
            _Sum(part, operand.shard, scaling, exchange.arrivals_of(index))
            for index, ((operand, scaling), part) in enumerate(zip(operands, parts, strict=True))
        ]
        return [*sums, *exchange.sends]

    @property
    def sums_at_once(self) -> bool:  # type: ignore[override]
        """True on two ranks; on more, waiting sends too, see [Note: All-reduce over gloo]."""
        return self.world_size == 2

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """[Note: All-reduce over gloo]

        Two ranks exchange whole tensors and add them, in rank order, so that they get the same bits. More ranks cut
        each tensor into one share per rank (the last ones shorter, or empty), send the shares to their ranks, add
        there, and send the sums to all. That second exchange can only start once the first is done and nobody but
        wait() notices that. So wait() *issues* messages, and ranks have to wait for several all-reduces in the same
        order. Its tag is taken here, where the order of calls is the same on all ranks.
        """
        operands = _operands(requests)
        for operand, scaling in operands:
            _scale_before(operand.unsharded, scaling)
        shares = [_Shares(operand.unsharded, self.world_size) for operand, _ in operands]
        exchange = self._exchange("all_reduce", requests)
        whole = self.world_size == 2
        own = [share.whole if whole else share.of(self.rank) for share in shares]
        parts = [{self.rank: mine} for mine in own]
        for peer in self._peers():
            for part, mine in zip(parts, own, strict=True):
                part[peer] = torch.empty_like(mine)
            exchange.send(peer, exchange.pack([share.whole if whole else share.of(peer) for share in shares]))
            exchange.receive(peer, [part[peer] for part in parts])
        sums = [
            _Sum(part, mine, scaling, exchange.arrivals_of(index))
            for index, ((_, scaling), mine, part) in enumerate(zip(operands, own, parts, strict=True))
        ]
        # Sums and second exchange overwrite what was sent: it has to be gone first.
        works = [*exchange.sends, *sums]
        if whole:
            return works
        return [_Spread(works, self._exchange("all_reduce", requests), shares, self._peers(), self.rank)]

    def _exchange(self, kind: Kind, requests: Sequence[CommRequest]) -> _Exchange:
        """A new exchange with the next tag, which ranks have in common only if kind, units and count are the same."""
        count = self._record.exchanges = (self._record.exchanges + 1) % _COUNTED
        what = "\0".join((kind, *(request.unit for request in requests))).encode()
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
        """The messages that carry ``tensors``, small ones together, see [Note: Joined messages]."""
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
        """The messages with the tensors received at ``index``, from all peers."""
        return self._by_index.get(index, [])

    def _arrive(self, peer: int, message: torch.Tensor, indices: Sequence[int], copies: Sequence[_Copy]) -> None:
        arrival = _Arrival(self._group.recv([message], peer, self._tag), copies)
        self.arrivals.append(arrival)
        for index in indices:
            self._by_index.setdefault(index, []).append(arrival)

    def _sort(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Indices of those that share a message, and of those that have their own. Empty ones are not sent."""
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
    """Waits for all parts of one operand, by rank, and adds them in the order of the ranks."""

    __slots__ = ("_arrivals", "_parts", "_scaling", "_target")

    def __init__(
        self,
        parts: dict[int, torch.Tensor],
        target: torch.Tensor,
        scaling: GradScaling,
        arrivals: Sequence[_Arrival],
    ) -> None:
        self._parts, self._target, self._scaling, self._arrivals = parts, target, scaling, arrivals

    def wait(self) -> None:
        """Finish the receives, sum and scale."""
        _wait_for_all(self._arrivals)
        terms = [self._parts[rank] for rank in sorted(self._parts)]
        fold(terms, self._target, 1 / self._scaling.after)


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


def _operands(requests: Sequence[CommRequest]) -> list[tuple[Operand, GradScaling]]:
    """All operands of a launch with how their sums are scaled."""
    return [(operand, request.scaling) for request in requests for operand in request.operands]


def _part(operand: Operand, rank: int) -> torch.Tensor:
    numel = operand.shard.numel()
    return operand.unsharded.narrow(0, rank * numel, numel)


def _scale_before(unsharded: torch.Tensor, scaling: GradScaling) -> None:
    if scaling.before != 1:
        unsharded.mul_(1 / scaling.before)


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
