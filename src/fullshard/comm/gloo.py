"""Gloo: every rank sends its shards straight to every other rank, or to one on each other host.

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

import functools
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.base import CommRequest, GradScaling, Operand, Transport
from fullshard.comm.collective import all_gather_single
from fullshard.comm.groups import GroupRecord, record_of
from fullshard.comm.hosts import RelayThread, Routes, this_host
from fullshard.comm.summation import fold
from fullshard.memory import HostCommStream, HostWork, Work, wait_for_all

__all__ = ["GlooTransport"]

# Tags keep our messages apart from the user's own send/recv on the same group. They hold 14 bits of what the exchange
# is for and 16 of how many there were: ranks that got out of step, after a failure on some of them, then time out
# instead of taking another unit's weights for this one's.
_TAG, _COUNTED = 0x40000000, 0x10000


class GlooTransport(Transport):
    """Transport of CPU ranks over TCP, with direct messages between ranks.

    All-gathers send bytes, of any dtype. Sums are in rank order and in the dtype of the tensors; on more than two
    ranks, bf16 and fp16 tensors are summed in fp32 and rounded once on each host. Scaling before the sum multiplies the
    inputs in place, in their dtype.

    Args:
        group: The ranks.
    """

    # Below this a message costs its latency rather than its bytes. A judgment, not yet swept.
    direct_bytes: int = 64 * 1024

    _record: GroupRecord

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._record = record_of(group)

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
        exchange = self._exchange("reduce_scatter", requests)
        own, targets = (
            [_part(operand, self.rank) for operand, _ in operands],
            [operand.shard for operand, _ in operands],
        )
        return self._sums(exchange, operands, own, targets, _part)

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
        own = [self._share(operand, self.rank) for operand, _ in operands]
        works = self._sums(exchange, operands, own, own, self._share)
        if self.world_size == 2:
            return works
        spread = partial(
            self._spread, self._exchange("all_reduce", requests), own, [operand for operand, _ in operands]
        )
        return [HostWork(works, spread)]

    def _spread(self, exchange: _Exchange, sums: Sequence[torch.Tensor], operands: Sequence[Operand]) -> None:
        """Second half of an all-reduce: send the sums of this rank's shares to all, and wait for theirs."""
        wait_for_all(self._send_to_all(exchange, sums, operands, self._share, "waits"))

    def all_to_all(self, unit: str, arrived: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> list[Work]:
        """Send a tensor to each rank, and receive one of each, some of them empty; in rank order.

        Args:
            unit: As of ``CommRequest``.
            arrived: Where they are received. This rank's own is copied there.
            sent: Of the same sizes on the ranks that receive them.

        Returns:
            Works of the back end, as of other collectives.
        """
        exchange = self._exchange("all_to_all", [CommRequest(unit, [])])
        peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        arrivals = [arrival for peer in peers for arrival in exchange.receive(peer, [arrived[peer]])]
        for peer in peers:
            exchange.send(peer, exchange.pack([sent[peer]]))
        arrived[self.rank].copy_(sent[self.rank])
        return [*arrivals, exchange.sent()]

    def _share(self, operand: Operand, rank: int) -> torch.Tensor:
        """Return the share of an all-reduced tensor that ``rank`` sums."""
        tensor, numel = operand.unsharded, operand.unsharded.numel()
        if self.world_size == 2:
            return tensor
        size = -(-numel // self.world_size)
        start = min(rank * size, numel)
        return tensor.narrow(0, start, min(size, numel - start))

    def _send_to_all(
        self,
        exchange: _Exchange,
        sent: Sequence[torch.Tensor],
        operands: Sequence[Operand],
        part: _PartOf,
        relay_of: str = "launches",
    ) -> list[Work]:
        """Send the same to every rank, and receive each rank's part of the operands in its place."""
        routes = self._routes

        def receive(peer: int, owner: int) -> list[_Arrival]:
            return exchange.receive(peer, [part(operand, owner) for operand in operands])

        here = [arrival for peer in routes.neighbors for arrival in receive(peer, peer)]
        far = {owner: receive(owner, owner) for owner in routes.relayed[self.rank]}
        here += [a for peer in routes.neighbors for owner in routes.relayed[peer] for a in receive(peer, owner)]
        messages = exchange.pack(sent)
        for peer in [*routes.counterparts, *routes.neighbors]:  # the slow ones first
            exchange.send(peer, messages)

        def relay(arrivals: Sequence[_Arrival]) -> None:
            for peer in routes.neighbors:
                exchange.send(peer, [arrival.message.memory for arrival in arrivals])

        relays = [self._relayed(arrivals, partial(relay, arrivals), relay_of) for arrivals in far.values()]
        return [*relays, *here, exchange.sent()]

    def _sums(
        self,
        exchange: _Exchange,
        operands: Sequence[tuple[Operand, GradScaling]],
        own: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        part: _PartOf,
    ) -> list[Work]:
        """Send every rank its part of the operands; add up what arrives, and this rank's ``own``, in ``targets``.

        Of ranks of other hosts come sums over their hosts, and they are sent the same.
        """
        routes = self._routes
        terms: list[dict[int, torch.Tensor]] = [{self.rank: mine} for mine in own]
        # What comes first of the others is received in the target itself, unless this rank's own lies there.
        first = min([*routes.neighbors] if len(routes.hosts) == 1 else routes.counterparts, default=-1)

        def parts(owner: int) -> list[torch.Tensor]:
            return [part(operand, owner) for operand, _ in operands]

        relay_sums: list[tuple[list[_Arrival], Callable[[], None]]] = []
        relayed = routes.relayed[self.rank]
        for owner in relayed if routes.neighbors else ():
            for_owner: list[dict[int, torch.Tensor]] = [{self.rank: mine} for mine in parts(owner)]
            waited: list[_Arrival] = []
            for peer in routes.neighbors:
                for term in for_owner:
                    term[peer] = torch.empty_like(term[self.rank])
                waited += exchange.receive(peer, [term[peer] for term in for_owner])
            relay_sums.append((waited, partial(self._relay_sums, exchange, owner, for_owner)))
        arrivals: list[list[_Arrival]] = [[] for _ in operands]
        for peer in [*routes.counterparts, *routes.neighbors]:
            for term, mine, target in zip(terms, own, targets, strict=True):
                term[peer] = target if peer == first and target is not mine else torch.empty_like(target)
            for arrival in exchange.receive(peer, [term[peer] for term in terms]):
                for index in arrival.message.indices:
                    arrivals[index].append(arrival)
        for owner in () if routes.neighbors else relayed:
            exchange.send(owner, exchange.pack(parts(owner)))
        for peer in routes.neighbors:
            for owner in [*routes.relayed[peer], peer]:
                exchange.send(peer, exchange.pack(parts(owner)))
        sums = [
            HostWork(arrivals[index], partial(self._add_up, term, target, scaling))
            for index, ((_, scaling), term, target) in enumerate(zip(operands, terms, targets, strict=True))
        ]
        relays = [self._relayed(waited, relay, "launches") for waited, relay in relay_sums]
        # What was sent may be overwritten by sums: it has to be gone first.
        return [*relays, exchange.sent(), *sums]

    def _relayed(self, arrivals: Sequence[_Arrival], relay: Callable[[], None], relay_of: str) -> Work:
        """Return a work that is done when ``relay``, which passes on what arrives, has been called.

        By a thread, if there is anybody to pass it on to: other ranks must not have to wait until this one waits.
        Relays that follow launches and relays that follow waits use separate threads, because their orders differ.
        """
        work = HostWork(arrivals, relay)
        if not self._routes.neighbors:
            return work
        if relay_of not in self._record.relays:
            self._record.relays[relay_of] = RelayThread()
        return self._record.relays[relay_of].wait_for(work)

    def _relay_sums(self, exchange: _Exchange, owner: int, terms: Sequence[dict[int, torch.Tensor]]) -> None:
        """Send a rank of another host what this host has for it."""
        exchange.send(owner, exchange.pack([_fold_in_order(term, self.rank) for term in terms]))

    def _add_up(self, terms: dict[int, torch.Tensor], target: torch.Tensor, scaling: GradScaling) -> None:
        """Add the terms of this host, and the sums of others, in an order that does not depend on which came first."""
        here = self._routes.host
        by_host = {rank: term for rank, term in terms.items() if rank not in here}
        if by_host:
            own = {rank: terms[rank] for rank in here}
            by_host[min(here)] = _fold_in_order(own, self.rank) if len(own) > 1 else own[self.rank]
        ordered = by_host or terms
        fold([ordered[rank] for rank in sorted(ordered)], target, 1 / scaling.after)

    def _exchange(self, kind: str, requests: Sequence[CommRequest]) -> _Exchange:
        """Begin an exchange with the next tag, which is equal on ranks where kind, units and count are."""
        count = self._record.exchanges = (self._record.exchanges + 1) % _COUNTED
        what = "\0".join((kind, *(request.unit for request in requests))).encode()
        tag = _TAG | (zlib.crc32(what) % 0x4000) * _COUNTED | count
        return _Exchange(self.group, tag, self.direct_bytes)

    @functools.cached_property
    def _routes(self) -> Routes:
        """See [Note: Messages between hosts]. Not known before the first launch, which all ranks take part in."""
        if self._record.routes is None:
            self._record.routes = Routes(self._hosts(), self.rank)
        return self._record.routes

    def _hosts(self) -> list[list[int]]:
        """Return the ranks of each host."""
        if self.world_size < 3:  # each has nobody to pass anything on to
            return [[rank] for rank in range(self.world_size)]
        own = torch.tensor(list(this_host()), dtype=torch.uint8, device="cpu")
        every = own.new_empty(self.world_size * own.numel())
        gathered = all_gather_single(every, own, group=self.group, async_op=True)
        assert gathered is not None, "an asynchronous collective returns a work"
        HostCommStream().issue(lambda: [gathered], lambda: None).wait()
        names = [bytes(name.tolist()) for name in every.chunk(self.world_size)]
        return [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]


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

    _group: dist.ProcessGroup
    _tag: int
    _small: int  # tensors of fewer bytes are joined
    _sends: list[Work]

    def __init__(self, group: dist.ProcessGroup, tag: int, small: int) -> None:
        self._group, self._tag, self._small, self._sends = group, tag, small, []

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the messages that carry ``tensors``."""
        messages = self._messages(tensors)
        for message in messages:
            for tensor, place in message.copies:
                place.copy_(tensor)
        return [message.memory for message in messages]

    def send(self, peer: int, messages: Sequence[torch.Tensor]) -> None:
        """Start sending what ``pack`` made."""
        self._sends += [self._group.send([message], peer, self._tag) for message in messages]

    def receive(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[_Arrival]:
        """Start receiving what ``peer`` packed of tensors of the same sizes."""
        messages = self._messages(tensors)
        return [_Arrival(self._group.recv([each.memory], peer, self._tag), each) for each in messages]

    def sent(self) -> HostWork:
        """Return a work that waits for all sends issued before its wait."""
        return HostWork((), lambda: wait_for_all(self._sends))

    def _messages(self, tensors: Sequence[torch.Tensor]) -> list[_Message]:
        """Large tensors one by one, then small ones together, unless there is only one. Empty ones are not sent."""
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
    """Scale all operands of a launch by what comes before the sum; return them with the scaling of the sum."""
    operands = [(operand, request.scaling) for request in requests for operand in request.operands]
    for operand, scaling in operands:
        if scaling.before != 1:
            operand.unsharded.mul_(1 / scaling.before)
    return operands


def _fold_in_order(terms: dict[int, torch.Tensor], rank: int) -> torch.Tensor:
    """Add the terms of several ranks in their order, in memory of one that is not ``rank``'s, and return it."""
    target = terms[min(terms.keys() - {rank})]
    fold([terms[each] for each in sorted(terms)], target)
    return target
