"""Gloo: every rank sends its shards straight to every other rank.

Why not gloo's own collectives: one unit of 12.6 M fp32 parameters on two ranks of one machine (median of six,
docs/design/transports.md has the script): one flat all-gather 45 ms, one all-gather per parameter issued
together 20 ms, the direct exchange 14 ms; reduce-scatter 36 to 56 ms, all-reduce 26 ms, all-to-all and a
local sum 20 ms, the direct exchange and a local sum 14 ms. The exchange needs no staging copy of shards of at least
``direct_bytes`` either, and it sums in rank order, so the result does not depend on how many messages were in flight.
All of that is for two ranks or more; a single rank has a separate transport, which sends nothing.

[Note: Joined messages]
A message costs its latency, however small. So the small shards of one launch, whichever units and dtypes they are of,
share one message per peer: they are copied into it one after another, and out of it on receipt. Sender and receiver
work out the same offsets, for sizes and dtypes are equal on all ranks. A shard that is alone is sent by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.base import CommRequest, GradScaling, Operand, Transport
from fullshard.comm.groups import GroupRecord, record_of
from fullshard.comm.summation import fold
from fullshard.memory import HostWork, Work, wait_for_all

__all__ = ["GlooTransport"]

# Tags keep our messages apart from the user's own send/recv on the same group. They hold 14 bits of what the exchange
# is for and 16 of how many there were: ranks that got out of step, after a failure on some of them, then time out
# instead of taking another unit's weights for this one's.
_TAG, _COUNTED = 0x40000000, 0x10000


class GlooTransport(Transport):
    """Transport of CPU ranks over TCP, with direct messages between ranks.

    All-gathers send bytes, of any dtype. Sums are in rank order and in the dtype of the tensors; on more than two
    ranks, bf16 and fp16 tensors are summed in fp32 and rounded once. Scaling before the sum multiplies the inputs in
    place, in their dtype.

    Args:
        group: The ranks.
    """

    # Below this a message costs its latency rather than its bytes. A judgment, not yet swept.
    direct_bytes: int = 64 * 1024

    _record: GroupRecord
    _peers: list[int]  # nearest first, so that not all ranks send to the same one at once

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._record = record_of(group)
        self._peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        operands = [operand for request in requests for operand in request.operands]
        exchange = self._exchange("all_gather", requests)
        works = self._send_to_all(exchange, [operand.shard for operand in operands], operands, _part)
        for operand in operands:
            own = _part(operand, self.rank)
            if own.data_ptr() != operand.shard.data_ptr():
                own.copy_(operand.shard)
        return works

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        operands = _scaled_before(requests)
        targets = [operand.shard for operand, _ in operands]
        return self._sums(self._exchange("reduce_scatter", requests), operands, targets, _part)

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        """[Note: All-reduce over gloo]

        Two ranks exchange whole tensors and add them, in rank order, so that they get the same bits. More ranks cut
        each tensor into one share per rank (the last ones shorter, or empty), send the shares to their ranks, add
        there, and send the sums to all. That second exchange can only start once the first is done and nobody but
        wait() notices that. So wait() *issues* messages, and ranks have to wait for several all-reduces in the same
        order. Its tag is taken here, where the order of calls is the same on all ranks.
        """
        operands = _scaled_before(requests)
        exchange = self._exchange("all_reduce", requests)
        shares = [self._share(operand, self.rank) for operand, _ in operands]
        works = self._sums(exchange, operands, shares, self._share)
        if self.world_size == 2:
            return works
        second = self._exchange("all_reduce", requests)
        return [HostWork(works, partial(self._spread, second, shares, [operand for operand, _ in operands]))]

    def _spread(self, exchange: _Exchange, sums: Sequence[torch.Tensor], operands: Sequence[Operand]) -> None:
        """Send the sums of this rank's shares to all, and wait for theirs: the second half of an all-reduce."""
        wait_for_all(self._send_to_all(exchange, sums, operands, self._share))

    def all_to_all(self, unit: str, arrived: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> list[Work]:
        """Send a tensor to each rank, and receive one from each, in rank order. Tensors may be empty.

        Args:
            unit: As of ``CommRequest``.
            arrived: Tensors to receive into. This rank's part is copied there.
            sent: Tensors of the same sizes as those that the ranks receive.

        Returns:
            Works to wait for, each once and in order.
        """
        exchange = self._exchange("all_to_all", [CommRequest(unit, [])])
        arrivals = [arrival for peer in self._peers for arrival in exchange.receive(peer, [arrived[peer]])]
        for peer in self._peers:
            exchange.send(peer, exchange.pack([sent[peer]]))
        arrived[self.rank].copy_(sent[self.rank])
        return [*arrivals, *exchange.sends]

    def _share(self, operand: Operand, rank: int) -> torch.Tensor:
        """Return the share of an all-reduced tensor that ``rank`` sums."""
        tensor, numel = operand.unsharded, operand.unsharded.numel()
        if self.world_size == 2:
            return tensor
        size = -(-numel // self.world_size)
        start = min(rank * size, numel)
        return tensor.narrow(0, start, min(size, numel - start))

    def _send_to_all(
        self, exchange: _Exchange, sent: Sequence[torch.Tensor], operands: Sequence[Operand], part: _PartOf
    ) -> list[Work]:
        """Send the same tensors to every rank, and receive each rank's part of the operands in its place."""
        arrivals: list[Work] = []
        for peer in self._peers:
            arrivals += exchange.receive(peer, [part(operand, peer) for operand in operands])
        messages = exchange.pack(sent)
        for peer in self._peers:
            exchange.send(peer, messages)
        return [*arrivals, *exchange.sends]

    def _sums(
        self,
        exchange: _Exchange,
        operands: Sequence[tuple[Operand, GradScaling]],
        targets: Sequence[torch.Tensor],
        part: _PartOf,
    ) -> list[Work]:
        """Send every rank its part of the operands; add up what arrives, and this rank's part, in ``targets``."""
        terms: list[dict[int, torch.Tensor]] = []
        for (operand, _), target in zip(operands, targets, strict=True):
            own = part(operand, self.rank)
            terms.append({self.rank: target if own.data_ptr() == target.data_ptr() else own})
        arrivals: list[list[_Arrival]] = [[] for _ in operands]
        first = min(self._peers)  # whose part is received in the target, unless this rank's part lies there
        for peer in self._peers:
            for term, target in zip(terms, targets, strict=True):
                is_free = peer == first and target is not term[self.rank]
                term[peer] = target if is_free else torch.empty_like(target)
            for arrival in exchange.receive(peer, [term[peer] for term in terms]):
                for index in arrival.message.indices:
                    arrivals[index].append(arrival)
        for peer in self._peers:
            exchange.send(peer, exchange.pack([part(operand, peer) for operand, _ in operands]))
        sums = [
            HostWork(arrivals[index], partial(_add_up, term, target, scaling))
            for index, ((_, scaling), term, target) in enumerate(zip(operands, terms, targets, strict=True))
        ]
        # What was sent may be overwritten by sums: it has to be gone first.
        return [*exchange.sends, *sums]

    def _exchange(self, kind: str, requests: Sequence[CommRequest]) -> _Exchange:
        """Begin an exchange with the next tag, which is equal on ranks where kind, units and count are."""
        count = self._record.exchanges = (self._record.exchanges + 1) % _COUNTED
        what = "\0".join((kind, *(request.unit for request in requests))).encode()
        tag = _TAG | (zlib.crc32(what) % 0x4000) * _COUNTED | count
        return _Exchange(self.group, tag, self.direct_bytes)


class _Message(NamedTuple):
    """The bytes of one tensor, or of several that are copied into it, see [Note: Joined messages]."""

    memory: torch.Tensor
    indices: Sequence[int]  # of the tensors
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()  # each tensor in bytes, and its place in the memory

    def unpack(self) -> None:
        """Copy what has arrived to the tensors."""
        for tensor, place in self.copies:
            tensor.copy_(place)


class _Arrival(HostWork):
    """The receipt of a message."""

    message: _Message

    def __init__(self, work: Work, message: _Message) -> None:
        super().__init__([work], message.unpack)
        self.message = message


class _Exchange:
    """The messages of one launch between this rank and its peers, all with one tag and all in flight together.

    Receives are posted before the first send: gloo puts the notice of a receive behind a payload that is under way, and
    both directions of a real link then take turns.
    """

    sends: list[Work]
    _group: dist.ProcessGroup
    _tag: int
    _small: int  # tensors of fewer bytes are joined

    def __init__(self, group: dist.ProcessGroup, tag: int, small: int) -> None:
        self._group, self._tag, self._small, self.sends = group, tag, small, []

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the messages that carry ``tensors``."""
        messages = self._messages(tensors)
        for message in messages:
            for tensor, place in message.copies:
                place.copy_(tensor)
        return [message.memory for message in messages]

    def send(self, peer: int, messages: Sequence[torch.Tensor]) -> None:
        """Start sending what ``pack`` made."""
        self.sends += [self._group.send([message], peer, self._tag) for message in messages]

    def receive(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[_Arrival]:
        """Start receiving what ``peer`` packed of tensors of the same sizes."""
        messages = self._messages(tensors)
        return [_Arrival(self._group.recv([each.memory], peer, self._tag), each) for each in messages]

    def _messages(self, tensors: Sequence[torch.Tensor]) -> list[_Message]:
        """Return messages of single large tensors, then one of all small ones. Empty tensors are not sent."""
        sizes = [tensor.nbytes for tensor in tensors]
        small = [index for index, size in enumerate(sizes) if 0 < size < self._small]
        joined = small if len(small) > 1 else []
        alone = sorted({index for index, size in enumerate(sizes) if size} - set(joined))
        # As bytes, which gloo sends whatever they mean.
        messages = [_Message(tensors[index].view(torch.uint8), [index]) for index in alone]
        if joined:
            device = tensors[joined[0]].device  # the CPU, or meta
            memory = torch.empty(sum(sizes[index] for index in joined), dtype=torch.uint8, device=device)
            places = memory.split_with_sizes([sizes[index] for index in joined])
            copies = [(tensors[index].view(torch.uint8), place) for index, place in zip(joined, places, strict=True)]
            messages.append(_Message(memory, joined, copies))
        return messages


_PartOf = Callable[[Operand, int], torch.Tensor]  # of an operand, for a rank


def _part(operand: Operand, rank: int) -> torch.Tensor:
    numel = operand.shard.numel()
    return operand.unsharded.narrow(0, rank * numel, numel)


def _scaled_before(requests: Sequence[CommRequest]) -> list[tuple[Operand, GradScaling]]:
    """Scale all operands of a launch as they are before the sum, and return them with how the sum is scaled."""
    operands = [(operand, request.scaling) for request in requests for operand in request.operands]
    for operand, scaling in operands:
        if scaling.before != 1:
            operand.unsharded.mul_(1 / scaling.before)
    return operands


def _add_up(terms: dict[int, torch.Tensor], target: torch.Tensor, scaling: GradScaling) -> None:
    """Add terms in the order of their ranks, whichever came first, and scale the sum."""
    fold([terms[rank] for rank in sorted(terms)], target, 1 / scaling.after)
