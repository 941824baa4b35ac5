"""Whether a wire is active: the bytes that have travelled, and what of a model is rounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.engine.bucket import Bucket, BufferBucket
from fullshard.engine.extension import ExtensionBucket
from fullshard.engine.flat_bucket import FlatBucket
from fullshard.engine.wire import Axis
from fullshard.layout import Route
from fullshard.policy import Wire
from fullshard.transport.base import Kind
from fullshard.transport.quantised import ROUNDED_DTYPES

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["WireReport", "WireTraffic", "WiredParameter"]

_KINDS: tuple[tuple[Axis, Kind], ...] = (("shard", "gather"), ("shard", "reduce"), ("replicate", "all_reduce"))
_SHOWN = 12  # parameters that travel as they are; the others are counted


@dataclass(frozen=True)
class WireTraffic:
    """What one rank has received in one kind of collective.

    Args:
        axis: Over which axis of the mesh.
        kind: In which collectives.
        collectives: How many of them.
        nbytes: Bytes received from other ranks, scales included.
        full_bytes: Bytes that it would have been in full precision.
        rounded_bytes: Those of ``full_bytes`` that belong to collectives of which something was rounded.
    """

    axis: Axis
    kind: Kind
    collectives: int
    nbytes: int
    full_bytes: int
    rounded_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes received over those of full precision; 1.0 if there were none."""
        return self.nbytes / self.full_bytes if self.full_bytes else 1.0


@dataclass(frozen=True)
class WiredParameter:
    """How one parameter travels: ``"int8"``, ``"fp8"``, or in brackets why it travels as it is.

    Args:
        unit: Name of its unit; ``""`` for the root.
        fqn: Its name.
        gather: When it is gathered to compute with.
        reduce: Its gradient, over the shard axis.
        all_reduce: Its gradient, over the replicate axis.
    """

    unit: str
    fqn: str
    gather: str
    reduce: str
    all_reduce: str

    @property
    def rounded(self) -> bool:
        """Whether it is rounded anywhere."""
        return not all(text.startswith("(") for text in (self.gather, self.reduce, self.all_reduce))


@dataclass(frozen=True)
class WireReport:
    """What ``set_wire`` does to a model, on this rank. ``str`` of it is a table.

    Gathers that are not for computing, as those of checkpoints, are exact, and are not counted.

    Args:
        traffic: By axis and kind, since ``set_wire``.
        parameters: All of them, unit by unit.
    """

    traffic: tuple[WireTraffic, ...]
    parameters: tuple[WiredParameter, ...]

    @classmethod
    def of(cls, units: Iterable[Unit]) -> WireReport:
        """The report on some units."""
        found = list(units)
        traffic = [_traffic(found, axis, kind) for axis, kind in _KINDS]
        return cls(tuple(t for t in traffic if t.collectives), tuple(p for unit in found for p in _parameters(unit)))

    @property
    def nbytes(self) -> int:
        """Bytes received in all."""
        return sum(traffic.nbytes for traffic in self.traffic)

    @property
    def full_bytes(self) -> int:
        """Bytes that they would have been in full precision."""
        return sum(traffic.full_bytes for traffic in self.traffic)

    @property
    def ratio(self) -> float:
        """Bytes received over those of full precision; 1.0 if there were none."""
        return self.nbytes / self.full_bytes if self.full_bytes else 1.0

    @property
    def active(self) -> bool:
        """Whether anything that has travelled was rounded."""
        return any(traffic.rounded_bytes for traffic in self.traffic)

    def __str__(self) -> str:
        lines = [f"{'axis':<10} {'collective':<11} {'moves':>7} {'received':>12} {'in full':>12} {'ratio':>6}"]
        for each in self.traffic:
            lines.append(
                f"{each.axis:<10} {each.kind:<11} {each.collectives:>7} {_mib(each.nbytes)} {_mib(each.full_bytes)} "
                f"{each.ratio:>6.3f}"
            )
        if not self.traffic:
            lines.append("nothing has travelled since set_wire")
        rounded = sum(parameter.rounded for parameter in self.parameters)
        lines.append(f"{rounded} of {len(self.parameters)} parameters are rounded; as they are travel:")
        whole = [parameter for parameter in self.parameters if not parameter.rounded]
        lines += [f"  {each.fqn}: {each.gather[1:-1]}" for each in whole[:_SHOWN]]
        if len(whole) > _SHOWN:
            lines.append(f"  and {len(whole) - _SHOWN} more")
        return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:>8.2f} MiB"


def _traffic(units: Iterable[Unit], axis: Axis, kind: Kind) -> WireTraffic:
    wires = (unit.settings.collectives.wire for unit in units)
    seen = [wire.traffic[axis][kind] for wire in wires if wire is not None and kind in wire.traffic[axis]]
    return WireTraffic(
        axis,
        kind,
        sum(each.collectives for each in seen),
        sum(each.nbytes for each in seen),
        sum(each.full_bytes for each in seen),
        sum(each.rounded_bytes for each in seen),
    )


def _parameters(unit: Unit) -> Iterator[WiredParameter]:
    for bucket in unit.buckets:
        for index, parameter in enumerate(bucket.parameters):
            texts = (_text(unit, bucket, index, axis, kind) for axis, kind in _KINDS)
            yield WiredParameter(unit.name, parameter.fqn, *texts)


def _text(unit: Unit, bucket: Bucket, index: int, axis: Axis, kind: Kind) -> str:
    """How a parameter travels in one kind of collective."""
    wire = unit.settings.collectives.wire
    chosen = None if wire is None else wire.wires[axis]
    name = None if chosen is None else chosen.gather if kind == "gather" else chosen.reduce
    if (bucket.mesh.transport if axis == "shard" else bucket.mesh.replica_transport) is None:
        return f"(no other ranks on the {axis} axis)"
    if chosen is None or name is None:
        return "(in full precision, as set)"
    why = _why_not(bucket, index, chosen, kind)
    return f"({why})" if why else name


def _why_not(bucket: Bucket, index: int, wire: Wire, kind: Kind) -> str:
    """Why a parameter travels as it is; empty if it does not."""
    parameter = bucket.parameters[index]
    if kind != "gather" and not parameter.requires_grad:
        return "frozen"
    if kind == "gather" and isinstance(bucket, ExtensionBucket):
        return "a tensor subclass that says itself what travels"
    dtype = bucket.storage.full_dtype if kind == "gather" else bucket.storage.reduce_dtype
    if dtype not in ROUNDED_DTYPES:
        return str(dtype).removeprefix("torch.")
    if isinstance(bucket, FlatBucket):
        return _size(bucket.layout.full_numel * dtype.itemsize, wire, "all of its unit: ")
    if isinstance(bucket, BufferBucket) and bucket.layout.slots[index].route is Route.REPLICATED:
        return "on every rank anyway"
    return _size(parameter.shape.numel * dtype.itemsize, wire)


def _size(nbytes: int, wire: Wire, what: str = "") -> str:
    return f"{what}{nbytes:,} bytes, below {wire.min_bytes:,}" if nbytes < wire.min_bytes else ""
