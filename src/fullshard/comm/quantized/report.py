"""Report on quantized communication: the bytes that were received, and those that full precision would have needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.comm.base import Kind
from fullshard.comm.quantized.mesh import Axis, MeshQuantization

__all__ = ["QuantizationReport", "QuantizationTraffic"]

_KINDS: tuple[tuple[Axis, Kind], ...] = (
    ("shard", "all_gather"),
    ("shard", "reduce_scatter"),
    ("replicate", "all_reduce"),
)


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
class QuantizationReport:
    """Effect of ``set_comm_quantization`` on a model, on this rank. ``str`` of it is a table.

    All-gathers that are not for computation, such as those of checkpoints, are in full precision and are not counted.

    Args:
        traffic: Bytes by axis and kind of collective, since ``set_comm_quantization``.
    """

    traffic: tuple[QuantizationTraffic, ...]

    @classmethod
    def of(cls, quantizations: Iterable[MeshQuantization]) -> QuantizationReport:
        """Add up the traffic of several units.

        Args:
            quantizations: What was chosen for each unit.

        Returns:
            The report.
        """
        chosen = list(quantizations)
        traffic = [_traffic(chosen, axis, kind) for axis, kind in _KINDS]
        return cls(tuple(each for each in traffic if each.collectives))

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
        lines = [
            f"{'axis':<10} {'collective':<14} {'number':>7} {'received':>12} {'in full':>12} {'ratio':>6} quantized"
        ]
        for each in self.traffic:
            lines.append(
                f"{each.axis:<10} {each.kind:<14} {each.collectives:>7} {_mib(each.nbytes)} {_mib(each.full_bytes)} "
                f"{each.ratio:>6.3f} {each.quantized_bytes / max(1, each.full_bytes):>9.0%}"
            )
        if not self.traffic:
            lines.append("nothing was communicated since set_comm_quantization")
        return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:>8.2f} MiB"


def _traffic(chosen: Iterable[MeshQuantization], axis: Axis, kind: Kind) -> QuantizationTraffic:
    seen = [each.traffic[axis][kind] for each in chosen if kind in each.traffic[axis]]
    counted = ("collectives", "nbytes", "full_bytes", "quantized_bytes")
    return QuantizationTraffic(axis, kind, *(sum(getattr(each, name) for each in seen) for name in counted))
