"""Convert state dicts of optimizers to and from each ``StateDictType``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.state.optimizer.initial import give_initial_state
from fullshard.checkpoint.state.optimizer.state import (
    NAMELESS,
    OptimizedParameter,
    Path,
    TensorSpec,
    as_shards,
    compare_fingerprints,
    fingerprint,
    group_options,
    leaves_of,
    named_groups,
    optimized_groups,
    state_by_fqn,
    to_specs,
)
from fullshard.checkpoint.state.optimizer.target import OptimizerTarget
from fullshard.checkpoint.state.parameters import LocalParameter, local_parameters
from fullshard.checkpoint.state.types import StateDictSettings, StateDictType
from fullshard.engine.ownership import units_of
from fullshard.engine.parameters.names import clean_name
from fullshard.engine.parameters.tensor_shards import TensorShards, full_tensor, sharded_like
from fullshard.ranks.agreement import gather, raised_on_all
from fullshard.ranks.groups import data_parallel_groups

__all__ = ["gather_sharded_tensor", "load_local", "save_local", "saved_state", "state_to_load"]


# ---------------------------------------------------------------- saving


def saved_state(
    model: nn.Module,
    optimizer: Any,
    given: Mapping[str, Any] | None,
    settings: StateDictSettings,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Return the state of ``optimizer`` by FQN, in full tensors or DTensors with Shard(0). All ranks call it.

    ``given`` is its state dict, which may have been edited, or None. The first rank of ``group``, or of the model, is
    the one that gets the state with ``rank0_only``.
    """
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    config = settings.optim_state_dict_config
    state, options = _state_and_groups(model, optimizer, given)
    groups = optimized_groups(model, optimizer.param_groups)
    members = [member for group_ in groups for member in group_]
    _check_same_state(model, members, state)
    if not state and given is None and not is_full:
        give_initial_state(optimizer)  # torch.distributed.checkpoint only loads into existing entries
        state = dict(optimizer.state)
        optimizer.state.clear()
    rank0_only = getattr(config, "rank0_only", False) and dist.is_initialized()
    target = _first_rank(model, group) if rank0_only else None
    receives = target is None or dist.get_rank() == target

    def leaf(original: LocalParameter, value: torch.Tensor, is_sharded: bool) -> torch.Tensor | None:
        if is_full:
            found = _full_state(original, value, is_sharded)
        else:
            found = _sharded_state(original, value, is_sharded)
            found = found if isinstance(found, DTensor) else found.clone()
        if not receives:
            return None
        return found.cpu() if config.offload_to_cpu else found

    with torch.inference_mode(False), torch.no_grad():  # in this order: the first enables grad
        saved: dict[str, Any] = state_by_fqn(members, state, leaf)
    if not receives:
        return {}
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):
            warnings.warn(
                f"the optimizer's state has the key {key!r}, which is not a parameter; its value is copied unchanged",
                stacklevel=4,
            )
            saved[key] = copy.deepcopy(value)
    result: dict[str, Any] = {"state": saved}
    if options is not None:
        result["param_groups"] = copy.deepcopy(named_groups(groups, options))
    return result


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that a model is sharded over, tensor parallelism included; None if it has no units."""
    placements = (parameter.placement for unit in units_of(model) for parameter in unit.parameters)
    meshes = [placement.sharded_spec(torch.float32).mesh for placement in placements]
    return max(meshes, key=DeviceMesh.size, default=None)


def _first_rank(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Return the global rank of the group's or model's first rank."""
    if group is not None:
        return dist.get_global_rank(group, 0)
    mesh = _mesh_of(model)
    return 0 if mesh is None else int(mesh.mesh.flatten()[0])


def _sending_group(model: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of the broadcast from the first rank.

    Raises:
        ValueError: If there is no process group of these ranks.
    """
    mesh = _mesh_of(model)
    if group is not None or mesh is None or mesh.size() == dist.get_world_size():
        return group
    if mesh.ndim == 1:
        return mesh.get_group()
    raise ValueError(
        "optim_state_dict_to_load: rank0_only broadcasts the state, and the model is sharded over a multi-dimensional "
        f"mesh of some of the ranks, {mesh}, which has no process group for that; pass one of these ranks as group"
    )


def _state_and_groups(
    model: nn.Module, optimizer: Any, given: Mapping[str, Any] | None
) -> tuple[dict[Any, Any], Sequence[Mapping[str, Any]] | None]:
    """Return the state by parameter object (or other key), and the groups; None if groups were not given."""
    if given is None:
        return dict(optimizer.state), optimizer.param_groups
    parameters: dict[Any, nn.Parameter] = dict(enumerate(_parameters_of(optimizer)))
    parameters |= {name: p for p in parameters.values() for name in _names_of(model).get(id(p), ())}
    state = {}
    for key, value in given["state"].items():
        state[parameters.get(clean_name(key) if isinstance(key, str) else key, key)] = value
    groups = given.get("param_groups")
    if groups is not None and len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"expected {len(optimizer.param_groups)} parameter groups in the optimizer's state dict, found "
            f"{len(groups)}"
        )
    return state, groups


def _parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of registered parameters, flat ones included, by their ids, without prefixes of wrappers."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    return names


def _check_same_state(model: nn.Module, members: Sequence[OptimizedParameter], state: Mapping[Any, Any]) -> None:
    """Raise if ranks that gather together hold different state."""
    if not dist.is_initialized():
        return
    prints = state_by_fqn(members, state, as_shards)
    groups: dict[dist.ProcessGroup, dict[str, Any]] = {}
    for original in local_parameters(model):  # including those that only this rank does not optimize
        for group in _gather_groups(original):
            groups.setdefault(group, {})[original.fqn] = prints.get(original.fqn, {})
    for group, own in groups.items():
        compare_fingerprints(fingerprint(own), group)


def save_local(model: nn.Module, optimizer: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return this rank's state by the names of registered parameters. No communication, and no copies."""
    state, options = _state_and_groups(model, optimizer, given)
    names = _names_of(model)
    saved = {names[id(key)][0] if isinstance(key, torch.Tensor) else key: value for key, value in state.items()}
    result: dict[str, Any] = {"state": saved}
    if options is not None:
        result["param_groups"] = [
            {**group_options(own), "params": [names[id(parameter)][0] for parameter in group["params"]]}
            for own, group in zip(options, optimizer.param_groups, strict=True)
        ]
    return result


# ---------------------------------------------------------------- loading


def state_to_load(
    model: nn.Module,
    optimizer: Any,
    given: Mapping[str, Any] | None,
    *,
    named: bool = False,
    rank0_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert a result of ``saved_state``, maybe of a model wrapped otherwise, to a state dict for ``optimizer``.

    With ``rank0_only``, the state of the first rank of ``group``, or of the model, is broadcast, and all ranks call it.
    The result is keyed by names if ``named``, else by indices.

    Raises:
        ValueError: If the state does not match the model and optimizer.
    """
    rank0_only = rank0_only and dist.is_initialized()
    group = _sending_group(model, group) if rank0_only else group
    tensors, specs, groups = _receive_specs(given, rank0_only=rank0_only, group=group)
    found = local_parameters(model)
    leaves = [leaf for state in (tensors or {}).values() for leaf in state.values()]
    groups_of_collectives: list[dist.ProcessGroup | None] = [group] if rank0_only else []
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        groups_of_collectives += dict.fromkeys(each for original in found for each in _gather_groups(original))
    groups_of_collectives += dict.fromkeys(leaf._process_group for leaf in leaves if isinstance(leaf, ShardedTensor))
    target = _plan_target(model, optimizer, specs, groups, groups_of_collectives)
    originals = {fqn: original for original in found for fqn in original.fqns}
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first enables grad
        for key, state in specs.items():
            targets = leaves_of(target.tree["state"].get(key, {}))
            for path, leaf in leaves_of(state).items():
                if isinstance(leaf, TensorSpec):
                    value = tensors[key][path] if tensors is not None else None
                    if rank0_only:
                        value = _broadcast(leaf, value, group)
                    assert value is not None
                    _fill(targets.get(path), value, originals.get(key))
        result = target.state_dict(_keys(model, optimizer) if named else None)
    if groups is None:
        del result["param_groups"]
    return result


def _plan_target(
    model: nn.Module,
    optimizer: Any,
    specs: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] | None,
    groups_of_collectives: Sequence[dist.ProcessGroup | None],
) -> OptimizerTarget:
    """Return a target without problems. A problem of one rank in the groups raises on all."""
    target = None
    try:
        target = OptimizerTarget(model, optimizer, specs, groups, reuse=False)
        problems = target.problems
    except ValueError as error:
        problems = [str(error)]
    for group in groups_of_collectives:
        problems = list(dict.fromkeys(problem for found in gather(problems, group).values() for problem in found))
    if problems or target is None:
        raise ValueError(f"cannot load the optimizer state: {'; '.join(problems)}")
    return target


def _receive_specs(
    given: Mapping[str, Any] | None, *, rank0_only: bool, group: dist.ProcessGroup | None
) -> tuple[dict[str, dict[Path, Any]] | None, dict[str, Any], list[dict[str, Any]] | None]:
    """Return tensors by key and path (None if the first rank will send them), their specs, and the groups."""
    receives = rank0_only and dist.get_rank(group) != 0
    sent: list[Any] = [None]
    with raised_on_all([group] if rank0_only else []):
        state = {} if receives else _by_clean_names(given or {})
        leaves = (leaf for value in state.values() for leaf in leaves_of(value).values())
        sharded = {type(leaf).__name__ for leaf in leaves if _is_gathered_by_all(leaf)} if rank0_only else ()
        if sharded:
            raise ValueError(
                f"rank0_only: expected full tensors on the first rank, found {' and '.join(sorted(sharded))}s, which "
                "only all ranks together can all-gather; load the state without rank0_only, on every rank"
            )
        groups = None if receives else (given or {}).get("param_groups")
        if groups is not None:
            groups = [{**own, "params": [clean_name(fqn) for fqn in own["params"]]} for own in groups]
        sent = [({key: to_specs(value) for key, value in state.items()}, groups)]
    if rank0_only:
        dist.broadcast_object_list(sent, group=group, group_src=0)
    specs, groups = sent[0]
    return None if receives else {key: leaves_of(value) for key, value in state.items()}, specs, groups


def _is_gathered_by_all(leaf: Any) -> bool:
    """Return True if a tensor can only be made whole by a collective."""
    if isinstance(leaf, DTensor):
        return leaf.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in leaf.placements)
    return isinstance(leaf, ShardedTensor)


def _by_clean_names(given: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    if given and "state" not in given:
        raise ValueError(
            f'expected a state dict of an optimizer, with the key "state"; found the keys {list(given)[:8]}; if it was '
            "saved only on the first rank, load it with FullOptimStateDictConfig(rank0_only=True)"
        )
    keys = [*given.get("state", {}), *(key for group in given.get("param_groups", []) for key in group["params"])]
    numbers = [key for key in keys if not isinstance(key, str)]
    if numbers:
        raise ValueError(
            f"expected names of parameters as keys, found {numbers[0]!r}; convert a result of optimizer.state_dict() "
            "with FullyShardedDataParallel.rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, ...)"
        )
    return {
        clean_name(key): value if isinstance(value, dict) else {NAMELESS: value}
        for key, value in given.get("state", {}).items()
    }


def _broadcast(leaf: TensorSpec, value: torch.Tensor | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Broadcast a full tensor from the first rank."""
    device = dist.distributed_c10d._get_pg_default_device(group)
    if value is None:
        buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    else:
        buffer = full_tensor(value).detach().to(device).contiguous()
    dist.broadcast(buffer, group=group, group_src=0)
    return buffer


def _fill(target_tensor: Any, value: torch.Tensor, original: LocalParameter | None) -> None:
    """Copy this rank's shard of a saved tensor. If it is sharded differently, it is gathered first: a collective."""
    if isinstance(value, DTensor) and original is not None and isinstance(original.parameter, DTensor):
        own = original.parameter
        if (value.shape, value.placements, value.device_mesh) == (own.shape, own.placements, own.device_mesh):
            if target_tensor is not None:
                for (_, to), (_, local) in zip(target_tensor.shards, TensorShards.of(value).shards, strict=True):
                    to.copy_(local)
            return
    value = gather_sharded_tensor(value) if isinstance(value, ShardedTensor) else full_tensor(value)
    if isinstance(target_tensor, TensorShards):
        for region, local in target_tensor.shards:
            local.copy_(value[tuple(map(slice, region.offsets, region.ends))])
    elif target_tensor is not None:
        target_tensor.copy_(value)


def _keys(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """Return the names of parameters in a named optimizer, by their ids."""
    own = [key for group in optimizer.state_dict()["param_groups"] for key in group["params"]]
    raw = {clean_name(key): key for key in own if isinstance(key, str)}
    return {key: raw.get(names[0], names[0]) for key, names in _names_of(model).items()}


def load_local(model: nn.Module, optimizer: Any, given: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """Convert a result of ``save_local`` to a state dict for ``optimizer``: same wrapping, same ranks.

    Raises:
        ValueError: If the parameters or shapes differ.
    """
    names = _names_of(model)
    parameters = {names[id(parameter)][0]: parameter for parameter in _parameters_of(optimizer)}
    keys: Mapping[int, Any] = _keys(model, optimizer)
    if not named:
        keys = {id(parameter): number for number, parameter in enumerate(parameters.values())}
    groups = given.get("param_groups", [])
    saved = {fqn for group in groups for fqn in group["params"]} if groups else set(parameters)
    if saved != parameters.keys():
        raise ValueError(
            "LOCAL_STATE_DICT: expected state of the same flat parameters, saved with the same wrapping; unexpected: "
            f"{sorted(saved - parameters.keys())[:8]}, missing: {sorted(parameters.keys() - saved)[:8]}; use "
            "FULL_STATE_DICT or SHARDED_STATE_DICT instead"
        )
    for fqn, parameter in parameters.items():
        for path, value in leaves_of(given["state"].get(fqn, {})).items():
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"LOCAL_STATE_DICT: {fqn}: this rank's shard has shape {tuple(parameter.shape)}, but {path[0]} was "
                    f"saved with {tuple(value.shape)}; load it on the same number of ranks"
                )
    key_of = {fqn: keys[id(parameter)] for fqn, parameter in parameters.items()}
    result: dict[str, Any] = {"state": {key_of.get(fqn, fqn): value for fqn, value in given["state"].items()}}
    if "param_groups" in given:
        result["param_groups"] = [{**group, "params": [key_of[fqn] for fqn in group["params"]]} for group in groups]
    return result


# ---------------------------------------------------------------- tensors


def _gather_groups(original: LocalParameter) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups of the ranks that hold shards of the parameter and gather its state together."""
    if original.sharded is not None:
        yield from data_parallel_groups(original.sharded.placement.mesh)
        if original.sharded.placement.own is not None:
            yield from _groups_of_mesh(original.sharded.placement.own.mesh)
    elif isinstance(original.parameter, DTensor):
        yield from _groups_of_mesh(original.parameter.device_mesh)


def _groups_of_mesh(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    return (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _full_state(original: LocalParameter, value: torch.Tensor, is_sharded: bool) -> torch.Tensor:
    """Return a state as a full tensor. All ranks of ``_gather_groups`` call it.

    Args:
        original: The parameter.
        value: A state of ``original.parameter``.
        is_sharded: True if the state is sharded as the parameter.

    Returns:
        A new tensor, on the device where the unit computes.
    """
    if is_sharded and original.sharded is not None:
        return original.sharded.full_from(value)
    return full_tensor(sharded_like(original.parameter, value) if is_sharded else value.detach()).clone()


def _sharded_state(original: LocalParameter, value: torch.Tensor, is_sharded: bool) -> torch.Tensor:
    """Return a state as a DTensor with Shard(0). All ranks of ``_gather_groups`` call it.

    Args:
        original: The parameter.
        value: A state of ``original.parameter``.
        is_sharded: True if the state is sharded as the parameter.

    Returns:
        The state itself for DTensors. A plain tensor if the state is replicated, or no unit shards the parameter.
    """
    value = value.detach()
    if not is_sharded or isinstance(value, DTensor):
        return value
    return sharded_like(original.parameter, value) if original.sharded is None else original.sharded.reshard(value)


def gather_sharded_tensor(value: ShardedTensor) -> torch.Tensor:
    """Gather a ShardedTensor on every rank of its group: one broadcast per shard.

    These are torch's sharded tensors before DTensor. ``load_sharded_optimizer_state_dict`` of
    ``torch.distributed.checkpoint.optimizer``, with which Lightning reads optimizers, still returns them.

    Args:
        value: A sharded tensor with any number of shards per rank.

    Returns:
        The full tensor, on the device that its group communicates on.
    """
    group, metadata = value._process_group, value.metadata()
    device = dist.distributed_c10d._get_pg_default_device(group)
    local_shards = {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in value.local_shards()}
    full = torch.empty(metadata.size, dtype=value.dtype, device=device)
    for shard in metadata.shards_metadata:
        offsets, sizes, owner = tuple(shard.shard_offsets), tuple(shard.shard_sizes), shard.placement.rank()  # type: ignore[union-attr]
        if not math.prod(sizes):
            continue
        sent = torch.empty(sizes, dtype=value.dtype, device=device)
        if owner == dist.get_rank():
            sent.copy_(local_shards[offsets])
        dist.broadcast(sent, owner, group=group)
        full[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = sent
    return full
