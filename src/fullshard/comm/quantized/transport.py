"""A transport that sends large operands as blocks of 8-bit numbers.

[Note: Quantized collectives]
An all-gather sends this rank's shard as rows (see [Note: Rows]) through the transport underneath, and every rank turns
the rows of all ranks, its own included, back into values: all have the same bits.

A reduce-scatter sends each rank its part of the operands as rows, all to all, and adds what has arrived in fp32, in the
order of the ranks; this rank's own part is not quantized. The volume is that of a reduce-scatter of the rows.

An all-reduce deals the rows out in equal shares: all to all, a sum in fp32, and an all-gather of the sums, quantized
once more. All ranks get the same bits. The all-gather is issued when the first half is waited for, so ranks have to
wait for several all-reduces in the same order.

[Note: What is never quantized]
An operand says where parameters lie in it (its ``slices``). Small ones cost few bytes, and would share blocks with
others. What is in no slice is sent as it is, too: presence numbers, which quantized together with large gradients
would become 0; padding, in which anything may be by chance; and the data of tensor subclasses, whose meaning only they
know. What shares an operand with quantized slices is sent beside the rows. Operands of which nothing is quantized go to
the transport underneath in the same launch. Values that leave the model (checkpoints, ``summon_full_params``, exports)
are sent by ``ShardMesh.exact_transport``.

Messages are allocated with the launch and freed when it is over; results are written only by the host that waits (on
accelerators: on the stream that does), never from a thread of the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions

from fullshard.comm.base import (
    Collective,
    CommRequest,
    GradScaling,
    Kind,
    Operand,
    Transport,
    WrappingTransport,
    issue_all,
    received_bytes,
)
from fullshard.comm.gloo import GlooTransport
from fullshard.comm.quantized.blocks import BlockFormat
from fullshard.memory import HostWork, Work
from fullshard.policy import CommQuantization
from fullshard.progress import PROGRESS

__all__ = ["QUANTIZED_DTYPES", "QuantizedTransport", "Traffic"]

QUANTIZED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

_ALIGNMENT = 16  # bytes: of the message for one rank, below which NCCL copies byte by byte


@dataclass
class Traffic:
    """Bytes received in one kind of collective.

    Args:
        collectives: Number of operands so far.
        nbytes: Bytes that this rank has received from others.
        full_bytes: Bytes that it would have received in full precision.
        quantized_bytes: Those of ``full_bytes`` that belong to operands of which something was quantized.
    """

    collectives: int = 0
    nbytes: int = 0
    full_bytes: int = 0
    quantized_bytes: int = 0


class QuantizedTransport(WrappingTransport):
    """Sends large parameters and gradients in fewer bytes, see [Note: Quantized collectives].

    Args:
        base: The group's own transport.
        policy: What is quantized, and how. With neither ``all_gather`` nor ``reduce`` bytes are only counted.
        traffic: Counts bytes, by kind.
    """

    policy: CommQuantization
    traffic: dict[Kind, Traffic]

    def __init__(self, base: Transport, policy: CommQuantization, traffic: dict[Kind, Traffic] | None = None) -> None:
        super().__init__(base)
        self.policy, self.traffic = policy, {} if traffic is None else traffic
        self.reads_padding = policy.reduce is not None

    def smallest_direct(self, kind: Kind, shards: Sequence[int], *, copied: bool) -> int:
        """Return what the wrapped transport chooses; arguments as for ``Transport.smallest_direct``."""
        return self.base.smallest_direct(kind, shards, copied=copied)

    def _collectives(self, kind: Kind, requests: Sequence[CommRequest]) -> Sequence[Collective]:
        return self._sort(kind, requests, Traffic())[2]

    def _all_gather(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        layout, plain, _ = self._sort("all_gather", requests)
        if not layout.places:
            return self.base._all_gather(plain)
        with torch.inference_mode(False), torch.no_grad():
            sent = layout.message(1)
            layout.write(sent, lambda operand: operand.shard.unsqueeze(0))
            arrived = layout.message(self.world_size)
            rows = CommRequest(layout.unit, [Operand(sent.view(-1), arrived.view(-1))])
        works = self.base._all_gather([*plain, rows])
        finish = partial(layout.read, arrived, lambda operand: _by_rank(operand, self.world_size))
        return [HostWork(works, partial(_finish, finish, sent))]

    def _reduce_scatter(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        layout, plain, _ = self._sort("reduce_scatter", requests)
        if not layout.places:
            return self.base._reduce_scatter(plain)
        rank, peers = self.rank, self.world_size - 1
        with torch.inference_mode(False), torch.no_grad():
            sent, arrived = layout.message(peers), layout.message(peers)
            layout.write(sent[:rank], lambda operand: _by_rank(operand, peers + 1)[:rank])
            layout.write(sent[rank:], lambda operand: _by_rank(operand, peers + 1)[rank + 1 :])
        sizes = [0 if peer == rank else layout.nbytes for peer in range(peers + 1)]
        works = issue_all(
            [
                partial(self.base._reduce_scatter, plain) if plain else list,
                partial(_all_to_all, self.base, self.base.reduce_group, layout.unit, arrived, sent, sizes),
            ]
        )
        return [HostWork(works, partial(_finish, partial(layout.add_up, arrived, rank), sent))]

    def _all_reduce(self, requests: Sequence[CommRequest]) -> Sequence[Work]:
        layout, plain, _ = self._sort("all_reduce", requests)
        if not layout.places:
            return self.base._all_reduce(plain)
        size = layout.format.row_bytes
        with torch.inference_mode(False), torch.no_grad():
            # All rows of this rank, zeros behind them; and of every rank the rows that this one adds up.
            sent = torch.empty((1, self.world_size * layout.share * size), dtype=torch.uint8, device=layout.device)
            sent[:, layout.rows * size :] = 0
            layout.write(sent, lambda operand: operand.shard.unsqueeze(0))
            arrived = torch.empty_like(sent)
        works = issue_all(
            [
                partial(self.base._all_reduce, plain) if plain else list,
                partial(_all_to_all, self.base, self.base.group, layout.unit, arrived, sent, []),
            ]
        )
        return [HostWork(works, partial(_finish, partial(self._spread_sums, layout, arrived, sent), sent))]

    def _spread_sums(self, layout: _MessageLayout, arrived: torch.Tensor, sums: torch.Tensor) -> None:
        """Second half of an all-reduce: add up this rank's share, send it to all, and wait for ``sums`` of all."""
        form, shape = layout.format, (self.world_size, layout.share, layout.format.row_bytes)
        total = torch.zeros((1, layout.share * form.block), dtype=torch.float32, device=arrived.device)
        for rank in range(self.world_size):
            form.add(arrived.view(shape)[rank : rank + 1], total)
        factors = {place.scaling.before * place.scaling.after for place in layout.places}
        assert len(factors) == 1, "a quantized transport belongs to one bucket, which scales all its sums alike"
        factor = factors.pop()
        if factor != 1:
            total.mul_(1 / factor)
        sent = torch.empty((1, *shape[1:]), dtype=torch.uint8, device=arrived.device)
        form.encode(total, sent)
        for work in self.base._all_gather([CommRequest(layout.unit, [Operand(sent.view(-1), sums.view(-1))])]):
            work.wait()
        layout.read(sums, lambda operand: operand.unsharded.unsqueeze(0))

    # ---------------------------------------------------------------- what is quantized

    def _sort(
        self, kind: Kind, requests: Sequence[CommRequest], traffic: Traffic | None = None
    ) -> tuple[_MessageLayout, list[CommRequest], list[Collective]]:
        """Split operands into what is quantized and what is left to the transport underneath.

        Args:
            kind: Collective.
            requests: The operands.
            traffic: Counts bytes; None: that of the kind.

        Returns:
            What is quantized, what is left, and both as collectives for who records the launch.
        """
        name = self.policy.all_gather if kind == "all_gather" else self.policy.reduce
        layout = _MessageLayout(BlockFormat(name or "int8", self.policy.block), kind, self.world_size)
        traffic = self.traffic.setdefault(kind, Traffic()) if traffic is None else traffic
        plain, sent = [], []
        for unit, operands, scaling in requests:
            others = []
            for operand in operands:
                left, dtype = [operand], operand.shard.dtype
                received = full = received_bytes(kind, operand.unsharded.nbytes, self.world_size)
                spans = [] if name is None else self._spans(operand)
                if spans:
                    left, received = layout.take(unit, operand, scaling, spans)
                    dtype = layout.format.dtype
                    traffic.quantized_bytes += full
                others += left
                traffic.collectives += 1
                traffic.nbytes += received
                traffic.full_bytes += full
                sent.append(Collective(kind, unit, dtype, operand.unsharded.numel(), received, PROGRESS.launches))
            if others:
                plain.append(CommRequest(unit, others, scaling))
        return layout, plain, sent

    def _spans(self, operand: Operand) -> list[_Span]:
        """Cut the shard of an operand into spans that follow one another; return none if nothing is quantized."""
        if operand.shard.dtype not in QUANTIZED_DTYPES:
            return []
        spans: list[_Span] = []
        end = 0
        large = [each for each in operand.slices if each.numel and each.nbytes >= self.policy.min_bytes]
        for offset, numel, _ in large:
            if offset > end:
                spans.append((end, offset - end, False))
            spans.append((offset, numel, True))
            end = offset + numel
        if large and end < operand.shard.numel():
            spans.append((end, operand.shard.numel() - end, False))
        return spans


_Span = tuple[int, int, bool]  # of a shard: first element, number of elements, sent as rows or as they are


class _Place(NamedTuple):
    """The place of some elements of a shard in a message: as rows, or as they are behind all rows."""

    operand: Operand
    offset: int  # of the first element in the shard
    numel: int
    quantized: bool
    scaling: GradScaling
    at: int  # row, or byte behind all rows


class _MessageLayout:
    """The layout of the message for one rank: rows, then the spans that are sent in full precision."""

    format: BlockFormat
    kind: Kind
    unit: str  # of the first request
    places: list[_Place]
    rows: int
    _behind: int  # bytes behind the rows
    _world_size: int

    def __init__(self, format: BlockFormat, kind: Kind, world_size: int) -> None:
        self.format, self.kind, self.unit, self._world_size = format, kind, "", world_size
        self.places, self.rows, self._behind = [], 0, 0

    def take(
        self, unit: str, operand: Operand, scaling: GradScaling, spans: Sequence[_Span]
    ) -> tuple[list[Operand], int]:
        """Add an operand.

        Returns:
            What is left to the transport underneath: of an all-reduce, what is not quantized. And the bytes that this
            rank receives for the operand.
        """
        self.unit = self.unit or unit
        before, left = self._received_in_all(), []
        for offset, numel, quantized in spans:
            if quantized:
                self.places.append(_Place(operand, offset, numel, True, scaling, self.rows))
                self.rows += self.format.rows(numel)
            elif self.kind == "all_reduce":
                part = operand.unsharded.narrow(0, offset, numel)
                left.append(Operand(part, part))
            else:
                self.places.append(_Place(operand, offset, numel, False, scaling, self._behind))
                self._behind += _aligned(numel * operand.shard.element_size(), 4)
        beside = sum(received_bytes(self.kind, part.shard.nbytes, self._world_size) for part in left)
        return left, self._received_in_all() - before + beside

    @property
    def device(self) -> torch.device:
        """Device of the operands."""
        return self.places[0].operand.shard.device

    @property
    def share(self) -> int:
        """Rows that each rank adds up in an all-reduce; the last one may be short of some."""
        return -(-self.rows // self._world_size)

    @property
    def nbytes(self) -> int:
        """Size of the message for one rank."""
        return _aligned(self.rows * self.format.row_bytes + self._behind, _ALIGNMENT)

    def _received_in_all(self) -> int:
        """Bytes that this rank receives for all operands that were added with ``take``."""
        once = self.share * self.format.row_bytes * 2 if self.kind == "all_reduce" else self.nbytes
        return once * (self._world_size - 1)

    def message(self, ranks: int) -> torch.Tensor:
        """Allocate the messages of ``ranks`` ranks: ``(ranks, nbytes)`` of uint8."""
        return torch.empty((ranks, self.nbytes), dtype=torch.uint8, device=self.device)

    def write(self, message: torch.Tensor, values: Callable[[Operand], torch.Tensor]) -> None:
        """Write the operands' ``values``, ``(ranks, numel)``, into messages, ``(ranks, nbytes)``."""
        for place in self.places:
            part = values(place.operand).narrow(1, place.offset, place.numel)
            if place.quantized:
                self.format.encode(part, self._rows_in(message, place))
            else:
                self._bytes_in(message, place).copy_(part)

    def read(self, message: torch.Tensor, values: Callable[[Operand], torch.Tensor]) -> None:
        """Read the operands' ``values``, ``(ranks, numel)``, from messages, ``(ranks, nbytes)``."""
        for place in self.places:
            part = values(place.operand).narrow(1, place.offset, place.numel)
            if place.quantized:
                self.format.decode(self._rows_in(message, place), part)
            else:
                part.copy_(self._bytes_in(message, place))

    def add_up(self, message: torch.Tensor, rank: int) -> None:
        """Set all shards to the scaled sums of this rank's values and those in the messages of all others."""
        for place in self.places:
            self._add_up(place, message, rank)

    def _add_up(self, place: _Place, message: torch.Tensor, rank: int) -> None:
        operand, offset, numel, quantized, scaling, _ = place
        target = operand.shard.narrow(0, offset, numel).unsqueeze(0)
        own = _by_rank(operand, message.shape[0] + 1)[rank : rank + 1].narrow(1, offset, numel)
        total = target if target.dtype is torch.float32 else torch.empty_like(target, dtype=torch.float32)
        total.zero_()
        for term in range(message.shape[0] + 1):
            if term == rank:
                total.add_(own)
                continue
            sender = message[term - (term > rank)].unsqueeze(0)
            if quantized:
                self.format.add(self._rows_in(sender, place), total)
            else:
                total.add_(self._bytes_in(sender, place))
        factor = scaling.before * scaling.after
        if factor != 1:
            total.mul_(1 / factor)
        if total is not target:
            target.copy_(total)

    def _rows_in(self, message: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the rows of a span: ``(ranks, rows, row_bytes)``."""
        size, count = self.format.row_bytes, self.format.rows(place.numel)
        return message.narrow(1, place.at * size, count * size).view(-1, count, size)

    def _bytes_in(self, message: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the values of a span that is sent as it is: ``(ranks, numel)`` of the operand's dtype."""
        dtype = place.operand.shard.dtype
        start = self.rows * self.format.row_bytes + place.at
        return message.narrow(1, start, place.numel * dtype.itemsize).view(dtype)


def _finish(turn_into_values: Callable[[], None], kept: torch.Tensor) -> None:
    """Turn messages into values. Until then ``kept`` is read by works of the launch."""
    with torch.inference_mode(False), torch.no_grad():
        turn_into_values()


def _by_rank(operand: Operand, world_size: int) -> torch.Tensor:
    """View the unsharded tensor as ``(world_size, numel)``."""
    return operand.unsharded.view(world_size, -1)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _all_to_all(
    base: Transport,
    group: dist.ProcessGroup,
    unit: str,
    arrived: torch.Tensor,
    sent: torch.Tensor,
    sizes: Sequence[int],
) -> list[Work]:
    """Exchange messages of these sizes in bytes with every rank, in rank order; without sizes, of equal ones."""
    if isinstance(base, GlooTransport):
        parts = list(sizes) or [sent.numel() // base.world_size] * base.world_size
        return base.all_to_all(unit, arrived.view(-1).split_with_sizes(parts), sent.view(-1).split_with_sizes(parts))
    options = AllToAllOptions()
    options.asyncOp = True
    return [group.alltoall_base(arrived.view(-1), sent.view(-1), list(sizes), list(sizes), options)]
