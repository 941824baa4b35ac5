"""Checks of arguments, and the meshes and placements that they describe. All ranks raise the same errors."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from fullshard.comm.mesh import ShardMesh, WholeMesh, axis_of, shard_mesh
from fullshard.engine.buckets.formats import PER_PARAMETER, ShardingFormat, added_layouts
from fullshard.engine.ownership import Subtree, all_modules, unit_of
from fullshard.engine.parameters.placement import ParameterPlacement
from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.parameters.spmd_types import SpmdTypes
from fullshard.policy import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from fullshard.wrap.tree import check_all, has_forward

__all__ = [
    "LAYOUT_VARIABLE",
    "GranularityChoice",
    "Place",
    "PlacementFunction",
    "check_bool",
    "check_instance",
    "check_parameters",
    "check_reshard",
    "default_mesh",
    "device_type_of",
    "ignored_parameters",
    "mesh_once",
    "placer",
    "root_modules",
    "shard_mesh_for",
    "sharding_format",
    "warn_if_unpinned",
]

TORCHS_ENGINE = ("torch.distributed.fsdp", "torch.distributed._composable.replicate_with_fsdp")

PlacementFunction = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]
Place = Callable[[str, nn.Parameter], ParameterPlacement]
GranularityChoice = str | int | Callable[[str, nn.Parameter], str | int]

LAYOUTS = ("per_parameter", "ragged")
LAYOUT_VARIABLE = "FULLSHARD_LAYOUT"


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, found {value!r} of type {type(value).__name__}")


def check_instance(name: str, value: object, expected: type | tuple[type, ...]) -> None:
    """Raise TypeError unless ``value`` is of an ``expected`` type."""
    if not isinstance(value, expected):
        types = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
        found, owner = type(value).__name__, type(value).__module__
        if owner.startswith(TORCHS_ENGINE):  # often of the same name
            found = f"torch's {owner}.{found}; import it from fullshard"
        raise TypeError(f"{name}: expected {names}, found {found}")


def root_modules(api: str, module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that become one unit: those given, without those nested in others of them.

    Raises:
        TypeError: If ``module`` is neither a module nor a list of modules.
        ValueError: If a list is empty, or a module is sharded already, or a container without forward.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{api}: expected an nn.Module or a list of them, found {type(module).__name__}")
    if not modules:
        raise ValueError(f"{api}: expected at least one module, found an empty list")
    for index, one in enumerate(modules):
        if not isinstance(one, nn.Module):
            raise TypeError(f"{api}: expected modules, found a {type(one).__name__} at index {index}")
    inside = {id(below) for one in modules for below in all_modules(one) if below is not one}
    roots = list({id(one): one for one in modules if id(one) not in inside}.values())
    for one in roots:
        _check_module(api, one)
    return roots


def _check_module(api: str, module: nn.Module) -> None:
    if unit_of(module) is not None:
        plain = getattr(type(module), "_fullshard_class", (type(module),))[0]
        raise ValueError(f"{api}: this {plain.__name__} is already sharded; call {api} once per module")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward(module):  # others may have other methods
        raise ValueError(
            f"{api}: {type(module).__name__} does not implement forward(), so its parameters would never be unsharded; "
            f"call {api} on each of its modules and on the module that contains it"
        )


def check_reshard(api: str, value: bool | int | None, world_size: int) -> bool | int | None:
    """Check ``reshard_after_forward``, and return a subgroup size of all ranks as True, of one rank as False.

    Raises:
        ValueError: If it is not a bool, None or a divisor of ``world_size``.
    """
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
        return False  # every rank keeps the unsharded parameters
    return True if value == world_size else value


def ignored_parameters(api: str, ignored: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    """Return ``ignored_params`` as a list.

    Raises:
        TypeError: If it is not an iterable of parameters.
    """
    return check_all(f"{api}: ignored_params", () if ignored is None else ignored, nn.Parameter)


def check_parameters(api: str, subtree: Subtree, ignored: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if a parameter is uninitialized (lazy), or a module is sharded by torch."""
    _check_engine(api, subtree.roots)
    ignored_ids = {id(parameter) for parameter in ignored}
    for prefix, submodule in subtree.managed:
        for name, parameter in submodule._parameters.items():
            if parameter is not None and id(parameter) not in ignored_ids and nn.parameter.is_lazy(parameter):
                fqn = f"{prefix}.{name}" if prefix else name
                raise ValueError(f"{api}: {fqn} is uninitialized (lazy); run a forward first so that it gets its shape")


def _check_engine(api: str, modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if torch's FSDP has sharded one of ``modules`` or a module in them."""
    kinds = {type(module) for root in modules for module in all_modules(root)}
    # By name: fullshard does not import torch's FSDP.
    others = {kind for kind in kinds if any(base.__module__.startswith(TORCHS_ENGINE) for base in kind.__mro__)}
    for root in modules if others else ():
        for name, module in root.named_modules():
            # Modules with a unit are sharded by fullshard, whatever their base classes.
            if type(module) in others and unit_of(module) is None:
                which = f"the module {name!r}" if name else "this module"
                raise ValueError(
                    f"{api}: {which}, a {type(module).__name__}, is sharded by torch.distributed.fsdp; expected "
                    "modules that are not sharded, or sharded by fullshard. Import fully_shard from fullshard "
                    "everywhere, or call fullshard.dropin.install() before the model is built"
                )


def sharding_format(
    api: str, layout: str | None, granularity: GranularityChoice, first_rank: int = 0
) -> ShardingFormat:
    """Return the sharding format for the arguments ``layout``, ``granularity`` and ``first_rank``.

    Raises:
        TypeError: If ``first_rank`` is not an int.
        ValueError: If there is no such layout, or it was not imported, or a granularity or a first rank is given for
            one that has none.
    """
    chosen = os.environ.get(LAYOUT_VARIABLE, "per_parameter") if layout is None else layout
    source = f"{LAYOUT_VARIABLE} in the environment" if layout is None else f"{api}: layout"
    if chosen not in LAYOUTS:
        raise ValueError(f"{source}: expected one of {', '.join(map(repr, LAYOUTS))}, found {chosen!r}")
    check_instance(f"{api}: first_rank", first_rank, int)
    if first_rank and (chosen != "ragged" or not (granularity == "parameter" or callable(granularity))):
        raise ValueError(
            f"{api}: first_rank: expected layout='ragged' and granularity='parameter', or a function, with "
            f"{first_rank}; found layout={chosen!r} and granularity={granularity!r}"
        )
    if chosen == "ragged":
        if chosen not in added_layouts:
            raise ValueError(f"{source}: 'ragged' needs `import fullshard.ragged` in the program, before this call")
        return added_layouts[chosen](granularity, first_rank)
    if granularity != "element":
        raise ValueError(f"{api}: granularity: expected layout='ragged' with {granularity!r}, found layout={chosen!r}")
    return PER_PARAMETER


@functools.cache
def warn_if_unpinned(pin: bool) -> None:
    """Warn, once per process, if memory is to be pinned but there is no accelerator."""
    if pin and not torch.accelerator.is_available():
        warnings.warn(
            "CPU offloading has no effect without an accelerator: parameters are already in CPU memory, and it is not "
            "pinned",
            stacklevel=3,
        )


def placer(api: str, mesh: ShardMesh, choose: PlacementFunction | None = None) -> Place:
    """Return the function that determines the placement of each parameter of one call, by FQN and parameter.

    Args:
        api: Name of the function that was called.
        mesh: Mesh of parameters for which ``choose`` returns no other.
        choose: The user's ``shard_placement_fn``.

    Raises:
        TypeError: If ``choose`` is not callable. The result raises ValueError if the user's choice, or the mesh of a
            DTensor, does not fit a parameter.
    """
    if choose is not None and not callable(choose):
        raise TypeError(f"{api}: shard_placement_fn: expected a function, found {type(choose).__name__}")

    def place(fqn: str, parameter: nn.Parameter) -> ParameterPlacement:
        chosen = choose(parameter) if choose is not None else None
        own_mesh, dim = mesh, 0
        if isinstance(chosen, ShardPlacementResult):
            own_mesh, chosen = _chosen_mesh(api, fqn, chosen), chosen.placement
        if chosen is not None:
            dim = _chosen_dim(api, fqn, parameter, chosen)
        own = parameter._spec if isinstance(parameter, DTensor) and managed_by(parameter) is None else None
        cut = dim if parameter.ndim else None
        try:
            if own is None:
                types = SpmdTypes.of(parameter, own_mesh.whole)
                if types is not None:
                    shape, stride = types.spec.shape, types.spec.stride
                    return ParameterPlacement(own_mesh, cut, shape, stride, types.spec, types)
                if own_mesh.whole is not None:
                    own_mesh = _mesh_of_plain(own_mesh, own_mesh.whole)
                return ParameterPlacement.of_plain(own_mesh, cut, parameter.shape, parameter.stride())
            return ParameterPlacement(own_mesh, cut, parameter.shape, tuple(parameter.stride()), own)
        except ValueError as error:
            raise ValueError(f"{api}: {fqn}: {error}") from error

    return place


def _mesh_of_plain(mesh: ShardMesh, whole: WholeMesh) -> ShardMesh:
    """Return the mesh for plain tensors, which ``dp_mesh_dims`` allow only if they name all axes."""
    used = whole.dims.shard_names + whole.dims.replicate_names
    others = [name for name in whole.device_mesh.mesh_dim_names or () if name not in used]
    if others:
        raise ValueError(
            "dp_mesh_dims: expected all parameters to be DTensors on the mesh, or annotated with spmd_types, found a "
            f"plain tensor without placements on the axes {others}; call torch.distributed.tensor.distribute_module "
            "first, or pass only the data-parallel submesh as mesh"
        )
    return mesh.for_plain()


def _chosen_dim(api: str, fqn: str, parameter: nn.Parameter, chosen: object) -> int:
    if not isinstance(chosen, Shard):
        raise ValueError(
            f"{api}: shard_placement_fn returned {chosen!r} for {fqn}; expected Shard(dim), ShardPlacementResult or "
            "None"
        )
    ndim = parameter.ndim
    if not -ndim <= chosen.dim < ndim:
        raise ValueError(
            f"{api}: shard_placement_fn returned Shard({chosen.dim}) for {fqn}, which has {ndim} dims "
            f"(shape {tuple(parameter.shape)})"
        )
    return chosen.dim % ndim


def _chosen_mesh(api: str, fqn: str, chosen: ShardPlacementResult) -> ShardMesh:
    info = chosen.mesh_info
    if isinstance(info, DeviceMesh):
        return shard_mesh_for(api, info, None)
    if not isinstance(info, FSDPMeshInfo):
        raise ValueError(
            f"{api}: shard_placement_fn returned a mesh_info of type {type(info).__name__} for {fqn}; "
            "expected FSDPMeshInfo, HSDPMeshInfo or a DeviceMesh"
        )
    if info.spmd_mesh is not None:
        return shard_mesh_for(api, info.spmd_mesh, info.dp_mesh_dims)
    shard = _axis(info.mesh, info.shard_mesh_dim)
    replicate = _axis(info.mesh, info.replicate_mesh_dim) if isinstance(info, HSDPMeshInfo) else None
    if shard is None and replicate is None:
        raise ValueError(f"{api}: {fqn}: mesh_info names no axis of {info.mesh}; pass shard_mesh_dim")
    return shard_mesh(info.mesh, shard, replicate)


def _axis(mesh: DeviceMesh, axis: int | None) -> DeviceMesh | None:
    if axis is None:
        return None
    return mesh if mesh.ndim == 1 else axis_of(mesh, axis)


def shard_mesh_for(api: str, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> ShardMesh:
    """Return the shard mesh for the arguments ``mesh`` (None: all ranks) and ``dp_mesh_dims``, cached per mesh.

    Raises:
        TypeError: If ``mesh`` is not a DeviceMesh, or ``dims`` is not a DataParallelMeshDims.
        ValueError: If the mesh does not have one or two axes, or lacks an axis that ``dims`` names.
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
        raise ValueError(f"{api}: dp_mesh_dims: expected axes of the mesh, {list(names)}, found {unknown}")
    return shard_mesh(mesh, dims=dims)


# By process group: there are several default ones if ranks are threads.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_once(group: dist.ProcessGroup, key: object, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Return the mesh that ``make`` makes: the same for the same group and key, so that units share transports."""
    known = _meshes.setdefault(group, {})
    if key not in known:
        known[key] = make()
    return known[key]


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return the 1-D mesh of all ranks, on devices of this type; None: on the accelerator if there is one.

    Initializes the default process group if necessary.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group()
        else:  # a plain `python script.py` without torchrun: a single rank
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    kind = device_type or device_type_of(group)
    return mesh_once(group, kind, lambda: init_device_mesh(kind, (group.size(),)))


def device_type_of(group: dist.ProcessGroup) -> str:
    """Return the type of the accelerator if there is one and ``group`` has a backend for it, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    try:
        group._get_backend(accelerator)
    except RuntimeError:
        return "cpu"
    return accelerator.type
