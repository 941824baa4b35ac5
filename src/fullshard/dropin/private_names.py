"""Private names of torch's FSDP that programs rely on, implemented on fullshard's engine.

[Note: Private names]
Each is a thin view on an object of the engine, which does not know them: torch's *state* of a module and its *parameter
groups* are views on a unit. Names in ``PRIVATE_NAMES`` replace those of torch's private modules; attributes that
``patched_attributes`` returns are set on fullshard's classes while the drop-in is installed.

Users: accelerate upcasts through ``_flat_param`` and ``_handle``; Lightning reads ``_fsdp_flattened``; transformers'
``generate`` and dynamo ``_is_fsdp_managed_module``; torchtitan makes mesh infos with ``_get_mesh_info``; pipelining
reduces gradients through ``fully_shard.state``; tests of device back ends read training states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard.composable import fsdp_module, module_class
from fullshard.dropin.param_groups import FSDPParamGroup, ShardedState, TrainingState, WrapperTrainingState
from fullshard.engine import hooks
from fullshard.engine.ownership import all_modules, nested_units, unit_of
from fullshard.engine.parameters.flat import FlatShardedParameter
from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.runtime import each_runtime, ensure_idle, runtime_of
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import check_reshard, default_mesh, shard_mesh_for
from fullshard.frontend.sharded_module import ShardedModule
from fullshard.policy import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardingStrategy

__all__ = ["PRIVATE_NAMES", "patched_attributes"]

ROOT = "torch.distributed.fsdp"
COMPOSABLE = f"{ROOT}._fully_shard"


# ---------------------------------------------------------------- states


class FSDPState:
    """View on the unit of a module, and on its root."""

    _module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self._module)
        if unit is None:
            raise FullshardError(f"this {type(self._module).__name__} is no longer sharded")
        return unit

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return [FSDPParamGroup(self._unit)] if self._unit.parameters else []

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _is_root(self) -> bool:
        return runtime_of(self._unit).root() is self._unit

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for ref in self._unit.modules if (module := ref()) is not None)

    @property
    def _state_ctx(self) -> SimpleNamespace:
        """All states of sharded modules below this one, each unit's once."""
        by_unit = {id(unit_of(below)): below for below in reversed(all_modules(self._module)) if unit_of(below)}
        return SimpleNamespace(all_states=[FSDPState(below) for below in reversed(by_unit.values())])

    @property
    def _training_state(self) -> TrainingState:
        return FSDPParamGroup(self._unit)._training_state

    def _pre_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return runtime_of(self._unit).pre_forward(self._unit, args, kwargs)

    def _post_forward(self, module: nn.Module, _: Any, output: Any) -> Any:
        return runtime_of(self._unit).post_forward(self._unit, module, output)

    def _root_post_backward_final_callback(self) -> None:
        """Wait for the reductions in flight."""
        for runtime in each_runtime(nested_units(self._module)):
            runtime.finish_reductions()


def state_of(module: nn.Module) -> FSDPState:
    """Return the state of a sharded module: ``fully_shard.state`` and ``replicate.state``.

    Raises:
        FullshardError: If the module is not sharded.
    """
    if unit_of(module) is None:
        raise FullshardError(f"state: expected a module that fully_shard was called on, found {type(module).__name__}")
    return FSDPState(module)


def _state_if_sharded(module: nn.Module) -> FSDPState | None:
    return FSDPState(module) if unit_of(module) is not None else None


# ---------------------------------------------------------------- meshes


def get_mesh_info(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Return the mesh info for arguments of ``fully_shard``, as ``ShardPlacementResult`` takes it.

    Raises:
        ValueError: If no axis of the mesh is sharded over.
    """
    ranks = shard_mesh_for("fully_shard", mesh, dp_mesh_dims)
    if ranks.shard is None:
        raise ValueError(
            f"_get_mesh_info: expected a mesh dimension to shard over, found only replicate dimensions in {mesh}"
        )
    named: dict[str, Any] = {} if dp_mesh_dims is None else {"dp_mesh_dims": dp_mesh_dims, "spmd_mesh": mesh}
    if ranks.replicate is None:
        return FSDPMeshInfo(ranks.shard, shard_mesh_dim=0, **named)
    if dp_mesh_dims is None:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return HSDPMeshInfo(DeviceMesh._concatenate([ranks.replicate, ranks.shard]), 1, 0, **named)


def get_post_forward_mesh_info(reshard_after_forward: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """Return the mesh of parameters between forward and backward; None: they stay unsharded."""
    mesh, axis = mesh_info.mesh, mesh_info.shard_mesh_dim or 0
    reshard = check_reshard("fully_shard", reshard_after_forward, mesh.size(axis))
    if reshard is True or reshard is None:
        return mesh_info
    if reshard is False:
        return None
    return HSDPMeshInfo(DeviceMesh(mesh.device_type, mesh.mesh.view(-1, reshard)), 1, 0)


# ---------------------------------------------------------------- classes


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return the sharded classes by original class."""
    return {
        plain: made
        for (plain, methods, base), made in module_class._sharded_classes.items()
        if not methods and base is fsdp_module.FSDPModule
    }


@contextlib.contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Construct sharded classes without ``__init__`` inside, for unpickling guards of compiled code."""
    construct = fsdp_module.FSDPModule.__dict__["__new__"]

    def empty(cls: type, *_: Any, **__: Any) -> Any:
        plain = cls._fullshard_class[0]  # type: ignore[attr-defined]
        return plain.__new__(plain)

    fsdp_module.FSDPModule.__new__ = staticmethod(empty)  # type: ignore[method-assign]
    try:
        yield
    finally:
        fsdp_module.FSDPModule.__new__ = construct  # type: ignore[method-assign]


# ---------------------------------------------------------------- the wrapper


class FlatParamView:
    """View on a wrapper's parameters as one flat parameter: to read dtypes, and to cast.

    Its ``data`` is the concatenation of this rank's shards of all parameters of one dtype. Assigning to ``data`` casts
    the parameters to the dtype of the assigned tensor, whose values are ignored.
    """

    _wrapper: nn.Module

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper = wrapper

    @property
    def _parameters(self) -> list[FlatShardedParameter]:
        unit = unit_of(self._wrapper)
        assert unit is not None
        flat = [p for p in unit.parameters if isinstance(p, FlatShardedParameter)]
        trained = [p for p in flat if p.requires_grad] or flat
        return [p for p in trained if p.local.dtype == trained[0].local.dtype]

    @property
    def _fqns(self) -> list[str]:
        return [p.fqn for p in self._parameters]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the shards."""
        return self._parameters[0].local.dtype

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return self._parameters[0].local.device

    @property
    def requires_grad(self) -> bool:
        """True if any of the parameters requires a gradient."""
        return any(p.requires_grad for p in self._parameters)

    @property
    def data(self) -> torch.Tensor:
        """Copy of this rank's shards, concatenated, 1-D. Assigning casts the parameters to the tensor's dtype."""
        return torch.cat([p.local.detach().reshape(-1) for p in self._parameters])

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        unit = unit_of(self._wrapper)
        assert unit is not None
        ensure_idle(unit)
        unit.reshard()
        for parameter in self._parameters:
            parameter.sharded.data = parameter.sharded.data.to(value.dtype)
        unit.write_back()


class FlatParamHandleView:
    """View on a wrapper as torch's flat-parameter handle: its flat parameter and original dtype."""

    _orig_param_dtype: torch.dtype
    flat_param: FlatParamView | fullshard.FlatParameter

    def __init__(self, flat: FlatParamView | fullshard.FlatParameter) -> None:
        self.flat_param, self._orig_param_dtype = flat, flat.dtype


def _has_params(wrapper: nn.Module) -> bool:
    unit = unit_of(wrapper)
    return unit is not None and bool(unit.parameters)


def _flat_param(wrapper: nn.Module) -> FlatParamView | fullshard.FlatParameter | None:
    if not _has_params(wrapper):
        return None
    view = FlatParamView(wrapper)
    handle = view._parameters[0].handle
    return view if handle is None else handle.flat


def _handle(wrapper: nn.Module) -> FlatParamHandleView | None:
    flat = _flat_param(wrapper)
    return None if flat is None else FlatParamHandleView(flat)


# ---------------------------------------------------------------- attributes


def _is_managed(module: nn.Module) -> bool:
    """True if parameters of ``module``, or of modules below, belong to a unit."""
    if isinstance(module, ShardedModule):
        return True
    return any(managed_by(parameter) is not None for parameter in module.parameters())


def _is_flattened(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, fullshard.FlatParameter) or isinstance(managed_by(parameter), FlatShardedParameter)


class ComputedAttribute:
    """An attribute that is computed when it is read, unless a program has set it on the object."""

    _compute: Callable[[Any], Any]

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._compute(instance)


def patched_attributes() -> list[tuple[Any, str, Any]]:
    """Return the attributes to set while the drop-in is installed: holder, name and value of each."""
    wrapper = fullshard.FullyShardedDataParallel
    return [
        (wrapper, "_has_params", property(_has_params)),
        (wrapper, "_flat_param", property(_flat_param)),
        (wrapper, "_handle", property(_handle)),
        (fullshard.FlatParameter, "_fqns", property(lambda flat: list(flat.fqns))),
        (fullshard.FSDPModule, "_get_fsdp_state", state_of),
        (fullshard.fully_shard, "state", state_of),
        (fullshard.replicate, "state", state_of),
        (nn.Module, "_is_fsdp_managed_module", ComputedAttribute(_is_managed)),
        # dynamo compiles only modules with it: all of fullshard's.
        (nn.Module, "_fsdp_use_orig_params", ComputedAttribute(_is_managed)),
        (nn.Parameter, "_fsdp_flattened", ComputedAttribute(_is_flattened)),
    ]


PRIVATE_NAMES: dict[tuple[str, str], Any] = {
    (f"{COMPOSABLE}._fsdp_common", "TrainingState"): TrainingState,
    (f"{COMPOSABLE}._fsdp_param", "ShardedState"): ShardedState,
    (f"{COMPOSABLE}._fsdp_param_group", "FSDPParamGroup"): FSDPParamGroup,
    (f"{COMPOSABLE}._fsdp_param_group", "RegisterPostBackwardFunction"): hooks._Boundary,
    (f"{COMPOSABLE}._fsdp_state", "FSDPState"): FSDPState,
    (f"{COMPOSABLE}._fsdp_state", "_get_module_fsdp_state"): _state_if_sharded,
    (f"{COMPOSABLE}._fsdp_init", "_get_mesh_info"): get_mesh_info,
    (f"{COMPOSABLE}._fsdp_init", "_get_post_forward_mesh_info"): get_post_forward_mesh_info,
    (f"{COMPOSABLE}._fsdp_init", "_init_default_mesh"): default_mesh,
    (f"{COMPOSABLE}._fsdp_init", "_init_default_fully_shard_mesh"): default_mesh,
    (f"{COMPOSABLE}._fully_shard", "get_cls_to_fsdp_cls"): get_cls_to_fsdp_cls,
    (f"{COMPOSABLE}._fully_shard", "disable_fsdp_module_new_init"): disable_fsdp_module_new_init,
    (f"{ROOT}._common_utils", "TrainingState"): WrapperTrainingState,
    (f"{ROOT}._init_utils", "HYBRID_SHARDING_STRATEGIES"): [kind for kind in ShardingStrategy if kind.hybrid],
    (f"{ROOT}._init_utils", "NO_RESHARD_AFTER_FORWARD_STRATEGIES"): [
        kind for kind in ShardingStrategy if kind.keeps_unsharded
    ],
}
