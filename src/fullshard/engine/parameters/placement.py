"""DTensor placements of a parameter, sharded and unsharded.

A plain parameter is sharded over the shard axis. If tensor or expert parallelism has made it a DTensor, its local
tensor is sharded over the shard axis. Its sharded parameter is then a DTensor on the data-parallel axes and its own
axes; its unsharded parameter is the DTensor that it was. A plain parameter with annotations of spmd_types is treated as
the DTensor that they describe, but unsharded it is plain.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from fullshard.comm.mesh import ShardMesh
from fullshard.engine.parameters.spmd_types import SpmdTypes
from fullshard.layout import Region, chunk_of

__all__ = [
    "SHARDED_TYPES",
    "ParameterPlacement",
    "dtensor",
    "dtensor_like",
    "dtensor_parameter",
    "region_at",
    "register_placement",
    "with_dtype",
]

# Types whose local tensors optimizers and norms may use in their place.
SHARDED_TYPES: set[type] = {DTensor}
_classes: dict[type[Placement], type[DTensor]] = {}  # of DTensors with a placement that torch does not know


def register_placement(placement: type[Placement], tensors: type[DTensor]) -> None:
    """Make DTensors with a placement of a class that torch does not know of the class ``tensors``.

    Args:
        placement: The class of the placement.
        tensors: The class of DTensors, an ``IrregularDTensor``, whose local tensors may be stepped element by element.
    """
    _classes[placement] = tensors
    SHARDED_TYPES.add(tensors)


@dataclass(frozen=True)
class ParameterPlacement:
    """Mesh, placements and global shape of one parameter; independent of its dtype."""

    mesh: ShardMesh  # the ranks that it is sharded and replicated over
    shard_dim: int | None  # tensor dim that is sharded over the shard axis; None: replicated on that axis
    shape: torch.Size  # global
    stride: tuple[int, ...]  # global
    own: DTensorSpec | None  # spec of the unsharded parameter if that is a DTensor, None for a plain parameter
    types: SpmdTypes | None = None  # the unsharded parameter is plain, the local tensor of a DTensor of this spec

    @classmethod
    def of_plain(
        cls, mesh: ShardMesh, shard_dim: int | None, shape: torch.Size, stride: tuple[int, ...]
    ) -> ParameterPlacement:
        """Return the placement of a plain parameter: the same object for all that are placed alike."""
        key = (id(mesh), shard_dim, shape, stride)
        found = _placements.get(key)
        if found is None:
            found = _placements[key] = cls(mesh, shard_dim, shape, stride, None)
        return found

    def __post_init__(self) -> None:
        self._sharded_layout  # noqa: B018 # raises errors about the meshes now, on all ranks in the same place

    def sharded_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return the DTensor spec of the sharded parameter and its gradient."""
        found = self.specs.get(dtype)
        if found is None:
            mesh, placements = self._sharded_layout
            meta = TensorMeta(self.shape, self.stride, dtype)
            found = self.specs[dtype] = DTensorSpec(mesh, placements, tensor_meta=meta)
        return found

    def unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return the unsharded parameter: ``local`` itself, or the DTensor with that local tensor."""
        if self.own is None or self.types is not None:
            return local
        meta = TensorMeta(self.shape, self.stride, local.dtype)
        return dtensor(local, replace(self.own, tensor_meta=meta))

    def local_gradient(self, gradient: torch.Tensor, reduce_dtype: torch.dtype) -> torch.Tensor:
        """Return the local tensor of an unsharded gradient, redistributed to the parameter's own placements.

        Sums over the parameter's own axes are in ``reduce_dtype``.
        """
        if self.types is not None:
            assert self.own is not None
            gradient = dtensor(gradient, with_dtype(replace(self.own, placements=self.types.gradient), gradient.dtype))
        if isinstance(gradient, DTensor):
            own = self.own
            assert own is not None, "a plain parameter got a DTensor as its gradient"
            placements = own.placements
            if self.mesh.whole is not None:
                # Partial() on the data-parallel axes stays: the reduction adds it up.
                data = self._data_axes(self.mesh.whole.device_mesh)
                placements = tuple(gradient.placements[i] if i in data else p for i, p in enumerate(placements))
            if placements != gradient.placements:
                wide = dtensor_like(gradient._local_tensor.to(reduce_dtype), gradient)
                gradient = wide.redistribute(placements=placements)
            gradient = gradient._local_tensor
        if isinstance(gradient, AsyncCollectiveTensor):
            gradient = gradient.wait()
        return gradient

    @cached_property
    def specs(self) -> dict[Any, DTensorSpec]:
        """Specs that were made, by dtype, or by what else decides them: parameters placed alike share them."""
        return {}

    @cached_property
    def _sharded_layout(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        if self.own is None:
            return self.mesh.device_mesh, self.mesh.placements(self._data_placement(()))
        if self.mesh.whole is not None:
            return self._on_whole_mesh(self.own)
        inner = [self.own.mesh.size(i) for i in self._sharding_axes(self.own.placements)]
        placements = (*self.mesh.placements(self._data_placement(inner)), *self.own.placements)
        return self.mesh.joined(self.own.mesh), placements

    def _on_whole_mesh(self, own: DTensorSpec) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        assert self.mesh.whole is not None
        whole, dims = self.mesh.whole
        names = whole.mesh_dim_names or ()
        if own.mesh is not whole and own.mesh != whole:
            raise ValueError(f"expected a DTensor on the mesh passed to fully_shard, {whole}, found one on {own.mesh}")
        for axis in sorted(self._data_axes(whole)):
            if not own.placements[axis].is_replicate():
                raise ValueError(
                    f"expected a DTensor with Replicate() on the data-parallel axis {names[axis]!r}, found "
                    f"{own.placements[axis]}; redistribute it first"
                )
        shard = [names.index(name) for name in dims.shard_names]
        if not shard:
            return whole, own.placements
        inner = [whole.size(i) for i in self._sharding_axes(own.placements) if i > shard[0]]
        placements = list(own.placements)
        placements[shard[0]] = self._data_placement(inner)
        if len(shard) == 1:
            return whole, tuple(placements)
        assert self.mesh.shard is not None
        parts = [self.mesh.shard if axis == shard[0] else whole[names[axis]] for axis in range(whole.ndim)]
        kept = [axis for axis in range(whole.ndim) if axis == shard[0] or axis not in shard]
        return DeviceMesh._concatenate([parts[i] for i in kept]), tuple(placements[i] for i in kept)

    def _data_axes(self, whole: DeviceMesh) -> set[int]:
        assert self.mesh.whole is not None
        dims = self.mesh.whole.dims
        return {(whole.mesh_dim_names or ()).index(name) for name in dims.shard_names + dims.replicate_names}

    def _sharding_axes(self, placements: Sequence[Placement]) -> list[int]:
        """Return the axes of the parameter's own mesh that shard the dim that the shard axis shards too."""
        dim = self.shard_dim
        return [i for i, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard)) and p.dim == dim]

    def _data_placement(self, inner: Sequence[int]) -> Placement:
        """Return the placement on the shard axis; shards of ``inner`` shards interleave: ``_StridedShard``."""
        if self.shard_dim is None:
            return Replicate()
        factor = math.prod(inner)
        return Shard(self.shard_dim) if factor == 1 else _StridedShard(self.shard_dim, split_factor=factor)


# A value keeps the mesh whose id is in its key alive.
_placements: weakref.WeakValueDictionary[object, ParameterPlacement] = weakref.WeakValueDictionary()


def dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """Make a DTensor on ``local`` without copies. Bypasses ``DTensor.__init__``, which costs ten times as much."""
    return DTensor.__new__(_type_of(spec), local, spec, requires_grad=False)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Make the DTensor on ``local``, of any dtype, that is sharded as ``like`` is."""
    return dtensor(local, with_dtype(like._spec, local.dtype))


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of DTensors of ``dtype`` that are sharded alike."""
    meta = spec.tensor_meta
    assert meta is not None, "specs of tensors have shapes"
    return spec if meta.dtype is dtype else replace(spec, tensor_meta=meta._replace(dtype=dtype))


def _type_of(spec: Any) -> type[DTensor]:
    for placement in spec.placements:
        if type(placement) in _classes:
            return _classes[type(placement)]
    return DTensor


def dtensor_parameter(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> nn.Parameter:
    """Make an ``nn.Parameter`` that is the DTensor on ``local`` itself.

    It is what ``nn.Parameter(dtensor(...))`` makes, which first detaches the DTensor, for ten times the cost.
    """
    made: Any = DTensor.__new__(_type_of(spec), local, spec, requires_grad=requires_grad)
    made._is_param = True
    return cast("nn.Parameter", made)


def region_at(tensor: DTensor, coordinate: Sequence[int]) -> Region:
    """Return the region of a DTensor that the rank at ``coordinate`` of its mesh holds.

    Raises:
        TypeError: If a placement is not Shard or Replicate.
    """
    mesh = tensor.device_mesh
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    # A strided shard divides what the axes after it left; any other shard what the axes before it left.
    axes = range(mesh.ndim)
    strided = [axis for axis in axes if isinstance(tensor.placements[axis], _StridedShard)]
    for axis in [*(axis for axis in axes if axis not in strided), *reversed(strided)]:
        placement = tensor.placements[axis]
        if isinstance(placement, (Shard, _StridedShard)):
            dim = placement.dim
            start, sizes[dim] = chunk_of(sizes[dim], mesh.size(axis), coordinate[axis])
            offsets[dim] += start
        elif not isinstance(placement, Replicate):
            raise TypeError(
                f"a DTensor with placement {placement} has no final values on any rank; redistribute it to "
                "Shard or Replicate first"
            )
    return Region(tuple(offsets), tuple(sizes))
