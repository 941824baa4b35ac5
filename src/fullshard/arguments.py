"""Checks of what users pass, and the meshes that they mean. All ranks are to find the same faults."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from fullshard.engine.mesh import ShardMesh, axis_of, shard_mesh
from fullshard.engine.ownership import managed_modules, unit_of
from fullshard.engine.parameter import managed_by
from fullshard.engine.placement import ParameterPlacement
from fullshard.policy import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

__all__ = [
    "PlacementFunction",
    "Placer",
    "check_bool",
    "check_instance",
    "check_modules",
    "check_parameters",
    "check_reshard",
    "default_mesh",
    "ignored_parameters",
    "note_unpinned",
    "root_modules",
    "shard_mesh_for",
]

TORCHS_ENGINE = ("torch.distributed.fsdp", "torch.distributed._composable.replicate_with_fsdp")

PlacementFunction = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, found {value!r} of type {type(value).__name__}")


def check_instance(name: str, value: object, expected: type | tuple[type, ...]) -> None:
    """Raise TypeError unless ``value`` is of an ``expected`` type."""
    if not isinstance(value, expected):
        wanted = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in wanted)
        found, owner = type(value).__name__, type(value).__module__
        if owner.startswith(TORCHS_ENGINE):  # of the same name
            found = f"torch's {owner}.{found}; take it from fullshard"
        raise TypeError(f"{name}: expected {names}, found {found}")


def root_modules(api: str, module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that become one unit: those given, without those that others of them contain.

    Raises:
        TypeError: If something else was passed.
        ValueError: If a list is empty, or a module is a unit already or has no forward.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{api}: expected an nn.Module or a list of them, found {type(module).__name__}")
    if not modules:
        raise ValueError(f"{api}: expected at least one module, found an empty list")
    for index, one in enumerate(modules):
        if not isinstance(one, nn.Module):
            raise TypeError(f"{api}: expected modules, found a {type(one).__name__} at index {index}")
    inside = {id(below) for one in modules for below in one.modules() if below is not one}
    roots = list({id(one): one for one in modules if id(one) not in inside}.values())
    for one in roots:
        _check_module(api, one)
    return roots


def _check_module(api: str, module: nn.Module) -> None:
    if unit_of(module) is not None:
        plain = getattr(type(module), "_fullshard_class", (type(module),))[0]
        raise ValueError(
            f"{api}: this {plain.__name__} is a unit already, made by an earlier call; each module can be one once"
        )
    # torch.compile, and those who patch models, put a forward on the instance.
    if "forward" not in module.__dict__ and type(module).forward in (
        nn.Module.forward,
        nn.ModuleList.forward,
        nn.ModuleDict.forward,
    ):
        raise ValueError(
            f"{api}: {type(module).__name__} has no forward of its own, so there is no moment to gather "
            f"its parameters; call {api} on each of its modules and on the module that contains it"
        )


def check_reshard(api: str, value: bool | int | None, world_size: int) -> bool | int | None:
    """``reshard_after_forward``, with group sizes that come to the same as True or False resolved."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            f"{api}: reshard_after_forward: expected True, False, None or a number of ranks, found {value!r} of type "
            f"{type(value).__name__}"
        )
    if value < 1 or world_size % value:
        raise ValueError(
            f"{api}: reshard_after_forward: expected a divisor of the {world_size} ranks of the shard axis, "
            f"found {value}"
        )
    if value == 1:
        return False  # every rank keeps everything
    return True if value == world_size else value


def ignored_parameters(api: str, ignored: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    """``ignored_params`` as a list."""
    if isinstance(ignored, torch.Tensor) or not isinstance(ignored, (Iterable, type(None))):
        raise TypeError(f"{api}: ignored_params: expected a set or list of parameters, found {type(ignored).__name__}")
    found = list(ignored or ())
    for parameter in found:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                f"{api}: ignored_params: expected parameters, found a {type(parameter).__name__}; "
                "pass module.parameters() to ignore a module"
            )
    return found


def check_parameters(api: str, modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if a parameter has no shape yet, or a module is sharded by torch."""
    _check_engine(api, modules)
    ignored_ids = {id(parameter) for parameter in ignored}
    for prefix, submodule in managed_modules(modules):
        for name, parameter in submodule._parameters.items():
            if parameter is not None and id(parameter) not in ignored_ids and nn.parameter.is_lazy(parameter):
                fqn = f"{prefix}.{name}" if prefix else name
                raise ValueError(f"{api}: {fqn} is uninitialised; run a forward first so that it gets its shape")


def _check_engine(api: str, modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if torch's FSDP has sharded one of ``modules`` or what is in them."""
    for root in modules:
        for name, module in root.named_modules():
            # By name: nothing here imports torch's FSDP. Units are ours, whatever their classes are derived from.
            owners = (base.__module__ for base in type(module).__mro__) if unit_of(module) is None else ()
            if any(owner.startswith(TORCHS_ENGINE) for owner in owners):
                which = f"the module {name!r}" if name else "this module"
                raise ValueError(
                    f"{api}: {which}, a {type(module).__name__}, is sharded by torch.distributed.fsdp; expected ones "
                    "that are not sharded, or sharded by fullshard: two engines cannot share a model. Import both "
                    "functions from fullshard, or call fullshard.dropin.install() before the model is built"
                )


def note_unpinned(pin: bool) -> None:
    """Warn, once, that memory is not page-locked although it was asked to be: that needs an accelerator."""
    if pin and not torch.accelerator.is_available():
        _warn_unpinned()


@functools.cache
def _warn_unpinned() -> None:
    warnings.warn(
        "CPU offloading on a machine without accelerator: everything is in CPU memory anyway, nothing moves, and "
        "memory is not pinned",
        stacklevel=4,
    )


def check_modules(api: str, modules: Iterable[Any], expected: type[nn.Module]) -> list[nn.Module]:
    """``modules`` as a list, all of them sharded ones."""
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise TypeError(f"{api}: expected a list of modules, found {type(modules).__name__}")
    found = list(modules)
    for index, module in enumerate(found):
        if not isinstance(module, expected):
            raise ValueError(
                f"{api}: expected modules that fully_shard was called on, found {type(module).__name__} at "
                f"index {index}"
            )
    return found


class Placer:
    """Decides where the parameters of one call are placed.

    Args:
        api: Name of the function that was called.
        mesh: For parameters that ``choose`` says nothing else about.
        choose: The user's ``shard_placement_fn``.
    """

    _api: str
    _mesh: ShardMesh
    _choose: PlacementFunction | None

    def __init__(self, api: str, mesh: ShardMesh, choose: PlacementFunction | None) -> None:
        if choose is not None and not callable(choose):
            raise TypeError(f"{api}: shard_placement_fn: expected a function, found {type(choose).__name__}")
        self._api, self._mesh, self._choose = api, mesh, choose

    def __call__(self, fqn: str, parameter: nn.Parameter) -> ParameterPlacement:
        """The placement of ``parameter``.

        Raises:
            ValueError: If the user's choice, or the mesh of a DTensor, does not fit it.
        """
        chosen = self._choose(parameter) if self._choose is not None else None
        mesh, cut = self._mesh, 0
        if isinstance(chosen, ShardPlacementResult):
            mesh, chosen = self._own_mesh(fqn, chosen), chosen.placement
        if chosen is not None:
            cut = self._cut(fqn, parameter, chosen)
        own = parameter._spec if isinstance(parameter, DTensor) and managed_by(parameter) is None else None
        if own is None and mesh.whole is not None:
            mesh = self._mesh_of_plain(fqn, mesh)
        try:
            return ParameterPlacement(
                mesh, cut if parameter.ndim else None, parameter.shape, tuple(parameter.stride()), own
            )
        except ValueError as error:
            raise ValueError(f"{self._api}: {fqn}: {error}") from error

    def _mesh_of_plain(self, fqn: str, mesh: ShardMesh) -> ShardMesh:
        """For plain tensors, where ``dp_mesh_dims`` are all axes of the mesh, so that no other layout can be meant."""
        assert mesh.whole is not None
        whole, dims = mesh.whole
        others = [name for name in whole.mesh_dim_names or () if name not in dims.shard_names + dims.replicate_names]
        if others:
            raise ValueError(
                f"{self._api}: with dp_mesh_dims all parameters have to be DTensors on the mesh; {fqn} is a plain "
                f"tensor, of which nobody knows how it lies on {others}; use torch.distributed.tensor."
                "distribute_module, or pass the data-parallel mesh alone"
            )
        return mesh.for_plain()

    def _cut(self, fqn: str, parameter: nn.Parameter, chosen: object) -> int:
        if not isinstance(chosen, Shard):
            raise ValueError(
                f"{self._api}: shard_placement_fn returned {chosen!r} for {fqn}; expected Shard(dim), "
                "ShardPlacementResult or None"
            )
        ndim = parameter.ndim
        if not -ndim <= chosen.dim < ndim:
            raise ValueError(
                f"{self._api}: shard_placement_fn returned Shard({chosen.dim}) for {fqn}, which has {ndim} dims "
                f"(shape {tuple(parameter.shape)})"
            )
        return chosen.dim % ndim

    def _own_mesh(self, fqn: str, chosen: ShardPlacementResult) -> ShardMesh:
        info = chosen.mesh_info
        if isinstance(info, DeviceMesh):
            return shard_mesh_for(self._api, info, None)
        if not isinstance(info, FSDPMeshInfo):
            raise ValueError(
                f"{self._api}: shard_placement_fn returned a mesh_info of type {type(info).__name__} for {fqn}; "
                "expected FSDPMeshInfo, HSDPMeshInfo or a DeviceMesh"
            )
        if info.spmd_mesh is not None:
            return shard_mesh_for(self._api, info.spmd_mesh, info.dp_mesh_dims)
        shard = _axis(info.mesh, info.shard_mesh_dim)
        replicate = _axis(info.mesh, info.replicate_mesh_dim) if isinstance(info, HSDPMeshInfo) else None
        parts = [part for part in (replicate, shard) if part is not None]
        if not parts:
            raise ValueError(f"{self._api}: {fqn}: mesh_info names no axis of {info.mesh}; pass shard_mesh_dim")
        return shard_mesh(info.mesh, shard, replicate)


def _axis(mesh: DeviceMesh, axis: int | None) -> DeviceMesh | None:
    if axis is None:
        return None
    return mesh if mesh.ndim == 1 else axis_of(mesh, axis)


def shard_mesh_for(api: str, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> ShardMesh:
    """The ranks that ``mesh`` (None: all) and ``dp_mesh_dims`` mean. One value per mesh, shared by its units.

    Raises:
        TypeError: If ``mesh`` is not a DeviceMesh, or ``dims`` no DataParallelMeshDims.
        ValueError: If the mesh has not one or two axes, or not those that ``dims`` names.
    """
    check_instance(f"{api}: mesh", mesh, (DeviceMesh, type(None)))
    check_instance(f"{api}: dp_mesh_dims", dims, (DataParallelMeshDims, type(None)))
    if mesh is None:
        mesh = default_mesh()
    if dims is None:
        if mesh.ndim > 2:
            raise ValueError(
                f"{api}: mesh: expected 1 dimension, or 2 (replicate, shard), found {mesh.ndim} in {mesh}; pass a "
                "submesh such as mesh['dp'], or dp_mesh_dims"
            )
        if mesh.ndim == 1:
            return shard_mesh(mesh, mesh, None)
        return shard_mesh(mesh, axis_of(mesh, 1), axis_of(mesh, 0))
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in dims.shard_names + dims.replicate_names if name not in names]
    if unknown:
        raise ValueError(f"{api}: dp_mesh_dims names {unknown}, but the axes of the mesh are {list(names)}")
    return shard_mesh(mesh, dims=dims)


# Meshes of default groups, by device type: of several, where ranks are threads or a program starts a new one.
_default: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """All ranks in one dimension, on devices of this type; None: on the accelerator if there is one.

    Starts the default process group if that was not done.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group()
        else:  # a plain `python script.py`: the only sensible world is this process
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    if device_type is None:
        on_accelerator = accelerator is not None and _serves(group, accelerator)
        device_type = accelerator.type if accelerator is not None and on_accelerator else "cpu"
    known = _default.setdefault(group, {})
    if device_type not in known:
        known[device_type] = init_device_mesh(device_type, (group.size(),))
    return known[device_type]


def _serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True
