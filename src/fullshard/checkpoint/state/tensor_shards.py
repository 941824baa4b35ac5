"""The shards of a tensor on one rank, as regions of the unsharded tensor, whatever sharded it.

[Note: Tensor shards]
The shard of a ``DTensor`` with Shard(0) is one region, a slice of a flat buffer is a few, and a replicated tensor is
the whole of it on every rank. Saving writes regions and loading fills regions, however the tensor was sharded. So a
checkpoint of one front end loads into the other, on any number of ranks, and no tensor is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from fullshard.engine.parameters.placement import region_at
from fullshard.engine.parameters.ragged_tensor import RaggedDTensor
from fullshard.layout import Region

__all__ = ["TensorShard", "TensorShards", "region_of"]


class TensorShard(NamedTuple):
    """One region of a tensor and this rank's memory for it."""

    region: Region
    local: torch.Tensor  # a view, of shape ``region.sizes``


class TensorShards:
    """The shards of one tensor on this rank. See [Note: Tensor shards].

    Attributes:
        shape: Shape of the unsharded tensor.
        dtype: Dtype of its elements.
        device: Device of this rank's shards, also if it has none.
        shards: This rank's shards, which do not overlap. Empty if it has none.
        equal: True if ranks that hold the same region are known to hold the same values: any of them may write it.
            Otherwise the first of them does.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    shards: tuple[TensorShard, ...]
    equal: bool

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        shards: Iterable[TensorShard],
        *,
        equal: bool = False,
    ) -> None:
        self.shape, self.dtype, self.device, self.shards = torch.Size(shape), dtype, device, tuple(shards)
        self.equal = equal

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> TensorShards:
        """Return the single shard of a tensor that is not sharded."""
        value = _plain(tensor.detach())
        return cls(value.shape, value.dtype, value.device, [TensorShard(Region.whole(value.shape), value)])

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShards:
        """Return the shards of a plain tensor or a ``DTensor``.

        Raises:
            TypeError: If the DTensor has a placement other than Shard and Replicate, such as ``Partial``.
        """
        if not isinstance(tensor, DTensor):
            return cls.whole(tensor)
        if isinstance(tensor, RaggedDTensor):
            return cls._of_ragged(tensor)
        local = tensor._local_tensor.detach()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return cls.placed(tensor.shape, local, region_of(tensor))

    @classmethod
    def _of_ragged(cls, tensor: RaggedDTensor) -> TensorShards:
        local = tensor._local_tensor.detach()
        shards = [TensorShard(region, _plain(part)) for region, part in tensor.chunks()]
        return cls(tensor.shape, local.dtype, local.device, shards, equal=True)

    @classmethod
    def placed(cls, shape: torch.Size, local: torch.Tensor, region: Region | None) -> TensorShards:
        """Return the shards of a tensor of that shape of which this rank holds one region (None: nothing) in
        ``local``.
        """
        # A tensor without elements still has to appear in a checkpoint: every rank holds all of it.
        local = _plain(local)
        held = region is not None and (region.numel or not math.prod(shape))
        shards = [TensorShard(region, local.view(region.sizes))] if region is not None and held else []
        return cls(torch.Size(shape), local.dtype, local.device, shards, equal=True)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(shard.local.numel() * shard.local.element_size() for shard in self.shards)

    def __repr__(self) -> str:
        regions = ", ".join(str(shard.region) for shard in self.shards) or "nothing"
        return f"TensorShards({regions} of {tuple(self.shape)}, {self.dtype}, {self.device})"


def region_of(tensor: DTensor) -> Region | None:
    """Return the region of a DTensor that its local tensor holds; None if this rank is not on its mesh.

    Raises:
        TypeError: If a placement is not Shard or Replicate.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    return None if coordinate is None else region_at(tensor, coordinate)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap a tensor subclass that consists of one tensor of its shape, such as weights that are cast when
    all-gathered.

    Raises:
        TypeError: If it consists of other tensors.
    """
    while type(tensor) is not torch.Tensor:
        names, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
        inner = [getattr(tensor, name) for name in names]
        if len(inner) != 1 or inner[0].shape != tensor.shape:
            raise TypeError(
                f"a {type(tensor).__name__} consists of {len(inner)} inner tensors of other shapes, which cannot be "
                "saved as regions of the unsharded tensor; for weights, save the state dict of the trained parameters "
                "instead, and for optimizer state use torch's get_optimizer_state_dict and dcp.save"
            )
        tensor = inner[0].detach()
    return tensor
