"""Quantized communication over the axes of one mesh: what the user has chosen, and the bytes received since."""

from __future__ import annotations

from typing import Literal

from fullshard.comm.base import Kind, Transport
from fullshard.comm.mesh import ShardMesh
from fullshard.comm.quantized.transport import QuantizedTransport, Traffic
from fullshard.policy import CommQuantization

__all__ = ["Axis", "MeshQuantization"]

Axis = Literal["shard", "replicate"]


class MeshQuantization:
    """The quantized communication of one unit. An axis in full precision is only counted.

    Args:
        shard: For the shard axis; None: full precision.
        replicate: For the replicate axis; None: full precision.
    """

    policies: dict[Axis, CommQuantization]
    traffic: dict[Axis, dict[Kind, Traffic]]

    def __init__(self, shard: CommQuantization | None, replicate: CommQuantization | None) -> None:
        self.policies = {"shard": shard or CommQuantization(), "replicate": replicate or CommQuantization()}
        self.traffic = {"shard": {}, "replicate": {}}

    def copy(self) -> MeshQuantization:
        """The same choice, for another unit; nothing was communicated there."""
        return MeshQuantization(self.policies["shard"], self.policies["replicate"])

    def on(self, mesh: ShardMesh) -> ShardMesh:
        """The same ranks with transports that quantize. Values that leave the model are sent exactly."""
        shard, replicas = self._over(mesh.transport, "shard"), self._over(mesh.replica_transport, "replicate")
        return mesh.with_transports(shard, replicas, exact=mesh.transport)

    def _over(self, base: Transport, axis: Axis) -> Transport:
        return base if base.world_size == 1 else QuantizedTransport(base, self.policies[axis], self.traffic[axis])
