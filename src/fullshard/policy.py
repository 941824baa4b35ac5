"""Policies that users pass to ``fully_shard``, ``replicate`` and ``FullyShardedDataParallel``: immutable values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
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
    """Dtypes in which a unit computes and reduces gradients.

    Shards and optimizer state keep the parameters' dtype.

    Args:
        param_dtype: Dtype of unsharded floating-point parameters and of computation. None: the parameters' dtype.
        reduce_dtype: Dtype in which gradients are accumulated over microbatches and reduced. None: as the installed
            torch's FSDP2 does it. From torch 2.15 on, each parameter's ``grad_dtype``, by default its own dtype (fp32
            for fp32 parameters); before, ``param_dtype``.
        output_dtype: Dtype to which floating-point tensors in the outputs are cast. None: no cast.
        cast_forward_inputs: Cast floating-point tensors in the inputs to ``param_dtype``.
        param_dtype_override_fn: Called once with each parameter as it is sharded: the dtype in which this one is
            computed with and all-gathered, or None for ``param_dtype``. Equal on all ranks. Inputs are still cast to
            ``param_dtype``.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, ``cast_forward_inputs`` is not a bool, or
            ``param_dtype_override_fn`` is not callable.
        ValueError: If a dtype is not a floating-point dtype.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(nn.Linear(8, 4), mp_policy=policy)
        output = model(torch.randn(2, 8))
        assert output.dtype is torch.bfloat16
        output.sum().backward()
        assert model.weight.dtype is torch.float32 and model.weight.grad.dtype is torch.float32
        ```
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_dtypes(self, ("param_dtype", "reduce_dtype", "output_dtype"))
        _check_flags(self, ("cast_forward_inputs",))
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise TypeError(
                "MixedPrecisionPolicy: param_dtype_override_fn: expected a function or None, found "
                f"{self.param_dtype_override_fn!r}"
            )


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards, gradients and optimizer state on the device of the mesh: no offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and optimizer state in CPU memory; only unsharded parameters are on the device.

    Args:
        pin_memory: Pin (page-lock) the CPU memory, so that copies to and from the device overlap with computation.
            Pinned memory cannot be swapped out. No effect without an accelerator.
        fraction: Share of the bytes of each unit to offload, from 0 to 1: its largest parameters, as far as they do not
            exceed it. The others, with their gradients and optimizer state, stay on the device. The same on all ranks.

    Raises:
        TypeError: If ``fraction`` is not a number.
        ValueError: If ``fraction`` is not between 0 and 1.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import CPUOffloadPolicy, fully_shard

        model = fully_shard(nn.Linear(8, 4), offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(model.parameters())  # its state is in CPU memory, and it steps on the CPU
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        ```
    """

    pin_memory: bool = True
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)):
            raise TypeError(f"CPUOffloadPolicy: fraction: expected a number, found {self.fraction!r}")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"CPUOffloadPolicy: fraction: expected a number from 0 to 1, found {self.fraction!r}")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Data-parallel axes of a mesh, for parameters that are DTensors on the whole mesh.

    Args:
        shard: Name of the axis to shard over, or names of several axes, which are flattened into one.
        replicate: Name of the axis to replicate over, or names of several axes, which are flattened into one.

    Raises:
        ValueError: If neither is given, or an axis is named twice.

    Example:
        ```python
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

        from fullshard import DataParallelMeshDims, fully_shard

        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if accelerator is None else accelerator.type
        mesh = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))


        def replicated(name, module, mesh):  # a real plan shards over "tp" here
            for key, value in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(value, mesh, [Replicate(), Replicate()])
                module.register_parameter(key, nn.Parameter(placed))


        model = distribute_module(nn.Linear(8, 4), mesh, replicated)
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        ```
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
        """Names of the axes to shard over; empty if there are none."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes to replicate over; empty if there are none."""
        return _names(self.replicate)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True, eq=False)
class FSDPMeshInfo:
    """Mesh of the parameters for which a ``shard_placement_fn`` returns it in a ``ShardPlacementResult``.

    Args:
        mesh: 1-D mesh, or 2-D mesh with a replicate axis.
        shard_mesh_dim: Index of the axis of ``mesh`` to shard over.
        dp_mesh_dims: Data-parallel axes of ``spmd_mesh``, for parameters that are already DTensors on ``spmd_mesh``;
            ``mesh`` is then its data-parallel submesh.
        spmd_mesh: Whole mesh, with the axes that are not data-parallel.

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
    """An ``FSDPMeshInfo`` with a replicate axis.

    Args:
        mesh: 2-D mesh.
        shard_mesh_dim: Index of the axis of ``mesh`` to shard over.
        replicate_mesh_dim: Index of the axis of ``mesh`` to replicate over.
        dp_mesh_dims: Data-parallel axes of ``spmd_mesh``, for parameters that are already DTensors on ``spmd_mesh``;
            ``mesh`` is then its data-parallel submesh.
        spmd_mesh: Whole mesh, with the axes that are not data-parallel.

    Raises:
        ValueError: If only one of ``dp_mesh_dims`` and ``spmd_mesh`` is given.
    """

    replicate_mesh_dim: int | None = None


class ShardPlacementResult(NamedTuple):
    """Return value of a ``shard_placement_fn`` for a parameter that is sharded over a separate mesh.

    Attributes:
        placement: ``Shard(dim)``; None for ``Shard(0)``.
        mesh_info: The mesh as an ``FSDPMeshInfo``, or as a 1-D or 2-D (replicate, shard) ``DeviceMesh``.

    Example:
        ```python
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        from fullshard import ShardPlacementResult, fully_shard

        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if accelerator is None else accelerator.type
        mesh = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "expert_dp"))
        model = nn.ModuleDict({"dense": nn.Linear(8, 8), "expert": nn.Linear(8, 8)})
        experts = set(model["expert"].parameters())
        model.forward = lambda x: model["expert"](model["dense"](x))


        def place(parameter):
            return ShardPlacementResult(Shard(0), mesh["expert_dp"]) if parameter in experts else None


        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=place)
        ```
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo | DeviceMesh


@dataclass(frozen=True)
class CommQuantization:
    """Quantization of large floating-point parameters and gradients over one mesh axis, for slow networks.

    Pass it to ``set_comm_quantization``. Values are sent in blocks of ``block`` values with one fp32 scale each: ``1 +
    4 / block`` bytes per value. Integers, fp64 and parameters smaller than ``min_bytes`` are sent in full precision.

    Args:
        all_gather: Format of parameters in all-gathers. ``"int8"``: 255 equidistant values up to the largest magnitude
            of the block; the error is at most 1/254 of that magnitude. ``"fp8"`` (e4m3): the error is at most 1/16 of
            each value itself, and at most 1/458,752 of the block's largest magnitude for values near 0. All ranks
            compute with the same quantized bits; shards keep their precision. None: full precision.
        reduce: Format of gradients in reductions, which sum in fp32: ``"int8"``, or None for full precision.
        block: Number of values that share a scale: a multiple of 16, at most 65536.
        min_bytes: Parameters that are smaller than this, in the dtype in which they are all-gathered or reduced, are
            sent in full precision.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If an argument has the wrong type.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import CommQuantization, fully_shard

        model = fully_shard(nn.Linear(256, 256))
        model.set_comm_quantization(shard=CommQuantization(all_gather="int8", reduce="int8"))
        model(torch.randn(4, 256)).square().mean().backward()
        print(model.comm_quantization_report())
        ```
    """

    all_gather: Literal["int8", "fp8"] | None = None
    reduce: Literal["int8"] | None = None
    block: int = 128
    min_bytes: int = 64 * 1024

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


class ShardingStrategy(enum.Enum):
    """Sharding strategy of ``FullyShardedDataParallel``: the mesh, and when to reshard.

    Attributes:
        FULL_SHARD: Shard parameters, gradients and optimizer state; reshard after forward.
        SHARD_GRAD_OP: The same, but keep parameters unsharded from forward to backward.
        NO_SHARD: Shard nothing; all-reduce gradients.
        HYBRID_SHARD: FULL_SHARD within a group of ranks, replicated over the groups.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a group of ranks, replicated over the groups.
    """

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
    """Time at which the next unit is prefetched in backward of ``FullyShardedDataParallel``; None disables prefetching.

    Attributes:
        BACKWARD_PRE: Before the backward of the current unit, which overlaps with it; two units are unsharded at a
            time.
        BACKWARD_POST: After the backward of the current unit, while its gradients are being reduced.
    """

    BACKWARD_PRE = enum.auto()  # before the backward of this unit: they overlap, two units are unsharded at a time
    BACKWARD_POST = enum.auto()  # after it, while its gradients are being reduced


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes in which a ``FullyShardedDataParallel`` computes, reduces gradients and keeps buffers.

    Args:
        param_dtype: Dtype of unsharded floating-point parameters and of computation. None: the parameters' dtype.
        reduce_dtype: Dtype in which gradients are accumulated over microbatches and reduced. None: ``param_dtype``.
        buffer_dtype: Dtype to which floating-point buffers are cast before the first forward. None: no cast. State
            dicts contain them in their original dtype.
        keep_low_precision_grads: Leave sharded gradients in the reduce dtype for the optimizer, instead of casting them
            to the dtype of the shards.
        cast_forward_inputs: Cast floating-point inputs of modules other than the root.
        cast_root_forward_inputs: Cast floating-point inputs of the root.
        _module_classes_to_ignore: With an ``auto_wrap_policy``, modules of these classes become separate units in full
            precision. Their inputs are cast to full precision, and their outputs are cast back.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, a flag is not a bool, or ``_module_classes_to_ignore`` is not an
            iterable of classes.
        ValueError: If a dtype is not a floating-point dtype.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import FullyShardedDataParallel, MixedPrecision

        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(nn.Linear(8, 4), mixed_precision=precision)
        assert model(torch.randn(2, 8)).dtype is torch.bfloat16
        ```
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
    """CPU offloading of a ``FullyShardedDataParallel``.

    Gradients of several backwards accumulate in CPU memory. All parameters of a unit are offloaded, or none, because a
    flat parameter is on one device; ``fullshard.optim.offload`` offloads the optimizer state instead.

    Args:
        offload_params: Keep shards, their gradients, and thereby the optimizer state, in CPU memory.
        offload_grads: Keep gradients in CPU memory, wherever the shards are.

    Raises:
        TypeError: If an argument is not a bool.
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
