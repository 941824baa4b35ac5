"""The part of a parameter that a rank holds, as checkpoints, state dicts and optimizers read it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.placement import ParameterPlacement, dtensor
from fullshard.engine.parameters.tensor_shards import (
    ShardViews,
    TensorShards,
    full_tensor,
    sharded_like,
    shards_like,
    views_of,
)
from fullshard.layout import ParameterShape, PerParameterLayout, chunk_of

__all__ = ["HeldParts"]


class HeldParts:
    """This rank's part of a parameter, of its gradient and of its state, and the whole made from all parts."""

    sharded: nn.Parameter
    placement: ParameterPlacement
    shape: ParameterShape  # of the unsharded parameter, without its own tensor parallelism

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, a view, of ``value``: of the unsharded parameter's shape, or that part already."""
        dim, mesh = self.placement.shard_dim, self.placement.mesh
        if dim is None:
            return value
        start, size = chunk_of(self.shape.shape[dim], mesh.world_size, mesh.rank)
        return value if value.shape[dim] == size else value.narrow(dim, start, size)

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part, a view, of a tensor that is sharded as ``optimized``, such as its gradient."""
        return value._local_tensor if isinstance(value, DTensor) else value.detach()

    def shards(self, value: torch.Tensor, name: str) -> TensorShards:
        """Return that part as shards of the unsharded parameter; a DTensor's own placements count.

        Args:
            value: The tensor.
            name: FQN of the parameter, for the error.

        Raises:
            FullshardError: If the tensor has another shape.
        """
        return shards_like(self.sharded, value, name)

    def full_from(self, value: torch.Tensor) -> torch.Tensor:
        """Gather the unsharded tensor that is sharded as ``optimized`` over all ranks. A collective.

        Args:
            value: This rank's part of it, in any dtype.

        Returns:
            A new tensor on the compute device.
        """
        return full_tensor(sharded_like(self.sharded, value)).clone()

    def reshard(self, value: torch.Tensor) -> torch.Tensor:
        """Convert a tensor from the sharding of ``optimized`` to that of ``fully_shard``. May be a collective."""
        return sharded_like(self.sharded, value)

    def shard_of(self, whole: torch.Tensor, device: torch.device) -> DTensor:
        """Return this rank's shard of an unsharded (local) tensor, copied to a device, as ``fully_shard`` keeps it."""
        mesh = self.placement.mesh
        layout = PerParameterLayout.build((self.shape,), world_size=mesh.world_size, itemsize=1, direct_bytes=0)
        shape, stride = layout.slots[0].local_shape(mesh.rank), layout.slots[0].local_stride(mesh.rank)
        local = torch.empty_strided(shape, stride, dtype=whole.dtype, device=device)
        local.copy_(HeldParts.local_part(self, whole))
        return dtensor(local, self.placement.sharded_spec(whole.dtype))

    def views(self) -> ShardViews:
        """Return the shards of all ranks."""
        return views_of(self.sharded)
