"""The shards that ranks hold of a tensor: regions of the unsharded tensor, whatever sharded it.

[Note: Tensor shards]
The shard of a ``DTensor`` with Shard(0) is one region, a slice of a flat buffer is a few, and a replicated tensor is
the whole of it on every rank. Saving writes regions and loading fills regions, however the tensor was sharded. So a
checkpoint of one front end loads into the other, on any number of ranks, and no tensor is communicated. Everything
above the engine that asks what a rank holds of a parameter asks ``ShardedParameter`` or the functions here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, broadcast, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.engine.parameters.placement import dtensor_like, region_at
from fullshard.errors import FullshardError
from fullshard.layout import FlatShard, Region, regions_of_range

__all__ = [
    "IrregularDTensor",
    "ShardViews",
    "TensorShard",
    "TensorShards",
    "View",
    "full_tensor",
    "gather_ranges",
    "local_of",
    "regions_of_slice",
    "sharded_axes",
    "sharded_like",
    "shards_like",
    "views_of",
]


class TensorShard(NamedTuple):
    """One region of a tensor and this rank's memory for it."""

    region: Region
    local: torch.Tensor  # a view, of shape ``region.sizes``


@dataclass(frozen=True, eq=False, repr=False)
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
    equal: bool = False

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> TensorShards:
        """Return the single shard of a tensor that is not sharded."""
        value = _plain(tensor.detach())
        return cls(value.shape, value.dtype, value.device, (TensorShard(Region.whole(value.shape), value),))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShards:
        """Return the shards of a plain tensor or a ``DTensor``.

        Raises:
            TypeError: If the DTensor has a placement other than Shard and Replicate, such as ``Partial``.
        """
        if not isinstance(tensor, DTensor):
            return cls.whole(tensor)
        local = local_of(tensor).detach()
        if isinstance(tensor, IrregularDTensor):
            shards = tuple(TensorShard(region, _plain(part)) for region, part in tensor.regions())
            return cls(tensor.shape, local.dtype, local.device, shards, equal=True)
        coordinate = tensor.device_mesh.get_coordinate()
        return cls.placed(tensor.shape, local, None if coordinate is None else region_at(tensor, coordinate))

    @classmethod
    def placed(cls, shape: torch.Size, local: torch.Tensor, region: Region | None) -> TensorShards:
        """Describe a tensor of that shape whose one region on this rank is ``local`` (region None: nothing)."""
        # A tensor without elements still has to appear in a checkpoint: every rank holds all of it.
        local = _plain(local)
        held = region is not None and (region.numel or not math.prod(shape))
        shards = (TensorShard(region, local.view(region.sizes)),) if region is not None and held else ()
        return cls(shape, local.dtype, local.device, shards, equal=True)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(shard.local.nbytes for shard in self.shards)

    def __repr__(self) -> str:
        regions = ", ".join(str(shard.region) for shard in self.shards) or "nothing"
        return f"TensorShards({regions} of {tuple(self.shape)}, {self.dtype}, {self.device})"


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


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, after waiting for pending communication; another tensor detached."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def sharded_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as ``parameter``, as a DTensor if that is one and this its local tensor."""
    value = value.detach()
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == local_of(parameter).shape:
        return dtensor_like(value, parameter)
    return value


def shards_like(parameter: torch.Tensor, value: torch.Tensor, name: str) -> TensorShards:
    """Return the shards of a tensor that is sharded as ``parameter``: a DTensor, a local tensor, or all of it.

    Args:
        parameter: The parameter.
        value: The tensor; a DTensor's own placements count.
        name: FQN of the parameter, for the error.

    Raises:
        FullshardError: If it has another shape.
    """
    value = sharded_like(parameter, value)
    if value.shape != parameter.shape and not isinstance(value, DTensor):
        raise FullshardError(
            f"{name}: expected a tensor of shape {tuple(parameter.shape)} or this rank's part of one, found "
            f"{tuple(value.shape)}"
        )
    return TensorShards.of(value)


# ---------------------------------------------------------------- all ranks


class View(NamedTuple):
    """A view of a tensor's memory: a block, or a range of elements, such as one rank's shard of an unsharded tensor.

    Args:
        offset: In elements, from the tensor's first one.
        shape: Of the view.
        stride: Of the view.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of ``tensor``."""
        offset, shape, stride = self
        return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)

    def cut(self, value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """Return the shard in an unsharded tensor: a view if its strides are the parameter's, else of a copy."""
        if tuple(value.stride()) != stride:
            value = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
        return self.on(value)


class IrregularDTensor(DTensor):
    """A DTensor with a placement that torch does not know, which says itself what ranks hold of it.

    See ``register_placement``.
    """

    def regions(self) -> list[tuple[Region, torch.Tensor]]:
        """Return the regions of the tensor that this rank holds, and its memory of each."""
        raise NotImplementedError

    def view_at(self, coordinate: Sequence[int]) -> View:
        """Return the shard of the rank at ``coordinate`` of the mesh."""
        raise NotImplementedError


class ShardViews(NamedTuple):
    """The shards that all ranks of a mesh hold of one tensor.

    Args:
        mesh: The mesh.
        axes: Its axes over which the tensor is sharded.
        stride: Strides of the unsharded tensor that shards are views of.
        at: Returns the shard of the rank at a coordinate of the mesh.
    """

    mesh: DeviceMesh
    axes: list[int]
    stride: tuple[int, ...]
    at: Callable[[Sequence[int]], View]


def views_of(tensor: torch.Tensor) -> ShardViews:
    """Return the shards that all ranks hold of a DTensor."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    return ShardViews(mesh, sharded_axes(mesh, tensor.placements), tuple(tensor.stride()), partial(_view_at, tensor))


def regions_of_slice(
    shape: Sequence[int], stride: Sequence[int], shard: FlatShard, local: torch.Tensor
) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the regions of a parameter that make up a slice of its memory, and the view of ``local`` of each.

    Args:
        shape: Shape of the parameter.
        stride: Dense strides of the parameter.
        shard: The slice.
        local: Its elements, in memory order.
    """
    # Elements are counted in the order in which they lie in memory: that of rows only if the parameter is contiguous.
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] != 1, dim))
    back = [order.index(dim) for dim in range(len(order))]
    flat, taken = local.as_strided((shard.numel,), (1,), local.storage_offset()), 0
    for region in regions_of_range([shape[dim] for dim in order], shard.start, shard.numel):
        part = flat[taken : taken + region.numel].view(region.sizes).permute(back)
        yield region.permuted(back), part
        taken += region.numel


def sharded_axes(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """Return the axes of a mesh over which a tensor with these placements is sharded."""
    return [axis for axis, p in enumerate(placements) if not p.is_replicate() and mesh.size(axis) > 1]


def _view_at(tensor: DTensor, coordinate: Sequence[int]) -> View:
    if isinstance(tensor, IrregularDTensor):
        return tensor.view_at(coordinate)
    region, stride = region_at(tensor, coordinate), tuple(tensor.stride())
    return View(sum(map(operator.mul, region.offsets, stride)), region.sizes, stride)


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, also of an offloaded one; a plain tensor as it is. A collective."""
    if not isinstance(value, DTensor):
        return value
    local, mesh = value._local_tensor, value.device_mesh
    if local.device.type != mesh.device_type:  # offloaded, but its group communicates on the accelerator
        value = dtensor_like(local.to(mesh.device_type), value)
    return value.full_tensor()


def gather_ranges(
    whole: torch.Tensor, ranges: Iterable[tuple[int, int]], local: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Gather the ranges of elements, in the order of memory, that each rank of a group holds of a tensor. A collective.

    Few ranks hold any of one tensor, and each range is received in place.

    Args:
        whole: Dense memory of the tensor, to be filled.
        ranges: First element and number of elements of each rank.
        local: This rank's elements, dense.
        group: The process group.
    """
    flat, works = whole.as_strided((whole.numel(),), (1,)), []
    traced = torch.compiler.is_compiling()  # into a graph, which has no collectives that write to what they are given
    for source, (start, numel) in enumerate(ranges):
        part = flat.narrow(0, start, numel)
        if numel and source == group.rank():
            part.copy_(local.as_strided((numel,), (1,), local.storage_offset()))
        if not numel or group.size() == 1:
            continue
        if traced:
            part.copy_(wait_tensor(broadcast(part, source, group)))  # type: ignore[no-untyped-call]
        else:
            works.append(dist.broadcast(part, group=group, group_src=source, async_op=True))
    for work in works:
        if work is not None:
            work.wait()
