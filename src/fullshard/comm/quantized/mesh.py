"""Quantized communication over the axes of one mesh: what the user has chosen, and the bytes received since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fullshard.comm.base import Kind, Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.comm.quantized.transport import QuantizedTransport, Traffic
from fullshard.policy import CommQuantization

__all__ = ["Axis", "MeshQuantization"]

Axis = Literal["shard", "replicate"]


@dataclass
class MeshQuantization:
    """The quantized communication of one unit. An axis in full precision is only counted.

    Args:
        shard: For the shard axis; None: full precision.
        replicate: For the replicate axis; None: full precision.
        traffic: Bytes received since it was made.
    """

    shard: CommQuantization | None
    replicate: CommQuantization | None
    traffic: dict[Axis, dict[Kind, Traffic]] = field(default_factory=lambda: {"shard": {}, "replicate": {}}, init=False)

    def on(self, mesh: ShardMesh) -> ShardMesh:
        """Return the same ranks with transports that quantize. Values that leave the model are sent exactly."""
        shard = self._over(mesh.transport, self.shard, "shard")
        replicas = self._over(mesh.replica_transport, self.replicate, "replicate")
        return mesh.with_transports(shard, replicas, exact=mesh.transport)

    def _over(self, base: Transport, policy: CommQuantization | None, axis: Axis) -> Transport:
        if base.world_size == 1:
            return base
        return QuantizedTransport(base, policy or CommQuantization(), self.traffic[axis])
