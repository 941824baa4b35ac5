"""Policies that users choose per unit, as frozen values."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommQuantization",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "ShardingStrategy",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which a unit computes and reduces. Shards and optimizer state keep the parameters' dtype.

    Args:
        param_dtype: Dtype of unsharded floating-point parameters and computation. None: the parameters' dtype.
        reduce_dtype: Dtype in which gradients are accumulated over microbatches, and reduced. None: the dtype in which
            backward computes them.
        output_dtype: Floating-point tensors in the outputs are cast to it. None: no cast.
        cast_forward_inputs: Cast floating-point tensors in the inputs to ``param_dtype``.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``.
        ValueError: If a dtype is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        _check_dtypes(self, ("param_dtype", "reduce_dtype", "output_dtype"))
        _check_flags(self, ("cast_forward_inputs",))


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards, gradients and optimizer state on the device of the mesh: no offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and optimizer state in CPU memory; only unsharded parameters are on the device.

    Args:
        pin_memory: Page-lock this memory, so that copies to and from the device overlap with computation. It cannot be
            swapped out. No effect without an accelerator.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel axes of a mesh, for parameters that are DTensors on the whole mesh.

    Args:
        shard: Axis (or axes, flattened to one) to shard over.
        replicate: Axis (or axes) of replicas.

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
        """Axes to shard over; empty if none."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Axes of replicas; empty if none."""
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
        shard_mesh_dim: Axis of ``mesh`` to shard over.
        dp_mesh_dims: Data-parallel axes of ``spmd_mesh``, for parameters that are DTensors on it already; ``mesh`` is
            then its data-parallel submesh.
        spmd_mesh: The whole mesh, with the axes that are not data-parallel.

    Raises:
        ValueError: If only one of ``dp_mesh_dims`` and ``spmd_mesh`` is given.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = field(default=None, kw_only=True)
    spmd_mesh: DeviceMesh | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if (self.dp_mesh_dims is None) != (self.spmd_mesh is None):
            given, missing = ("dp_mesh_dims", "spmd_mesh") if self.spmd_mesh is None else ("spmd_mesh", "dp_mesh_dims")
            raise ValueError(f"{type(self).__name__}: found {given} without {missing}; pass both or neither")


@dataclass(frozen=True, eq=False)
class HSDPMeshInfo(FSDPMeshInfo):
    """An :class:`FSDPMeshInfo` with an axis of replicas.

    Args:
        replicate_mesh_dim: Axis of ``mesh`` with replicas.
    """

    replicate_mesh_dim: int | None = None


class ShardPlacementResult(NamedTuple):
    """Result of a ``shard_placement_fn`` for a parameter that is sharded over a separate mesh.

    Args:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh_info: The mesh: an :class:`FSDPMeshInfo`, or a 1-D or (replicate, shard) ``DeviceMesh`` as it is.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo | DeviceMesh


@dataclass(frozen=True)
class CommQuantization:
    """How large floating-point parameters and gradients are sent over one axis of the mesh, for slow networks.

    They are sent in blocks of ``block`` values with one fp32 scale each, which takes ``1 + 4 / block`` bytes per value.
    What does not qualify is sent in full precision: integers, fp64, what is small, and with None everything.

    Args:
        all_gather: Of weights. ``"int8"``: 255 equidistant values up to the largest of the block, so that the error is
            at most 1/254 of that. ``"fp8"`` (e4m3): an error of at most 1/16 of each value itself, and of 1/458,752 of
            the block's largest for values near 0. Every rank computes with the quantized weights, the same bits on
            all; shards keep their own precision.
        reduce: Of gradients, which are summed in fp32.
        block: Values that share a scale: a multiple of 16.
        min_bytes: Parameters that are smaller than this, in the dtype in which they are gathered or reduced, are sent
            in full precision.
        error_feedback: Add the quantization error of gradients to those of the next step. On the replicate axis only,
            where it costs this rank's part of the gradients in fp32, and a share of it: on the shard axis it would
            cost all of them.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If one is not of its type.
    """

    all_gather: Literal["int8", "fp8"] | None = None
    reduce: Literal["int8"] | None = None
    block: int = 128
    min_bytes: int = 64 * 1024
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, known in (("all_gather", (None, "int8", "fp8")), ("reduce", (None, "int8"))):
            if getattr(self, name) not in known:
                raise ValueError(f"CommQuantization: {name}: expected one of {known}, found {getattr(self, name)!r}")
        for name in ("block", "min_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"CommQuantization: {name}: expected an int, found {value!r}")
        if not 16 <= self.block <= 65536 or self.block % 16:
            raise ValueError(f"CommQuantization: block: expected a multiple of 16 up to 65536, found {self.block}")
        if self.min_bytes < 0:
            raise ValueError(f"CommQuantization: min_bytes: expected at least 0, found {self.min_bytes}")
        _check_flags(self, ("error_feedback",))


class ShardingStrategy(enum.Enum):
    """Sharding strategy of :class:`FullyShardedDataParallel`: a mesh and the time of resharding."""

    FULL_SHARD = enum.auto()  # parameters, gradients and optimizer state; reshard after forward
    SHARD_GRAD_OP = enum.auto()  # the same, but parameters stay unsharded from forward to backward
    NO_SHARD = enum.auto()  # no sharding: gradients are all-reduced
    HYBRID_SHARD = enum.auto()  # FULL_SHARD within a group, replicas over groups
    _HYBRID_SHARD_ZERO2 = enum.auto()  # SHARD_GRAD_OP within a group, replicas over groups

    @property
    def hybrid(self) -> bool:
        """True if sharded parameters are also replicated."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def keeps_unsharded(self) -> bool:
        """True if parameters stay unsharded from forward to backward."""
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(enum.Enum):
    """Time at which the parameters of the next unit of a backward are prefetched. None instead: no prefetching."""

    BACKWARD_PRE = enum.auto()  # before the backward of this unit: they overlap, two units are unsharded at a time
    BACKWARD_POST = enum.auto()  # after it, while its gradients are being reduced


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes in which a :class:`FullyShardedDataParallel` computes, reduces and keeps tensors.

    Args:
        param_dtype: Dtype of unsharded floating-point parameters and computation. None: the parameters' dtype.
        reduce_dtype: Dtype in which gradients are accumulated over microbatches, and reduced. None: ``param_dtype``.
        buffer_dtype: Floating-point buffers are cast to it before the first forward. None: no cast. State dicts have
            them in their original dtype.
        keep_low_precision_grads: Leave sharded gradients in the reduce dtype for the optimizer, instead of casting
            them to that of the shards.
        cast_forward_inputs: Cast floating-point inputs of modules other than the root.
        cast_root_forward_inputs: The same for the root.
        _module_classes_to_ignore: With an ``auto_wrap_policy``, modules of these classes become separate units in full
            precision, whose inputs are cast up and whose outputs are cast back.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, or a flag is not True or False.
        ValueError: If a dtype is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)

    def __post_init__(self) -> None:
        _check_dtypes(self, ("param_dtype", "reduce_dtype", "buffer_dtype"))
        _check_flags(self, ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"))
        classes = self._module_classes_to_ignore
        if not isinstance(classes, Iterable) or not all(isinstance(found, type) for found in classes):
            raise TypeError(f"MixedPrecision: _module_classes_to_ignore: expected a list of classes, found {classes!r}")


@dataclass(frozen=True)
class CPUOffload:
    """CPU offloading of a :class:`FullyShardedDataParallel`. Gradients of several backwards accumulate there.

    Args:
        offload_params: Offload shards, their gradients, and thereby optimizer state.
        offload_grads: Offload gradients, wherever the shards are.
    """

    offload_params: bool = False
    offload_grads: bool = False

    def __post_init__(self) -> None:
        _check_flags(self, ("offload_params", "offload_grads"))


def _check_dtypes(policy: object, names: Sequence[str]) -> None:
    for name in names:
        dtype = getattr(policy, name)
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{type(policy).__name__}: {name}: expected a torch.dtype or None, found {dtype!r}")
        if not dtype.is_floating_point:
            raise ValueError(f"{type(policy).__name__}: {name}: expected a floating-point dtype, found {dtype}")


def _check_flags(policy: object, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(getattr(policy, name), bool):
            raise TypeError(f"{type(policy).__name__}: {name}: expected True or False, found {getattr(policy, name)!r}")
