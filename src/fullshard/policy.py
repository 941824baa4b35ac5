"""What a user chooses per unit: small values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes and reduces. Shards and optimizer state keep the parameters' own dtype.

    Args:
        param_dtype: Floating-point parameters are gathered and used in it. None: in their own.
        reduce_dtype: Gradients are added up over microbatches, and reduced, in it. None: in the dtype that the
            backward computes them in.
        output_dtype: Floating-point tensors in the outputs are cast to it. None: left alone.
        cast_forward_inputs: Whether floating-point tensors in the inputs are cast to ``param_dtype``.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``.
        ValueError: If a dtype is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"MixedPrecisionPolicy: {name}: expected a torch.dtype or None, found {dtype!r}")
            if not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy: {name}: expected a floating-point dtype, found {dtype}")
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"MixedPrecisionPolicy: cast_forward_inputs: expected True or False, found {self.cast_forward_inputs!r}"
            )


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards, gradients and optimizer state on the device of the mesh: no offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and optimizer state in CPU memory; the device holds only what is gathered.

    Args:
        pin_memory: Page-lock them, so that copies to and from the device overlap with computation. Such memory
            cannot be swapped out. Without an accelerator it makes no difference.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which named axes of a mesh are data-parallel, when parameters are DTensors on that whole mesh already.

    Args:
        shard: Axis (or axes, taken together as one) to shard over.
        replicate: Axis (or axes) that hold replicas.

    Raises:
        ValueError: If neither is given, or an axis is named twice.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = self.shard_names + self.replicate_names
        if not names:
            raise ValueError("DataParallelMeshDims: expected shard, replicate or both, found neither")
        if len(set(names)) != len(names):
            raise ValueError(f"DataParallelMeshDims: expected every axis once, found {names}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to shard over; empty if none."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes that hold replicas; empty if none."""
        return _names(self.replicate)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True, eq=False)
class FSDPMeshInfo:
    """A mesh for some parameters, see :class:`ShardPlacementResult`.

    Args:
        mesh: 1-D, or 2-D with a replicate axis.
        shard_mesh_dim: The axis of ``mesh`` to shard over.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None


@dataclass(frozen=True, eq=False)
class HSDPMeshInfo(FSDPMeshInfo):
    """Like :class:`FSDPMeshInfo`, with an axis of replicas.

    Args:
        replicate_mesh_dim: The axis of ``mesh`` that holds replicas.
    """

    replicate_mesh_dim: int | None = None


class ShardPlacementResult(NamedTuple):
    """What a ``shard_placement_fn`` returns for a parameter that is sharded over a mesh of its own.

    Args:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh_info: The mesh: an :class:`FSDPMeshInfo`, or a 1-D or (replicate, shard) ``DeviceMesh`` as it is.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo | DeviceMesh
