"""Private names of torch's FSDP that programs rely on, on fullshard's engine.

[Note: Private names]
Nothing in the engine is shaped after these. Each is a thin view on what the engine has under other words: torch's
*state* of a module and its *parameter groups* are views on a unit. What is listed in :data:`SERVED` is found under
torch's private modules; what :func:`lent` lists is put on fullshard's own classes while fullshard stands in, and taken
off again.

Who relies on them: accelerate upcasts through ``_flat_param`` and ``_handle``; Lightning looks for
``_fsdp_flattened``; transformers' ``generate`` and dynamo for ``_is_fsdp_managed_module``; torchtitan builds mesh infos
with ``_get_mesh_info``; pipelining reduces gradients through ``fully_shard.state``; tests of device back ends ask for
phases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import fsdp_module
from fullshard.arguments import check_reshard, default_mesh, shard_mesh_for
from fullshard.dropin.param_groups import FSDPParamGroup, ShardedState, TrainingState, WrapperTrainingState
from fullshard.engine import hooks
from fullshard.engine.flat_parameter import FlatPiece
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.parameter import managed_by
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.policy import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardingStrategy
from fullshard.sharded_module import ShardedModule

__all__ = ["SERVED", "Lent", "lent"]

ROOT = "torch.distributed.fsdp"
COMPOSABLE = f"{ROOT}._fully_shard"


# ---------------------------------------------------------------- states


class FSDPState:
    """A view on the unit of a module, and on the root that it belongs to."""

    _module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self._module)
        if unit is None:
            raise FullshardError(f"this {type(self._module).__name__} is not sharded any more")
        return unit

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return [FSDPParamGroup(self._unit)] if self._unit.parameters else []

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _is_root(self) -> bool:
        return self._unit.attached().root() is self._unit

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for ref in self._unit.modules if (module := ref()) is not None)

    @property
    def _state_ctx(self) -> StateContext:
        return StateContext(self._module)

    @property
    def _training_state(self) -> TrainingState:
        return FSDPParamGroup(self._unit)._training_state

    def _pre_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return self._unit.pre_forward(args, kwargs)

    def _post_forward(self, module: nn.Module, _: Any, output: Any) -> Any:
        return self._unit.post_forward(module, output)

    def _root_post_backward_final_callback(self) -> None:
        """Bring what is under way to its end."""
        for unit in nested_units(self._module):
            if unit.schedule is not None:
                unit.schedule.finish_reductions()


class StateContext:
    """The states below one module."""

    all_states: list[FSDPState]

    def __init__(self, module: nn.Module) -> None:
        seen: dict[int, nn.Module] = {}
        for below in module.modules():
            unit = unit_of(below)
            if unit is not None:
                seen.setdefault(id(unit), below)
        self.all_states = [FSDPState(below) for below in seen.values()]


def state_of(module: nn.Module) -> FSDPState:
    """``fully_shard.state`` and ``replicate.state``.

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
    """What ``fully_shard`` makes of these arguments, as ``ShardPlacementResult`` takes it."""
    ranks = shard_mesh_for("fully_shard", mesh, dp_mesh_dims)
    if ranks.shard is None:
        raise ValueError(f"_get_mesh_info: expected an axis to shard over, found only replicas in {mesh}")
    named: dict[str, Any] = {} if dp_mesh_dims is None else {"dp_mesh_dims": dp_mesh_dims, "spmd_mesh": mesh}
    if ranks.replicate is None:
        return FSDPMeshInfo(ranks.shard, shard_mesh_dim=0, **named)
    if dp_mesh_dims is None:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return HSDPMeshInfo(DeviceMesh._concatenate([ranks.replicate, ranks.shard]), 1, 0, **named)


def get_post_forward_mesh_info(reshard_after_forward: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """Over which ranks parameters lie between forward and backward; None: they stay full."""
    mesh, axis = mesh_info.mesh, mesh_info.shard_mesh_dim or 0
    reshard = check_reshard("fully_shard", reshard_after_forward, mesh.size(axis))
    if reshard is True or reshard is None:
        return mesh_info
    if reshard is False:
        return None
    return HSDPMeshInfo(DeviceMesh(mesh.device_type, mesh.mesh.view(-1, reshard)), 1, 0)


# ---------------------------------------------------------------- classes


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Classes, and the sharded ones made of them."""
    return {
        plain: made
        for (plain, methods, base), made in fsdp_module._sharded_classes.items()
        if not methods and base is fsdp_module.FSDPModule
    }


@contextlib.contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Make empty instances of the plain classes inside: unpickling of compiled code's guards does."""
    construct = fsdp_module.FSDPModule.__dict__["__new__"]

    def empty(cls: type, *_: Any, **__: Any) -> Any:
        plain = fsdp_module._plain_class(cls)
        return plain.__new__(plain)

    fsdp_module.FSDPModule.__new__ = staticmethod(empty)  # type: ignore[method-assign]
    try:
        yield
    finally:
        fsdp_module.FSDPModule.__new__ = construct  # type: ignore[method-assign]


# ---------------------------------------------------------------- the wrapper


class FlatView:
    """What a wrapper's unit holds, as if it were one flat parameter: to ask for dtypes, and to cast.

    Its ``data`` are this rank's pieces of all parameters of one dtype. What is assigned to it sets the dtype in which
    the unit keeps its parameters; values are the parameters' own, cast.
    """

    _wrapper: nn.Module

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper = wrapper

    @property
    def _pieces(self) -> list[FlatPiece]:
        unit = unit_of(self._wrapper)
        assert unit is not None
        pieces = [p for p in unit.parameters if isinstance(p, FlatPiece)]
        trained = [p for p in pieces if p.requires_grad] or pieces
        return [p for p in trained if p.local.dtype == trained[0].local.dtype]

    @property
    def _fqns(self) -> list[str]:
        return [p.fqn for p in self._pieces]

    @property
    def dtype(self) -> torch.dtype:
        """In which the unit keeps them."""
        return self._pieces[0].local.dtype

    @property
    def device(self) -> torch.device:
        """Where the pieces are."""
        return self._pieces[0].local.device

    @property
    def requires_grad(self) -> bool:
        """Whether any of them is trained."""
        return any(p.requires_grad for p in self._pieces)

    @property
    def data(self) -> torch.Tensor:
        """This rank's pieces, one after another, 1-D: a copy. Assigning sets the dtype."""
        return torch.cat([p.local.detach().reshape(-1) for p in self._pieces])

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        unit = unit_of(self._wrapper)
        assert unit is not None
        unit.settle()
        unit.reshard()
        for piece in self._pieces:
            piece.sharded.data = piece.sharded.data.to(value.dtype)
        unit.adopt()


class HandleView:
    """A wrapper's handle of torch's: nothing but the dtype that its parameters were given in."""

    _orig_param_dtype: torch.dtype
    flat_param: FlatView | fullshard.FlatParameter

    def __init__(self, flat: FlatView | fullshard.FlatParameter) -> None:
        self.flat_param, self._orig_param_dtype = flat, flat.dtype


def _has_params(wrapper: nn.Module) -> bool:
    unit = unit_of(wrapper)
    return unit is not None and bool(unit.parameters)


def _flat_param(wrapper: nn.Module) -> FlatView | fullshard.FlatParameter | None:
    if not _has_params(wrapper):
        return None
    view = FlatView(wrapper)
    home = view._pieces[0].home
    return view if home is None else home.flat


def _handle(wrapper: nn.Module) -> HandleView | None:
    flat = _flat_param(wrapper)
    return None if flat is None else HandleView(flat)


# ---------------------------------------------------------------- marks


def _is_managed(module: nn.Module) -> bool:
    """Whether parameters of ``module``, or of modules below, belong to a unit."""
    if isinstance(module, ShardedModule):
        return True
    return any(managed_by(parameter) is not None for parameter in module.parameters())


def _compiles(module: nn.Module) -> bool:
    """Dynamo takes this for leave to compile: torch needs the original parameters for that, fullshard does not."""
    return _is_managed(module)


def _is_flattened(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, fullshard.FlatParameter) or isinstance(managed_by(parameter), FlatPiece)


class Worked:
    """An attribute that is worked out when it is read. Programs may set it on an object, and then theirs counts."""

    _out: Callable[[Any], Any]

    def __init__(self, out: Callable[[Any], Any]) -> None:
        self._out = out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._out(instance)


class Lent(NamedTuple):
    """Attribute ``name`` of ``holder``, while fullshard stands in."""

    holder: Any
    name: str
    value: Any


def lent() -> list[Lent]:
    """What is put on classes and functions, see [Note: Private names]."""
    wrapper = fullshard.FullyShardedDataParallel
    return [
        Lent(wrapper, "_has_params", property(_has_params)),
        Lent(wrapper, "_flat_param", property(_flat_param)),
        Lent(wrapper, "_handle", property(_handle)),
        Lent(fullshard.FlatParameter, "_fqns", property(lambda flat: list(flat.fqns))),
        Lent(fullshard.FSDPModule, "_get_fsdp_state", state_of),
        Lent(fullshard.fully_shard, "state", state_of),
        Lent(fullshard.replicate, "state", state_of),
        Lent(nn.Module, "_is_fsdp_managed_module", Worked(_is_managed)),
        Lent(nn.Module, "_fsdp_use_orig_params", Worked(_compiles)),
        Lent(nn.Parameter, "_fsdp_flattened", Worked(_is_flattened)),
    ]


def _served() -> dict[tuple[str, str], Any]:
    hybrid = [strategy for strategy in ShardingStrategy if strategy.hybrid]
    keeping = [strategy for strategy in ShardingStrategy if strategy.keeps_full]
    default: Callable[..., DeviceMesh] = default_mesh
    return {
        (f"{COMPOSABLE}._fsdp_common", "TrainingState"): TrainingState,
        (f"{COMPOSABLE}._fsdp_param", "ShardedState"): ShardedState,
        (f"{COMPOSABLE}._fsdp_param_group", "FSDPParamGroup"): FSDPParamGroup,
        (f"{COMPOSABLE}._fsdp_param_group", "RegisterPostBackwardFunction"): hooks._Boundary,
        (f"{COMPOSABLE}._fsdp_state", "FSDPState"): FSDPState,
        (f"{COMPOSABLE}._fsdp_state", "_get_module_fsdp_state"): _state_if_sharded,
        (f"{COMPOSABLE}._fsdp_init", "_get_mesh_info"): get_mesh_info,
        (f"{COMPOSABLE}._fsdp_init", "_get_post_forward_mesh_info"): get_post_forward_mesh_info,
        (f"{COMPOSABLE}._fsdp_init", "_init_default_mesh"): default,
        (f"{COMPOSABLE}._fsdp_init", "_init_default_fully_shard_mesh"): default,
        (f"{COMPOSABLE}._fully_shard", "get_cls_to_fsdp_cls"): get_cls_to_fsdp_cls,
        (f"{COMPOSABLE}._fully_shard", "disable_fsdp_module_new_init"): disable_fsdp_module_new_init,
        (f"{ROOT}._common_utils", "TrainingState"): WrapperTrainingState,
        (f"{ROOT}._init_utils", "HYBRID_SHARDING_STRATEGIES"): hybrid,
        (f"{ROOT}._init_utils", "NO_RESHARD_AFTER_FORWARD_STRATEGIES"): keeping,
    }


SERVED: dict[tuple[str, str], Any] = _served()
