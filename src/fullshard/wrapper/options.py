"""Constructor arguments of ``FullyShardedDataParallel``, checked, and their translation to settings of a unit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm.mesh import ShardMesh, shard_mesh
from fullshard.engine.buckets.formats import FlatShardingFormat
from fullshard.engine.ownership import all_modules, unit_of
from fullshard.engine.settings import UnitPolicy, UnitSettings
from fullshard.frontend.arguments import (
    check_bool,
    check_instance,
    default_mesh,
    device_type_of,
    mesh_once,
    shard_mesh_for,
    warn_if_unpinned,
)
from fullshard.memory import allows_cpu_gradients
from fullshard.policy import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from fullshard.ranks.agreement import gather
from fullshard.wrap.tree import check_all

__all__ = ["API", "Groups", "WrapperOptions"]

API = "FullyShardedDataParallel"
AXES = ("replicate", "shard")  # names in the meshes of hybrid strategies

Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None

EXPECTED: dict[str, type] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
}


@dataclass(frozen=True)
class WrapperOptions:
    """The checked arguments of one wrapper. Equal on all ranks."""

    mesh: ShardMesh  # to shard and replicate over
    strategy: ShardingStrategy
    offload: CPUOffload
    prefetch: BackwardPrefetch | None
    precision: MixedPrecision | None  # None: the parameters' dtypes
    param_init_fn: Callable[[nn.Module], object] | None  # for modules on the meta device; None: reset_parameters
    sync_module_states: bool
    use_orig_params: bool
    casts_around: bool = False  # cast inputs to full precision and outputs back, see MixedPrecision

    @classmethod
    def of(cls, module: nn.Module, given: Mapping[str, Any]) -> WrapperOptions:
        """Check the arguments of the constructor, given by name.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If arguments contradict each other.
        """
        for name, kind in EXPECTED.items():
            check_instance(f"{API}: {name}", given[name], (kind, type(None)))
        for flag in ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"):
            check_bool(f"{API}: {flag}", given[flag])
        init = given["param_init_fn"]
        if init is not None and not callable(init):
            raise ValueError(f"{API}: param_init_fn: expected a function of a module, found {init!r}")
        warn_if_unpinned(given["cpu_offload"] is not None and given["cpu_offload"].offload_params)
        strategy = given["sharding_strategy"] or ShardingStrategy.FULL_SHARD
        device_type = _device_type(module, given["device_id"])
        mesh = _mesh(strategy, given["process_group"], given["device_mesh"], device_type)
        if device_type not in (None, mesh.device.type):
            raise ValueError(
                f"{API}: the module or device_id is on {device_type}, but the device mesh has {mesh.device.type} "
                "devices; pass a mesh of the devices to compute on"
            )
        offload = given["cpu_offload"] or CPUOffload()
        if offload.offload_grads and not offload.offload_params and not allows_cpu_gradients(mesh.device):
            raise ValueError(
                f"{API}: cpu_offload: offload_grads=True requires offload_params=True: in torch, a parameter on a "
                f"{mesh.device.type} device cannot have a gradient in CPU memory"
            )
        return cls(
            mesh=mesh,
            strategy=strategy,
            offload=offload,
            prefetch=given["backward_prefetch"],
            precision=given["mixed_precision"],
            param_init_fn=init,
            sync_module_states=given["sync_module_states"],
            use_orig_params=given["use_orig_params"],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapperOptions:
        """Return the same options: they belong to process groups, which copies share."""
        return self

    def policy(self, module: nn.Module) -> UnitPolicy:
        """Return the policy of the unit of a wrapped module; the wrapper casts inputs itself."""
        return self._policy if self.use_orig_params else self._policy._replace(form=FlatShardingFormat(module))

    @cached_property
    def _policy(self) -> UnitPolicy:
        precision = self.precision or MixedPrecision()
        return UnitPolicy(
            MixedPrecisionPolicy(
                precision.param_dtype, precision.reduce_dtype or precision.param_dtype, cast_forward_inputs=False
            ),
            CPUOffloadPolicy() if self.offload.offload_params else OffloadPolicy(),
            FlatShardingFormat(None),
            self.offload.offload_grads,
            precision.keep_low_precision_grads,
        )

    def settings(self) -> UnitSettings:
        """Return the settings of a unit for the sharding strategy."""
        order = {BackwardPrefetch.BACKWARD_PRE: "before", BackwardPrefetch.BACKWARD_POST: "after", None: "none"}
        return UnitSettings(
            reshard_after_forward=False if self.strategy.keeps_unsharded else None,
            backward_order=order[self.prefetch],  # type: ignore[arg-type]
        )


def _device_type(module: nn.Module, device_id: int | torch.device | None) -> str | None:
    """Return the type of the compute device; None if it is not specified.

    A device with an index becomes the current device.
    """
    check_instance(f"{API}: device_id", device_id, (int, torch.device, type(None)))
    tensors = (t for m in all_modules(module) for t in (*m._parameters.values(), *m._buffers.values()))
    on_accelerators = {t.device for t in tensors if t is not None and t.device.type not in ("cpu", "meta")}
    types = sorted({device.type for device in on_accelerators})
    if len(types) > 1:
        raise ValueError(f"{API}: expected a module on one type of accelerator, found {types}; move it to one type")
    if device_id is None:
        return types[0] if types else None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    device = torch.device(kind, device_id) if isinstance(device_id, int) else device_id
    if device.type not in ("cpu", kind):
        available = "no accelerator" if accelerator is None else accelerator.type
        raise ValueError(f"{API}: device_id is {device}, but this machine has {available}; pass an available device")
    if device.type != "cpu" and device.index is None:
        current = torch.accelerator.current_device_index()
        warnings.warn(f"{API}: device_id {device} has no index; using the current device, {current}", stacklevel=4)
        return device.type
    if on_accelerators - {device}:
        raise ValueError(
            f"{API}: device_id is {device}, but the module has parameters on {sorted(map(str, on_accelerators))}; move "
            f"the module to {device} or to the CPU first, or pass its device"
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device.type


def _mesh(strategy: ShardingStrategy, groups: Groups, mesh: DeviceMesh | None, device_type: str | None) -> ShardMesh:
    check_instance(f"{API}: device_mesh", mesh, (DeviceMesh, type(None)))
    if groups is not None and mesh is not None:
        raise ValueError(f"{API}: expected process_group or device_mesh, found both; pass only one")
    if groups is not None:
        mesh = _mesh_of(strategy, groups, device_type)
    elif mesh is None:
        mesh = _hybrid_mesh(device_type) if strategy.hybrid else default_mesh(device_type)
    ndim, described = (2, "2-D device_mesh (replicate, shard)") if strategy.hybrid else (1, "1-D device_mesh")
    if mesh.ndim != ndim:
        raise ValueError(f"{API}: {strategy.name} requires a {described}, found {mesh.ndim} dimensions in {mesh}")
    return shard_mesh(mesh, None, mesh) if strategy is ShardingStrategy.NO_SHARD else shard_mesh_for(API, mesh, None)


def _mesh_of(strategy: ShardingStrategy, groups: Groups, device_type: str | None) -> DeviceMesh:
    """Return a mesh on process groups."""
    given: tuple[Any, ...] = groups if isinstance(groups, tuple) else (groups,)
    if strategy.hybrid:
        if len(given) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in given):
            raise ValueError(
                f"{API}: {strategy.name} requires process_group=None or a tuple of two process groups (shard, "
                f"replicate); found {groups!r}"
            )
    elif not isinstance(groups, dist.ProcessGroup):
        raise TypeError(f"{API}: process_group: expected a process group, found {type(groups).__name__}")
    device_type = device_type or device_type_of(given[0])

    def make() -> DeviceMesh:
        if len(given) == 1:
            return DeviceMesh.from_group(given[0], device_type)
        shard, replicate = given
        rows = gather(dist.get_process_group_ranks(shard), replicate)
        ranks = torch.tensor(list(rows.values()), dtype=torch.int, device="cpu")
        return DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=AXES)

    return mesh_once(given[0], (tuple(group.group_name for group in given), device_type), make)


def _hybrid_mesh(device_type: str | None) -> DeviceMesh:
    """Return a mesh that shards within a machine and replicates over machines, from torchrun's LOCAL_WORLD_SIZE."""
    world = default_mesh(device_type)
    ranks = world.size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not local:
        local = min(torch.accelerator.device_count(), ranks) if world.device_type != "cpu" else ranks
    if ranks % local:
        raise ValueError(
            f"{API}: hybrid sharding requires the same number of ranks on every machine, found {ranks} ranks in all "
            f"and {local} on this machine; pass device_mesh=init_device_mesh(type, (machines, ranks_per_machine))"
        )
    shape = (ranks // local, local)
    group, key = dist.group.WORLD, (world.device_type, shape)
    assert group is not None
    return mesh_once(group, key, lambda: init_device_mesh(world.device_type, shape, mesh_dim_names=AXES))


def ignored_states(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules, with all their children, and parameters of ``ignored_modules`` or ``ignored_states``.

    Raises:
        TypeError: If an element is neither a module nor a parameter.
        ValueError: If both are given, or ``ignored_states`` mixes modules and parameters.
    """
    if modules is not None and states is not None:
        raise ValueError(f"{API}: expected ignored_modules or ignored_states, found both; pass only one")
    name, given = ("ignored_modules", modules) if states is None else ("ignored_states", states)
    allowed = (nn.Module,) if states is None else (nn.Module, nn.Parameter)
    found: list[Any] = check_all(f"{API}: {name}", () if given is None else given, *allowed)
    parameters = {p for p in found if isinstance(p, nn.Parameter)}
    roots = [m for m in found if isinstance(m, nn.Module)]
    if parameters and roots:
        kinds = sorted({type(x).__name__ for x in found})
        raise ValueError(f"{API}: ignored_states: expected all parameters or all modules, found {kinds}")
    below: set[nn.Module] = set()
    for root in roots:
        if unit_of(root) is not None:
            raise ValueError(f"{API}: {name}: expected modules that are not sharded, found a {type(root).__name__}")
        if root is module:
            warnings.warn(f"{API}: the wrapped module itself is ignored, so nothing in it is sharded", stacklevel=4)
        below.update(root.modules())
    return below, parameters | {p for m in below for p in m._parameters.values() if p is not None}
