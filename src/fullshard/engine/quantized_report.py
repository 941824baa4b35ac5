"""Report on quantized communication: bytes received, and which parameters of a model are quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.comm.base import Kind
from fullshard.comm.quantized.mesh import Axis
from fullshard.comm.quantized.transport import QUANTIZED_DTYPES
from fullshard.engine.buckets.base import Bucket
from fullshard.policy import CommQuantization

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["QuantizationReport", "QuantizationTraffic", "QuantizedParameter"]

_KINDS: tuple[tuple[Axis, Kind], ...] = (
    ("shard", "all_gather"),
    ("shard", "reduce_scatter"),
    ("replicate", "all_reduce"),
)
_SHOWN = 12  # parameters in full precision; the others are counted


@dataclass(frozen=True)
class QuantizationTraffic:
    """Bytes that one rank has received in one kind of collective.

    Args:
        axis: Mesh axis, ``"shard"`` or ``"replicate"``.
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        collectives: Number of collectives.
        nbytes: Bytes received from other ranks, scales included.
        full_bytes: Bytes that would have been received in full precision.
        quantized_bytes: The part of ``full_bytes`` in collectives with any quantized operand.
    """

    axis: Axis
    kind: Kind
    collectives: int
    nbytes: int
    full_bytes: int
    quantized_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes received divided by those of full precision; 1.0 if there were none."""
        return self.nbytes / self.full_bytes if self.full_bytes else 1.0


@dataclass(frozen=True)
class QuantizedParameter:
    """How one parameter is sent: ``"int8"``, ``"fp8"``, or in parentheses why it is sent in full precision.

    Args:
        unit: Name of its unit; ``""`` for the root.
        fqn: FQN of the parameter.
        all_gather: How the parameter is sent when it is unsharded for computation.
        reduce_scatter: How its gradient is sent over the shard axis.
        all_reduce: How its gradient is sent over the replicate axis.
    """

    unit: str
    fqn: str
    all_gather: str
    reduce_scatter: str
    all_reduce: str

    @property
    def quantized(self) -> bool:
        """True if it is quantized in any collective."""
        return not all(text.startswith("(") for text in (self.all_gather, self.reduce_scatter, self.all_reduce))


@dataclass(frozen=True)
class QuantizationReport:
    """Effect of ``set_comm_quantization`` on a model, on this rank. ``str`` of it is a table.

    All-gathers that are not for computation, such as those of checkpoints, are in full precision and are not counted.

    Args:
        traffic: Bytes by axis and kind of collective, since ``set_comm_quantization``.
        parameters: All parameters, unit by unit.
    """

    traffic: tuple[QuantizationTraffic, ...]
    parameters: tuple[QuantizedParameter, ...]

    @classmethod
    def of(cls, units: Iterable[Unit]) -> QuantizationReport:
        """Return the report on some units.

        Args:
            units: Units of the engine.

        Returns:
            The report.
        """
        found = list(units)
        traffic = [_traffic(found, axis, kind) for axis, kind in _KINDS]
        return cls(tuple(t for t in traffic if t.collectives), tuple(p for unit in found for p in _parameters(unit)))

    @property
    def nbytes(self) -> int:
        """Total number of bytes received."""
        return sum(each.nbytes for each in self.traffic)

    @property
    def full_bytes(self) -> int:
        """Total number of bytes that would have been received in full precision."""
        return sum(traffic.full_bytes for traffic in self.traffic)

    @property
    def ratio(self) -> float:
        """Bytes received divided by those of full precision; 1.0 if there were none."""
        return self.nbytes / self.full_bytes if self.full_bytes else 1.0

    @property
    def active(self) -> bool:
        """True if anything that was communicated was quantized."""
        return any(traffic.quantized_bytes for traffic in self.traffic)

    def __str__(self) -> str:
        lines = [f"{'axis':<10} {'collective':<14} {'number':>7} {'received':>12} {'in full':>12} {'ratio':>6}"]
        for each in self.traffic:
            lines.append(
                f"{each.axis:<10} {each.kind:<14} {each.collectives:>7} {_mib(each.nbytes)} {_mib(each.full_bytes)} "
                f"{each.ratio:>6.3f}"
            )
        if not self.traffic:
            lines.append("nothing was communicated since set_comm_quantization")
        exact = [parameter for parameter in self.parameters if not parameter.quantized]
        count = len(self.parameters) - len(exact)
        lines.append(f"{count} of {len(self.parameters)} parameters are quantized. Sent in full precision:")
        lines += [f"  {each.fqn}: {each.all_gather[1:-1]}" for each in exact[:_SHOWN]]
        if len(exact) > _SHOWN:
            lines.append(f"  and {len(exact) - _SHOWN} more")
        return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:>8.2f} MiB"


def _traffic(units: Iterable[Unit], axis: Axis, kind: Kind) -> QuantizationTraffic:
    chosen = (unit.settings.collectives.quantization for unit in units)
    seen = [each.traffic[axis][kind] for each in chosen if each is not None and kind in each.traffic[axis]]
    counted = ("collectives", "nbytes", "full_bytes", "quantized_bytes")
    return QuantizationTraffic(axis, kind, *(sum(getattr(each, name) for each in seen) for name in counted))


def _parameters(unit: Unit) -> Iterator[QuantizedParameter]:
    for bucket in unit.buckets:
        for index, parameter in enumerate(bucket.parameters):
            sent = (_how(unit, bucket, index, axis, kind) for axis, kind in _KINDS)
            yield QuantizedParameter(unit.name, parameter.fqn, *sent)


def _how(unit: Unit, bucket: Bucket, index: int, axis: Axis, kind: Kind) -> str:
    """How a parameter is sent in one kind of collective."""
    quantization = unit.settings.collectives.quantization
    policy = None if quantization is None else quantization.policies[axis]
    name = None if policy is None else policy.all_gather if kind == "all_gather" else policy.reduce
    transport = bucket.mesh.transport if axis == "shard" else bucket.mesh.replica_transport
    if transport.world_size == 1:
        return f"(no other ranks on the {axis} axis)"
    if policy is None or name is None:
        return "(in full precision, as set)"
    reason = _reason_against(bucket, index, policy, kind)
    return f"({reason})" if reason else name


def _reason_against(bucket: Bucket, index: int, policy: CommQuantization, kind: Kind) -> str:
    """Why a parameter is sent in full precision; empty if it is not."""
    if reason := bucket.never_quantized(index, kind):
        return reason
    dtype = bucket.storage.param_dtype if kind == "all_gather" else bucket.storage.reduce_dtype
    if dtype not in QUANTIZED_DTYPES:
        return str(dtype).removeprefix("torch.")
    numel, whose = bucket.quantized_together(index)
    nbytes = numel * dtype.itemsize
    return f"{whose}{nbytes:,} bytes, below {policy.min_bytes:,}" if nbytes < policy.min_bytes else ""
