"""What a user has chosen for the wire of one unit, and what the unit knows of the moves that its transports round.

[Note: What is never rounded]
Full parameters outside of training (checkpoints, ``summon_full_params``, exports) have to be the very values: they
travel by :attr:`ShardMesh.exact_transport`. What tensor subclasses send has a meaning that only they
know. Small parameters cost few bytes, and would share blocks with others. And beside gradients travel the numbers that
say who has any, see [Note: Gradients that are missing on some ranks]: rounded together with large gradients they would
become 0. All of these travel as they are: those that share a message with rounded ones as spans of it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from fullshard.engine.bucket import BufferBucket
from fullshard.engine.extension import ExtensionBucket
from fullshard.engine.flat_bucket import FlatReducer
from fullshard.engine.mesh import ShardMesh
from fullshard.engine.reducer import PerParameterReducer
from fullshard.layout import PerParameterLayout, Route, Slot
from fullshard.policy import Wire
from fullshard.transport import Move, Transport
from fullshard.transport.base import Kind
from fullshard.transport.quantised import QuantisedTransport, Span, Traffic

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["Axis", "UnitWire", "is_small"]

Axis = Literal["shard", "replicate"]


class UnitWire:
    """The wire of one unit, on both axes of its mesh. An axis without one is only counted.

    Args:
        shard: For the shard axis; None: everything travels as it is.
        replicate: The same for the replicate axis.
    """

    wires: dict[Axis, Wire]
    traffic: dict[Axis, dict[Kind, Traffic]]
    unit: weakref.ref[Unit] | None  # whose it is; None until that is made

    def __init__(self, shard: Wire | None, replicate: Wire | None) -> None:
        self.wires = {"shard": shard or Wire(), "replicate": replicate or Wire()}
        self.traffic = {"shard": {}, "replicate": {}}
        self.unit = None

    def copy(self) -> UnitWire:
        """The same choice, for another unit; nothing has travelled there."""
        return UnitWire(self.wires["shard"], self.wires["replicate"])

    def on(self, mesh: ShardMesh) -> ShardMesh:
        """The same ranks with transports that round."""
        return mesh.rounding(self._around(mesh.transport, "shard"), self._around(mesh.replica_transport, "replicate"))

    def _around(self, base: Transport | None, axis: Axis) -> Transport | None:
        if base is None:
            return None
        wire = self.wires[axis]
        return QuantisedTransport(base, wire, self.traffic[axis], _UnitGuide(self, wire.min_bytes))


class _UnitGuide:
    """See :class:`fullshard.transport.quantised.Guide`."""

    _wire: UnitWire
    _min_bytes: int
    _known: dict[tuple[Kind, int, int, int], Sequence[Span] | None]  # see `spans`

    def __init__(self, wire: UnitWire, min_bytes: int) -> None:
        self._wire, self._min_bytes, self._known = wire, min_bytes, {}

    def exact(self, kind: Kind, move: Move) -> bool:
        """Whether it is what a tensor subclass sends."""
        unit = self._unit()
        if kind != "gather" or unit is None:
            return False
        regions = (r for b in unit.buckets if isinstance(b, ExtensionBucket) for fill in b.fills for r in fill.regions)
        own = move.region.untyped_storage()._cdata
        return any(region.tensor(0, (0,), (1,)).untyped_storage()._cdata == own for region in regions)

    def spans(self, kind: Kind, move: Move) -> Sequence[Span] | None:
        """The parameters in a packed message, or in rows: known by its size.

        Where several layouts of the unit have that size, as when other parameters become trainable, it is cut as all
        of them ask. That costs a few rows and cannot go wrong: spans always cover all of the piece.
        """
        unit, numel, itemsize = self._unit(), move.piece.numel(), move.piece.element_size()
        if unit is None:
            return None
        key = (kind, numel, itemsize, sum(len(bucket.reducers) for bucket in unit.buckets))
        if key not in self._known:
            self._known[key] = _together(self._cuts(unit, kind, numel, itemsize), numel)
        return self._known[key]

    def has_holes(self, numel: int) -> bool:
        """Whether it is the message of a reducer that rounds on any axis, and packs parameters one by one.

        It writes nothing between them, nor behind the last rows where ranks do not have equally many. What is there
        in the message gets into the rows that are reduced over the replicate axis.
        """
        unit = self._unit()
        if unit is None or all(wire.reduce is None for wire in self._wire.wires.values()):
            return False
        rows = (r for bucket in unit.buckets for r in bucket.reducers if isinstance(r, PerParameterReducer))
        return any(reducer.message.numel == numel for reducer in rows)

    def _unit(self) -> Unit | None:
        return None if self._wire.unit is None else self._wire.unit()

    def _cuts(self, unit: Unit, kind: Kind, numel: int, itemsize: int) -> list[_Cut]:
        if kind == "gather":
            found = [b.layout for b in unit.buckets if isinstance(b, BufferBucket) and b.layout.message_numel == numel]
            return [self._packed(layout, layout.message_offset, itemsize) for layout in found]
        reducers = [reducer for bucket in unit.buckets for reducer in bucket.reducers]
        rows = [r for r in reducers if isinstance(r, PerParameterReducer)]
        if kind == "reduce":
            packed = [r.layout for r in rows if r.layout.message_numel == numel]
            return [self._packed(layout, layout.message_offset, itemsize) for layout in packed]
        cuts = [
            self._packed(r.layout, r.layout.shard_numel - r.rows_numel, itemsize) for r in rows if r.rows_numel == numel
        ]
        for flat in reducers:
            if isinstance(flat, FlatReducer) and flat.rows_numel == numel:
                small = flat.presence_offset * flat.mesh.world_size * itemsize < self._min_bytes
                cuts.append([(0, small), (flat.presence_offset, True)])
        return cuts

    def _packed(self, layout: PerParameterLayout, start: int, itemsize: int) -> _Cut:
        slots = [slot for slot in layout.slots if slot.shard_offset >= start and slot.piece_numel]
        begins = {s.shard_offset - start: is_small(s, itemsize, self._min_bytes) for s in slots}
        gaps = {s.shard_offset - start + s.piece_numel: True for s in slots}
        return sorted((gaps | begins).items())


# Where each parameter begins, and where there is a gap behind it; and whether that travels as it is. Nobody reads
# gaps, but what is in them by chance must not be rounded together with what is beside them.
_Cut = list[tuple[int, bool]]


def is_small(slot: Slot, itemsize: int, min_bytes: int) -> bool:
    """Whether a parameter travels as it is, for its size or because every rank has all of it."""
    replicated = slot.route is Route.REPLICATED or slot.parameter.replicated
    return replicated or slot.parameter.numel * itemsize < min_bytes


class _Edge(NamedTuple):
    offset: int
    small: bool


def _together(cuts: Sequence[_Cut], numel: int) -> Sequence[Span] | None:
    """Spans that are cut wherever one of ``cuts`` is, and small where one of them is; None if there are none."""
    cuts = [cut if cut[0][0] == 0 else [(0, True), *cut] for cut in cuts if cut]
    if not cuts:
        return None
    offsets = sorted({offset for cut in cuts for offset, _ in cut if offset < numel})
    edges = [_Edge(offset, any(_small_at(cut, offset) for cut in cuts)) for offset in offsets]
    return _merged(edges, numel)


def _small_at(cut: Iterable[tuple[int, bool]], offset: int) -> bool:
    return [small for start, small in cut if start <= offset][-1]


def _merged(edges: Sequence[_Edge], numel: int) -> list[Span]:
    """Spans that begin at ``edges``; neighbours that are small become one."""
    spans: list[Span] = []
    for small, group in itertools.groupby(edges, key=lambda edge: edge.small):
        found = list(group)
        begins = [found[0].offset] if small else [edge.offset for edge in found]
        spans += [Span(offset, 0, not small) for offset in begins]
    ends = [*(span.offset for span in spans[1:]), numel]
    return [span._replace(numel=end - span.offset) for span, end in zip(spans, ends, strict=True)]
