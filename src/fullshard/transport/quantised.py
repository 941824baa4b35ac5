"""Fewer bytes than the values have: a transport that rounds what is large to blocks of 8-bit numbers.

[Note: Rounded gathers and reductions]
A gather sends this rank's piece as rows (see [Note: Rows]) through the transport underneath, and every rank turns the
rows of all ranks, its own included, back into values: all have the same bits.

A reduce-scatter sends each rank its part of the regions as rows, all to all, and adds what has arrived in fp32, in the
order of the ranks; this rank's own part is not rounded. The volume is that of a reduce-scatter of the rows.

An all-reduce deals the rows out in equal shares: all to all, a sum in fp32, and a gather of the sums, rounded once
more. All ranks get the same bits. The gather is issued when the first half is waited for, so ranks have to wait for
several all-reduces in the same order.

What does not qualify goes to the transport underneath in the same launch. A message may also have *spans* that are sent
as they are beside the rows, such as numbers of the engine, which say who has a gradient and must not become 0.

Messages are allocated with the launch and freed when it is over; regions and pieces are written only by the host that
waits (on accelerators: on the stream that does), never from a thread of the back end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from fullshard.memory import Work
from fullshard.policy import Wire
from fullshard.transport.base import (
    Collective,
    Division,
    Kind,
    Move,
    Parcel,
    Transport,
    _launches,
    _observers,
    issue_all,
)
from fullshard.transport.quantisation import BlockFormat

__all__ = ["ROUNDED_DTYPES", "Guide", "QuantisedTransport", "Span", "Traffic"]

ROUNDED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

_ALIGNMENT = 16  # bytes: of the message for one rank, below which NCCL copies byte by byte


class Span(NamedTuple):
    """Some elements of a piece. Spans of a piece follow one another and cover it.

    Args:
        offset: First element.
        numel: How many.
        rounded: Whether they travel as rows; if not, as they are.
    """

    offset: int
    numel: int
    rounded: bool


class Guide(Protocol):
    """What the owner of a transport knows of its moves. Answers must be equal on all ranks."""

    def exact(self, kind: Kind, move: Move) -> bool:
        """Whether the move, of a dtype that could be rounded, is none that the wire is for."""

    def spans(self, kind: Kind, move: Move) -> Sequence[Span] | None:
        """How a move that is made of several tensors is cut; None: its size decides about all of it."""

    def has_holes(self, numel: int) -> bool:
        """Whether parts of a reduction's packed region of this size are never written: what is there by chance, an inf
        even, would be rounded together with gradients.
        """


@dataclass
class Traffic:
    """What has travelled in one kind of collective.

    Args:
        collectives: Moves so far.
        nbytes: Bytes that this rank has received from others.
        full_bytes: Bytes that it would have received without rounding.
        rounded_bytes: Those of ``full_bytes`` that belong to moves of which something was rounded.
    """

    collectives: int = 0
    nbytes: int = 0
    full_bytes: int = 0
    rounded_bytes: int = 0


class QuantisedTransport(Transport):
    """See [Note: Rounded gathers and reductions].

    Args:
        base: The group's own transport.
        wire: What is rounded, and how. With neither ``gather`` nor ``reduce`` it only counts.
        traffic: Counts what travels, by kind; moves that ``guide`` says are exact are not counted.
        guide: None: sizes decide.
    """

    base: Transport
    wire: Wire
    guide: Guide | None
    traffic: dict[Kind, Traffic]
    _residuals: dict[object, torch.Tensor]  # fp32; what rounding has taken away in the last step, by place

    def __init__(
        self, base: Transport, wire: Wire, traffic: dict[Kind, Traffic] | None = None, guide: Guide | None = None
    ) -> None:
        super().__init__(base.group)
        self.base, self.wire, self.guide = base, wire, guide
        self.traffic = {} if traffic is None else traffic
        self.direct_bytes, self.tiny_bytes, self.hooked = base.direct_bytes, base.tiny_bytes, base.hooked
        self.sums_at_once = False  # the sums are rounded and sent when the parts have come
        self.reduce_group = base.reduce_group
        self._residuals = {}

    def allocate(
        self, kind: Literal["gather", "reduce"], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """As the transport underneath does; but zeros for a reduction that has holes."""
        if kind == "reduce" and self.guide is not None and self.guide.has_holes(numel):
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.base.allocate(kind, numel, dtype, device)

    def release(self, kind: Literal["gather", "reduce"], memory: torch.Tensor) -> None:
        """As the transport underneath does, if the memory is its own."""
        if kind == "gather" or self.guide is None or not self.guide.has_holes(memory.numel()):
            self.base.release(kind, memory)

    def separate_reduce_group(self, enable: bool) -> None:
        """As the transport underneath does."""
        self.base.separate_reduce_group(enable)
        self.reduce_group = self.base.reduce_group

    def _notify(self, kind: Kind, parcels: Sequence[Parcel]) -> None:
        """Nothing yet: what is recorded is what travels, see :meth:`_sort`."""

    def _gather(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        cargo, plain = self._sort("gather", parcels)
        if not cargo.places:
            return self.base._gather(plain)
        with torch.inference_mode(False), torch.no_grad():
            sent = cargo.message(1)
            cargo.write(sent, lambda move: move.piece.unsqueeze(0))
            arrived = cargo.message(self.world_size)
            rows = Parcel(cargo.unit, [Move(sent.view(-1), arrived.view(-1))])
        works = self.base._gather([*plain, rows])
        finish = partial(cargo.read, arrived, lambda move: _by_rank(move, self.world_size))
        return [*works, _Then(finish, sent)]

    def _reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        cargo, plain = self._sort("reduce", parcels)
        if not cargo.places:
            return self.base._reduce(plain)
        rank, peers = self.rank, self.world_size - 1
        with torch.inference_mode(False), torch.no_grad():
            sent, arrived = cargo.message(peers), cargo.message(peers)
            cargo.write(sent[:rank], lambda move: _by_rank(move, peers + 1)[:rank])
            cargo.write(sent[rank:], lambda move: _by_rank(move, peers + 1)[rank + 1 :])
        sizes = [0 if peer == rank else cargo.nbytes for peer in range(peers + 1)]
        works = issue_all(
            [
                partial(self.base._reduce, plain) if plain else list,
                partial(_all_to_all, self.base.reduce_group, arrived, sent, sizes),
            ]
        )
        return [*works, _Then(partial(cargo.add_up, arrived, rank), sent)]

    def _all_reduce(self, parcels: Sequence[Parcel]) -> Sequence[Work]:
        cargo, plain = self._sort("all_reduce", parcels)
        if not cargo.places:
            return self.base._all_reduce(plain)
        shares = _Shares(self, cargo)
        works = issue_all([partial(self.base._all_reduce, plain) if plain else list, shares.deal_out])
        return [*works, _Then(shares.finish)]

    # ---------------------------------------------------------------- what travels how

    def _sort(self, kind: Kind, parcels: Sequence[Parcel]) -> tuple[_Cargo, list[Parcel]]:
        """What is rounded, and what is left to the transport underneath. Counts and records both."""
        name = self.wire.gather if kind == "gather" else self.wire.reduce
        cargo = _Cargo(BlockFormat(name or "int8", self.wire.block), kind, self.world_size)
        plain, moved = [], []
        for unit, moves, division in parcels:
            others = []
            for move in moves:
                exact = self.guide is not None and self.guide.exact(kind, move)
                spans = None if name is None or exact else self._spans(kind, move)
                if spans is None:
                    others.append(move)
                else:
                    others += cargo.take(unit, move, division, spans)
                moved.append((unit, move, exact, spans is not None))
            if others:
                plain.append(Parcel(unit, others, division))
        launch = next(_launches)
        for unit, move, exact, rounded in moved:
            whole = move.region.nbytes * (self.world_size - 1) * (2 if kind == "all_reduce" else 1) // self.world_size
            received = cargo.received[id(move)] if rounded else whole
            if not exact:
                self._count(kind, received, whole, whole if rounded else 0)
            dtype = cargo.format.dtype if rounded else move.piece.dtype
            for observer in _observers:
                observer(Collective(kind, unit, dtype, move.region.numel(), received, launch))
        return cargo, plain

    def _spans(self, kind: Kind, move: Move) -> Sequence[Span] | None:
        """The spans of a move of which something is rounded; None: it travels as it is."""
        numel = move.piece.numel()
        if move.piece.dtype not in ROUNDED_DTYPES or not numel:
            return None
        spans = None if self.guide is None else self.guide.spans(kind, move)
        if spans is None:
            spans = [Span(0, numel, move.region.nbytes >= self.wire.min_bytes)]
        return spans if any(span.rounded for span in spans) else None

    def _count(self, kind: Kind, received: int, whole: int, rounded: int) -> None:
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.collectives += 1
        traffic.nbytes += received
        traffic.full_bytes += whole
        traffic.rounded_bytes += rounded

    def residual(self, place: object, like: torch.Tensor) -> torch.Tensor:
        """What rounding has taken away at ``place`` in the last step: zeros at first, of the shape of ``like``."""
        if place not in self._residuals:
            self._residuals[place] = torch.zeros_like(like, dtype=torch.float32)
        return self._residuals[place]


class _Place(NamedTuple):
    """Where one span lies in a message: from row ``at`` on, or from byte ``at`` behind all rows."""

    move: Move
    span: Span
    division: Division
    at: int


class _Cargo:
    """What is rounded in one launch, and where it lies in the message for one rank: rows, then what is sent as is."""

    format: BlockFormat
    kind: Kind
    unit: str  # of the first parcel
    places: list[_Place]
    rows: int
    received: dict[int, int]  # bytes that this rank receives for a move, by its id
    _behind: int  # bytes behind the rows
    _world_size: int

    def __init__(self, format: BlockFormat, kind: Kind, world_size: int) -> None:
        self.format, self.kind, self.unit, self._world_size = format, kind, "", world_size
        self.places, self.rows, self.received, self._behind = [], 0, {}, 0

    def take(self, unit: str, move: Move, division: Division, spans: Sequence[Span]) -> list[Move]:
        """Add a move. Returns what of it is left to the transport underneath: of an all-reduce, what is not rounded."""
        self.unit = self.unit or unit
        before, left = self._received_in_all(), []
        for span in spans:
            if span.rounded:
                self.places.append(_Place(move, span, division, self.rows))
                self.rows += self.format.rows(span.numel)
            elif self.kind == "all_reduce":
                part = move.region.narrow(0, span.offset, span.numel)
                left.append(Move(part, part))
            else:
                self.places.append(_Place(move, span, division, self._behind))
                self._behind += _aligned(span.numel * move.piece.element_size(), 4)
        others = self._world_size - 1
        beside = sum(2 * part.piece.nbytes * others // self._world_size for part in left)
        self.received[id(move)] = self._received_in_all() - before + beside
        return left

    @property
    def share(self) -> int:
        """Rows that each rank adds up in an all-reduce; the last one may be short of some."""
        return -(-self.rows // self._world_size)

    @property
    def nbytes(self) -> int:
        """Size of the message for one rank."""
        return _aligned(self.rows * self.format.row_bytes + self._behind, _ALIGNMENT)

    def _received_in_all(self) -> int:
        """Bytes that this rank receives for all that was taken."""
        once = self.share * self.format.row_bytes * 2 if self.kind == "all_reduce" else self.nbytes
        return once * (self._world_size - 1)

    def message(self, ranks: int) -> torch.Tensor:
        """Memory for so many ranks' messages: ``(ranks, nbytes)`` of uint8."""
        return torch.empty((ranks, self.nbytes), dtype=torch.uint8, device=self.places[0].move.piece.device)

    def write(self, message: torch.Tensor, values: Callable[[Move], torch.Tensor]) -> None:
        """Put the moves' ``values``, ``(ranks, numel)``, into messages, ``(ranks, nbytes)``."""
        for place in self.places:
            part = values(place.move).narrow(1, place.span.offset, place.span.numel)
            if place.span.rounded:
                self.format.encode(part, self._rows_in(message, place))
            else:
                self._bytes_in(message, place).copy_(part)

    def read(self, message: torch.Tensor, values: Callable[[Move], torch.Tensor]) -> None:
        """Put what is in messages, ``(ranks, nbytes)``, into the moves' ``values``, ``(ranks, numel)``."""
        for place in self.places:
            part = values(place.move).narrow(1, place.span.offset, place.span.numel)
            if place.span.rounded:
                self.format.decode(self._rows_in(message, place), part)
            else:
                part.copy_(self._bytes_in(message, place))

    def add_up(self, message: torch.Tensor, rank: int) -> None:
        """Set all pieces to the sums of this rank's own values and those in messages of all others, divided."""
        for place in self.places:
            self._add_up(place, message, rank)

    def _add_up(self, place: _Place, message: torch.Tensor, rank: int) -> None:
        move, (offset, numel, _), division, _ = place
        target = move.piece.narrow(0, offset, numel).unsqueeze(0)
        own = _by_rank(move, message.shape[0] + 1)[rank : rank + 1].narrow(1, offset, numel)
        total = target if target.dtype is torch.float32 else torch.empty_like(target, dtype=torch.float32)
        total.zero_()
        for term in range(message.shape[0] + 1):
            if term == rank:
                total.add_(own)
                continue
            sender = message[term - (term > rank)].unsqueeze(0)
            if place.span.rounded:
                self.format.add(self._rows_in(sender, place), total)
            else:
                total.add_(self._bytes_in(sender, place))
        factor = division.before * division.after
        if factor != 1:
            total.mul_(1 / factor)
        if total is not target:
            target.copy_(total)

    def _rows_in(self, message: torch.Tensor, place: _Place) -> torch.Tensor:
        """The rows of a span: ``(ranks, rows, row_bytes)``."""
        size, count = self.format.row_bytes, self.format.rows(place.span.numel)
        return message.narrow(1, place.at * size, count * size).view(-1, count, size)

    def _bytes_in(self, message: torch.Tensor, place: _Place) -> torch.Tensor:
        """The values of a span that is sent as it is: ``(ranks, numel)`` of the move's dtype."""
        dtype = place.move.piece.dtype
        start = self.rows * self.format.row_bytes + place.at
        return message.narrow(1, start, place.span.numel * dtype.itemsize).view(dtype)


class _Shares:
    """A rounded all-reduce under way, see [Note: Rounded gathers and reductions].

    Args:
        transport: Whose it is.
        cargo: Rows only.
    """

    transport: QuantisedTransport
    cargo: _Cargo
    _sent: torch.Tensor  # (1, bytes): all rows of this rank, and behind them zeros
    _arrived: torch.Tensor  # the same size: this rank's share of the rows of every rank

    def __init__(self, transport: QuantisedTransport, cargo: _Cargo) -> None:
        self.transport, self.cargo = transport, cargo
        ranks, size = transport.world_size, cargo.format.row_bytes
        with torch.inference_mode(False), torch.no_grad():
            device = cargo.places[0].move.piece.device
            self._sent = torch.empty((1, ranks * cargo.share * size), dtype=torch.uint8, device=device)
            self._sent[:, cargo.rows * size :] = 0
            if transport.wire.error_feedback:
                self._write_with_feedback()
            else:
                cargo.write(self._sent, lambda move: move.piece.unsqueeze(0))
            self._arrived = torch.empty_like(self._sent)

    def deal_out(self) -> list[Work]:
        """Send every rank its share of the rows."""
        return _all_to_all(self.transport.base.group, self._arrived, self._sent, [])

    def finish(self) -> None:
        """Add up this rank's share, send the sums to all, and wait for theirs."""
        form, ranks, cargo = self.cargo.format, self.transport.world_size, self.cargo
        arrived = self._arrived.view(ranks, cargo.share, form.row_bytes)
        total = torch.zeros((1, cargo.share * form.block), dtype=torch.float32, device=arrived.device)
        for rank in range(ranks):
            form.add(arrived[rank : rank + 1], total)
        factor = self._factor()
        if factor != 1:
            total.mul_(1 / factor)
        sent = torch.empty((1, cargo.share, form.row_bytes), dtype=torch.uint8, device=arrived.device)
        if self.transport.wire.error_feedback:
            self._encode_with_feedback(("sums", cargo.rows), total, sent)
        else:
            form.encode(total, sent)
        spread = Parcel(cargo.unit, [Move(sent.view(-1), self._sent.view(-1))])
        for work in self.transport.base._gather([spread]):
            work.wait()
        cargo.read(self._sent, lambda move: move.region.unsqueeze(0))

    def _factor(self) -> float:
        """What sums are divided by. A share may have rows of several moves."""
        factors = {place.division.before * place.division.after for place in self.cargo.places}
        assert len(factors) == 1, "a transport that rounds belongs to one bucket, which has one division"
        return factors.pop()

    def _write_with_feedback(self) -> None:
        size = self.cargo.format.row_bytes
        for index, (move, span, _, at) in enumerate(self.cargo.places):
            part = move.piece.narrow(0, span.offset, span.numel).unsqueeze(0)
            count = self.cargo.format.rows(span.numel)
            rows = self._sent.narrow(1, at * size, count * size).view(-1, count, size)
            self._encode_with_feedback((index, span), part, rows)

    def _encode_with_feedback(self, place: object, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode values and what was taken from them in the last step; remember what is taken now."""
        residual = self.transport.residual(place, values)
        residual.add_(values)
        self.cargo.format.encode(residual, rows)
        self.cargo.format.add(rows, residual, -1.0)
        # An overflow is the present step's only: kept, it would come back in every step.
        residual.nan_to_num_(0.0, 0.0, 0.0)


class _Then:
    """What is left to do when the works before it in the launch were waited for.

    Args:
        finish: Does it.
        kept: What those works may still read.
    """

    __slots__ = ("_finish", "_kept")

    def __init__(self, finish: Callable[[], None], kept: torch.Tensor | None = None) -> None:
        self._finish, self._kept = finish, kept

    def wait(self) -> None:
        """Do it."""
        with torch.inference_mode(False), torch.no_grad():
            self._finish()


def _by_rank(move: Move, world_size: int) -> torch.Tensor:
    """A region as ``(world_size, numel)``."""
    return move.region.view(world_size, -1)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _all_to_all(
    group: dist.ProcessGroup, arrived: torch.Tensor, sent: torch.Tensor, sizes: Sequence[int]
) -> list[Work]:
    """Exchange messages of so many bytes with every rank; no sizes: equal ones. Rank order on both sides."""
    options = AllToAllOptions()
    options.asyncOp = True
    return [group.alltoall_base(arrived.view(-1), sent.view(-1), list(sizes), list(sizes), options)]
