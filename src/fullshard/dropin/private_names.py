"""Private names of torch's FSDP that programs rely on, implemented on fullshard's engine.

[Note: Private names]
Each is a thin view on an object of the engine, which does not know them. ``get_mesh_info`` replaces torch's function;
attributes that ``patched_attributes`` returns are set on fullshard's classes while the drop-in is installed.

Users: accelerate upcasts through ``_flat_param`` and ``_handle``; Lightning reads ``_fsdp_flattened``; transformers'
``generate`` and dynamo ``_is_fsdp_managed_module``; torchtitan makes mesh infos with ``_get_mesh_info``; pipelining
reduces gradients through ``fully_shard.state``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.parameters.flat import FlatShardedParameter
from fullshard.engine.parameters.sharded import managed_by
from fullshard.engine.runtime import each_runtime, ensure_idle, runtime_of
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.frontend.arguments import shard_mesh_for
from fullshard.frontend.sharded_module import ShardedModule, unit_at
from fullshard.policy import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo

__all__ = ["get_mesh_info", "patched_attributes"]


class UnitsState:
    """View on the units of a module as torch's state of it, with which pipelines reduce gradients.

    Args:
        units: The unit of the module and those nested in it.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    @property
    def _state_ctx(self) -> SimpleNamespace:
        return SimpleNamespace(all_states=[UnitsState([unit]) for unit in self._units])

    @property
    def _fsdp_param_groups(self) -> list[SimpleNamespace]:
        units = [unit for unit in self._units[:1] if unit.parameters]
        return [SimpleNamespace(post_backward=functools.partial(_post_backward, unit)) for unit in units]

    def _root_post_backward_final_callback(self) -> None:
        """Wait for the reductions in flight."""
        for runtime in each_runtime(self._units):
            runtime.finish_reductions()


def _post_backward(unit: Unit) -> None:
    """Reduce unreduced gradients, and reshard unless ``reshard_after_backward`` is off."""
    runtime = runtime_of(unit)
    runtime.finish_reductions()
    runtime.reduce_unreduced(unit)
    if unit.settings.reshard_after_backward and unit.is_idle:
        unit.reshard()


def state_of(module: nn.Module) -> UnitsState:
    """Return the state of a sharded module: ``fully_shard.state`` and ``replicate.state``.

    Raises:
        FullshardError: If the module is not sharded.
    """
    if unit_of(module) is None:
        raise FullshardError(f"state: expected a module that fully_shard was called on, found {type(module).__name__}")
    return UnitsState(nested_units(module))


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


# ---------------------------------------------------------------- the wrapper


class FlatParamView:
    """View on the original parameters of a wrapper as one flat parameter: to read dtypes, and to cast.

    It has the trained parameters of one dtype. Its ``data`` is the concatenation of this rank's shards of them.
    Assigning to ``data`` casts the parameters to the dtype of the assigned tensor, whose values are ignored.
    """

    def __init__(self, unit: Unit, parameters: list[FlatShardedParameter]) -> None:
        trained = [p for p in parameters if p.requires_grad] or parameters
        first = trained[0].local
        self._unit, self._parameters = unit, [p for p in trained if p.local.dtype == first.dtype]
        self._fqns = [p.fqn for p in self._parameters]
        self.dtype, self.device, self.requires_grad = first.dtype, first.device, trained[0].requires_grad

    @property
    def data(self) -> torch.Tensor:
        """Copy of this rank's shards, concatenated, 1-D. Assigning casts the parameters to the tensor's dtype."""
        return torch.cat([p.local.detach().reshape(-1) for p in self._parameters])

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        ensure_idle(self._unit)
        self._unit.reshard()
        for parameter in self._parameters:
            parameter.sharded.data = parameter.sharded.data.to(value.dtype)
        self._unit.write_back()


def _has_params(wrapper: nn.Module) -> bool:
    return bool(unit_at(wrapper).parameters)


def _flat_param(wrapper: nn.Module) -> FlatParamView | fullshard.FlatParameter | None:
    unit = unit_at(wrapper)
    flat = [p for p in unit.parameters if isinstance(p, FlatShardedParameter)]
    if not flat:
        return None
    return FlatParamView(unit, flat) if flat[0].handle is None else flat[0].handle.flat


def _handle(wrapper: nn.Module) -> SimpleNamespace | None:
    flat = _flat_param(wrapper)
    return None if flat is None else SimpleNamespace(flat_param=flat, _orig_param_dtype=flat.dtype)


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
        (fullshard.fully_shard, "state", state_of),
        (fullshard.replicate, "state", state_of),
        (nn.Module, "_is_fsdp_managed_module", ComputedAttribute(_is_managed)),
        # dynamo compiles only modules with it: all of fullshard's.
        (nn.Module, "_fsdp_use_orig_params", ComputedAttribute(_is_managed)),
        (nn.Parameter, "_fsdp_flattened", ComputedAttribute(_is_flattened)),
    ]
