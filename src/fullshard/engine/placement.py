"""Where a parameter lies on the device mesh, sharded and full.

A plain parameter is cut over the shard axis. A parameter that tensor or expert parallelism has made a DTensor
is cut once more: what this rank holds of it is cut over the shard axis. Its sharded form is then a DTensor on the
data-parallel axes and its own; its full form is the DTensor that it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from fullshard.engine.mesh import ShardMesh

__all__ = ["ParameterPlacement", "dtensor"]


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """How one parameter is placed: what stays the same while its dtype may change.

    Args:
        mesh: The ranks it is sharded and replicated over.
        cut: The dim that is cut over the shard axis; None: every rank of it holds all.
        shape: Global shape.
        stride: Global strides.
        own: What it was before: its spec if it was a DTensor, None for a plain parameter.
    """

    mesh: ShardMesh
    cut: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    own: DTensorSpec | None

    def __post_init__(self) -> None:
        self._sharded_layout()  # raises what is wrong with the meshes now, and with all ranks in the same place

    def sharded_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Of the sharded parameter and its gradient."""
        mesh, placements = self._sharded_layout()
        return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(self.shape, self.stride, dtype))

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """The full parameter around its memory: ``local`` itself, or the DTensor with that local tensor."""
        if self.own is None:
            return local
        meta = TensorMeta(self.shape, self.stride, local.dtype)
        return dtensor(local, replace(self.own, tensor_meta=meta))

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The local part of a full gradient, brought to the parameter's own placements if they differ."""
        if isinstance(gradient, DTensor):
            own = self.own
            assert own is not None, "a plain parameter got a DTensor as its gradient"
            wanted = own.placements
            if self.mesh.whole is not None:
                # What is pending on the data-parallel axes is what the reduction is for.
                ours = self._data_axes(self.mesh.whole.device_mesh)
                wanted = tuple(gradient.placements[i] if i in ours else p for i, p in enumerate(wanted))
            if wanted != gradient.placements:
                gradient = gradient.redistribute(placements=wanted)
            gradient = gradient._local_tensor
        if isinstance(gradient, AsyncCollectiveTensor):
            gradient = gradient.wait()
        return gradient

    def _sharded_layout(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        if self.own is None:
            return self.mesh.device_mesh, self.mesh.placements(self._data_placement(()))
        if self.mesh.whole is not None:
            return self._on_whole_mesh(self.own)
        inner = [self.own.mesh.size(i) for i in self._cuts_of(self.own.placements)]
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
                    f"expected Replicate() on the data-parallel axis {names[axis]!r}, found {own.placements[axis]}"
                )
        shard = [names.index(name) for name in dims.shard_names]
        if not shard:
            return whole, own.placements
        inner = [whole.size(i) for i in self._cuts_of(own.placements) if i > shard[0]]
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

    def _cuts_of(self, placements: Sequence[Placement]) -> list[int]:
        """The axes on which the parameter was cut before, on the dim that we cut."""
        return [i for i, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard)) and p.dim == self.cut]

    def _data_placement(self, inner: Sequence[int]) -> Placement:
        """On the shard axis. Parts of parts interleave in the whole, which ``_StridedShard`` describes."""
        if self.cut is None:
            return Replicate()
        factor = math.prod(inner)
        return Shard(self.cut) if factor == 1 else _StridedShard(self.cut, split_factor=factor)


def dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor on ``local`` without copies. Bypasses ``DTensor.__init__``, which costs ten times as much."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
