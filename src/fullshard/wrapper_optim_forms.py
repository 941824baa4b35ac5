"""State dicts of optimizers in the forms of :class:`~fullshard.state_dict_types.StateDictType`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.older_sharding import ShardedTensor, gathered
from fullshard.checkpoint.optimizer_entries import (
    NAMELESS,
    Described,
    OptimizedParameter,
    Path,
    describe,
    group_options,
    leaves_of,
    mapped,
    optimized_groups,
)
from fullshard.checkpoint.optimizer_gather import full_state, groups_of, rows_of_state
from fullshard.checkpoint.optimizer_state import agree_on_state, state_by_fqn
from fullshard.checkpoint.optimizer_target import OptimizerTarget
from fullshard.checkpoint.parameters import LocalParameter, local_parameters
from fullshard.checkpoint.pieces import Pieces
from fullshard.engine.names import clean_name
from fullshard.engine.ownership import nested_units
from fullshard.state_dict_types import OptimStateDictConfig, StateDictSettings, StateDictType
from fullshard.wrapper_state_initial import give_initial_state

__all__ = ["Form", "Parameters", "load_local", "save_local", "saved_state", "state_to_load"]


@dataclass(frozen=True)
class Form:
    """How an optimizer's state is saved.

    Args:
        type: What tensors are.
        offload: Whether they are in CPU memory.
        first_only: Whether only the first rank has them.
    """

    type: StateDictType
    offload: bool = True
    first_only: bool = False

    @classmethod
    def of(cls, settings: StateDictSettings) -> Form:
        """Of a wrapper."""
        config: OptimStateDictConfig = settings.optim_state_dict_config
        return cls(settings.state_dict_type, config.offload_to_cpu, getattr(config, "rank0_only", False))


class Parameters:
    """The parameters of an optimizer, where there is no optimizer.

    Args:
        given: What it would be built from: parameters, or groups.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]

    def __init__(self, given: Iterable[Any]) -> None:
        entries = list(given)
        groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
        self.param_groups = [{**group, "params": _listed(group["params"])} for group in groups]
        self.state = {}


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


# ---------------------------------------------------------------- saving


def saved_state(
    model: nn.Module, optimizer: Any, given: Mapping[str, Any] | None, form: Form, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The state of ``optimizer`` by FQN, in whole tensors or in rows. All ranks call it.

    Args:
        model: Whose parameters it optimizes.
        optimizer: Any, also one whose state dict goes by names.
        given: Its state dict, maybe edited. None: what it holds.
        form: FULL or SHARDED.
        group: Whose first rank is the first one. None: of those that the model is spread over.
    """
    state, options = _held(model, optimizer, given)
    groups = optimized_groups(model, optimizer.param_groups)
    members = [member for group_ in groups for member in group_]
    _agree(model, members, state)
    if not state and given is None and form.type is StateDictType.SHARDED_STATE_DICT:
        state = _first_state(optimizer)  # torch.distributed.checkpoint loads into what is there, and nothing else
    target = _first_rank(model, group) if form.first_only and dist.is_initialized() else None
    wanted = target is None or dist.get_rank() == target

    def leaf(part: LocalParameter, value: torch.Tensor, cut: bool) -> torch.Tensor | None:
        if form.type is StateDictType.FULL_STATE_DICT:
            full = full_state(part, value, cut, target)
            return None if full is None or not wanted else full.cpu() if form.offload else full
        rows = rows_of_state(part, value, cut)
        rows = rows if isinstance(rows, DTensor) else rows.clone()
        return rows.cpu() if form.offload else rows

    with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
        saved: dict[str, Any] = dict(state_by_fqn(members, state, leaf))
    if not wanted:
        return {}
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):
            warnings.warn(f"the optimizer's state has {key!r}, which is no parameter; it is copied", stacklevel=4)
            saved[key] = copy.deepcopy(value)
    result: dict[str, Any] = {"state": saved}
    if options is not None:
        result["param_groups"] = [
            {**copy.deepcopy(group_options(own)), "params": [fqn for member in found for fqn in member.fqns]}
            for own, found in zip(options, groups, strict=True)
        ]
    return result


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The ranks that a model is spread over, tensor parallelism included; None if no unit says."""
    placements = (parameter.placement for unit in nested_units(model) for parameter in unit.parameters)
    meshes = [placement.sharded_spec(torch.float32).mesh for placement in placements]
    return max(meshes, key=DeviceMesh.size, default=None)


def _first_rank(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Its global number."""
    if group is not None:
        return dist.get_global_rank(group, 0)
    mesh = _mesh_of(model)
    return 0 if mesh is None else int(mesh.mesh.flatten()[0])


def _sending_group(model: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Over which the first rank sends.

    Raises:
        ValueError: If there is none.
    """
    mesh = _mesh_of(model)
    if group is not None or mesh is None or mesh.size() == dist.get_world_size():
        return group
    if mesh.ndim == 1:
        return mesh.get_group()
    raise ValueError(
        f"the model is on a part of all ranks, {mesh}, and of several axes; pass the process group of these ranks, "
        "from the first of which the state is to be sent"
    )


def _held(
    model: nn.Module, optimizer: Any, given: Mapping[str, Any] | None
) -> tuple[dict[Any, Any], Sequence[Mapping[str, Any]] | None]:
    """State by parameter object (or key that is none), and options of groups; None if they were not given."""
    if given is None:
        return dict(optimizer.state), optimizer.param_groups
    parameters: dict[Any, nn.Parameter] = dict(
        enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])
    )
    parameters |= {name: p for p in parameters.values() for name in _names_of(model).get(id(p), ())}
    state = {}
    for key, value in given["state"].items():
        name = clean_name(key) if isinstance(key, str) else key
        state[parameters.get(name, key)] = value
    groups = given.get("param_groups")
    if groups is not None and len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state dict of the optimizer has {len(groups)} groups, the optimizer {len(optimizer.param_groups)}"
        )
    return state, groups


def _first_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What the first step of a fresh optimizer would begin with. It stays fresh."""
    give_initial_state(optimizer)
    state = dict(optimizer.state)
    optimizer.state.clear()
    return state


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """Names of what is registered, flat parameters included, by their ids, without what wrappers add."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    return names


def _agree(model: nn.Module, members: Sequence[OptimizedParameter], state: Mapping[Any, Any]) -> None:
    """Raise on all ranks that would gather together if they hold different state."""
    if not dist.is_initialized():
        return
    prints = state_by_fqn(members, state, lambda part, value, cut: part.cut(value) if cut else value)
    groups: dict[dist.ProcessGroup, dict[str, Any]] = {}
    for part in local_parameters(model):  # also those that this rank alone does not optimize
        for group in groups_of(part):
            groups.setdefault(group, {})[part.fqn] = prints.get(part.fqn, {})
    for group, own in groups.items():
        agree_on_state(own, group)


def save_local(model: nn.Module, optimizer: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state as this rank holds it, by the names of what is registered. No communication, nothing is copied."""
    state, options = _held(model, optimizer, given)
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
    named: bool,
    first_only: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """What :func:`saved_state` has made, as a state dict for ``optimizer``.

    Args:
        model: Whose parameters it optimizes; may be wrapped otherwise than what was saved.
        optimizer: Any, or :class:`Parameters`.
        given: By FQN, in whole tensors or in rows, whichever they are.
        named: Whether the result goes by names, as it does for optimizers that know them.
        first_only: Whether it counts only on the first rank, and travels from there. Then all ranks call it.
        group: The ranks that get it then. None: those that the model is spread over.

    Raises:
        ValueError: If it does not fit.
    """
    first_only = first_only and dist.is_initialized()
    group = _sending_group(model, group) if first_only else group
    tensors, described, groups = _described(given, first_only=first_only, group=group)
    found = local_parameters(model)
    together: list[dist.ProcessGroup | None] = [group] if first_only else []
    if tensors is not None and any(isinstance(t, DTensor) for leaves in tensors.values() for t in leaves.values()):
        together += dict.fromkeys(each for part in found for each in groups_of(part))
    together += dict.fromkeys(
        leaf._process_group
        for leaves in (tensors or {}).values()
        for leaf in leaves.values()
        if isinstance(leaf, ShardedTensor)
    )
    target = _planned(model, optimizer, described, groups, together)
    parts = {fqn: part for part in found for fqn in part.fqns}
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches grad on
        for key, state in described.items():
            places = leaves_of(target.tree["state"].get(key, {}))
            for path, leaf in leaves_of(state).items():
                if isinstance(leaf, Described):
                    value = tensors[key][path] if tensors is not None else None
                    if first_only:
                        value = _sent(leaf, value, group)
                    assert value is not None
                    _fill(places.get(path), value, parts.get(key))
        result = target.state_dict(_keys(model, optimizer) if named else None)
    if groups is None:
        del result["param_groups"]
    return result


def _planned(
    model: nn.Module,
    optimizer: Any,
    described: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] | None,
    together: Sequence[dist.ProcessGroup | None],
) -> OptimizerTarget:
    """A target without problems. What one rank of ``together`` objects to is an error on all."""
    target, problems = None, []
    try:
        target = OptimizerTarget(model, optimizer, described, groups, reuse=False)
        problems = target.problems
    except ValueError as error:
        problems = [str(error)]
    for group in together:
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, problems, group=group)
        problems = list(dict.fromkeys(problem for found in told for problem in found))
    if problems or target is None:
        raise ValueError(f"cannot load the optimizer state: {'; '.join(problems)}")
    return target


def _described(
    given: Mapping[str, Any] | None, *, first_only: bool, group: dist.ProcessGroup | None
) -> tuple[dict[str, dict[Path, Any]] | None, dict[str, Any], list[dict[str, Any]] | None]:
    """Tensors by key and path (None where they are still to come), what they look like, and the groups."""
    if first_only and dist.get_rank(group) != 0:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, group=group, group_src=0)
        if isinstance(received[0], Exception):
            raise received[0]
        return None, *received[0]
    try:
        state = _by_clean_names(given or {})
        leaves = (leaf for value in state.values() for leaf in leaves_of(value).values())
        if first_only and any(isinstance(leaf, ShardedTensor) for leaf in leaves):
            raise ValueError(
                "rank0_only: the first rank's state is in ShardedTensors, which all ranks have to gather; expected "
                "whole tensors there. Load it without rank0_only, on every rank"
            )
    except Exception as error:
        if first_only:
            dist.broadcast_object_list([error], group=group, group_src=0)
        raise
    described = {key: describe(value) for key, value in state.items()}
    groups = (given or {}).get("param_groups")
    if groups is not None:
        groups = [{**own, "params": [clean_name(fqn) for fqn in own["params"]]} for own in groups]
    if first_only:
        dist.broadcast_object_list([(described, groups)], group=group, group_src=0)
    return {key: leaves_of(value) for key, value in state.items()}, described, groups


def _by_clean_names(given: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    if given and "state" not in given:
        raise ValueError(
            f'expected a state dict of an optimizer, with the key "state"; found the keys {list(given)[:8]}; one that '
            "was saved on the first rank only is loaded with FullOptimStateDictConfig(rank0_only=True)"
        )
    keys = [*given.get("state", {}), *(key for group in given.get("param_groups", []) for key in group["params"])]
    numbers = [key for key in keys if not isinstance(key, str)]
    if numbers:
        raise ValueError(
            f"expected the names of parameters as keys, found {numbers[0]!r}; a state dict from optimizer.state_dict() "
            "is rekeyed with FullyShardedDataParallel.rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, ...)"
        )
    return {
        clean_name(key): value if isinstance(value, dict) else {NAMELESS: value}
        for key, value in given.get("state", {}).items()
    }


def _sent(leaf: Described, value: torch.Tensor | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A whole tensor from the first rank, on all."""
    device = dist.distributed_c10d._get_pg_default_device(group)
    if value is None:
        buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    else:
        buffer = (value.full_tensor() if isinstance(value, DTensor) else value).detach().to(device).contiguous()
    dist.broadcast(buffer, group=group, group_src=0)
    return buffer


def _fill(place: Any, value: torch.Tensor, part: LocalParameter | None) -> None:
    """Copy this rank's part of a saved tensor. One that is cut otherwise is gathered for it: a collective."""
    if isinstance(value, DTensor):
        parameter = None if part is None else part.parameter
        alike = isinstance(parameter, DTensor) and value.shape == parameter.shape
        if alike and value.placements == parameter.placements and value.device_mesh == parameter.device_mesh:  # type: ignore[union-attr]
            _copy(place, Pieces.of(value))
            return
        if value._local_tensor.device.type != value.device_mesh.device_type:  # it was offloaded
            value = value.to(value.device_mesh.device_type)
        value = value.full_tensor()  # type: ignore[attr-defined]
    elif isinstance(value, ShardedTensor):
        value = gathered(value)
    if isinstance(place, Pieces):
        for box, local in place.pieces:
            local.copy_(value[tuple(map(slice, box.offsets, _ends(box.offsets, box.sizes)))])
    elif place is not None:
        place.copy_(value)


def _copy(place: Any, value: Pieces) -> None:
    if place is not None:
        for (_, to), (_, local) in zip(place.pieces, value.pieces, strict=True):
            to.copy_(local)


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [offset + size for offset, size in zip(offsets, sizes, strict=True)]


def _keys(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """By which names an optimizer that knows names calls its parameters, by their ids."""
    names = {key: found[0] for key, found in _names_of(model).items()}
    own = [key for group in optimizer.state_dict()["param_groups"] for key in group["params"]]
    raw = {clean_name(key): key for key in own if isinstance(key, str)}
    return {key: raw.get(name, name) for key, name in names.items()}


def load_local(model: nn.Module, optimizer: Any, given: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """What :func:`save_local` has made, as a state dict for ``optimizer``: same wrapping, same ranks.

    Raises:
        ValueError: If it has other parameters.
    """
    names = _names_of(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys: dict[str, Any] = {names[id(p)][0]: number for number, p in enumerate(parameters)}
    if named:
        by_id = _keys(model, optimizer)
        keys = {name: by_id[id(parameters[number])] for name, number in keys.items()}
    groups = given.get("param_groups", [])
    unknown = [fqn for group in groups for fqn in group["params"] if fqn not in keys]
    missing = set(keys) - {fqn for group in groups for fqn in group["params"]} if groups else set()
    if unknown or missing:
        raise ValueError(
            "LOCAL_STATE_DICT: expected state of the same flat parameters, saved with the same wrapping; unknown are "
            f"{unknown[:8]}, missing {sorted(missing)[:8]}; save with FULL_STATE_DICT or SHARDED_STATE_DICT instead"
        )
    _check_local(parameters, names, given["state"])
    result: dict[str, Any] = {"state": {keys.get(fqn, fqn): value for fqn, value in given["state"].items()}}
    if "param_groups" in given:
        result["param_groups"] = [{**group, "params": [keys[fqn] for fqn in group["params"]]} for group in groups]
    return result


def _check_local(parameters: Sequence[nn.Parameter], names: Mapping[int, list[str]], state: Mapping[str, Any]) -> None:
    for parameter in parameters:
        fqn = names[id(parameter)][0]

        def check(path: Path, value: Any, fqn: str = fqn, parameter: nn.Parameter = parameter) -> None:
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"LOCAL_STATE_DICT: {fqn}: this rank's piece has shape {tuple(parameter.shape)}, but {path[0]} was "
                    f"saved with {tuple(value.shape)}; load it on as many ranks as saved it"
                )

        mapped(state.get(fqn, {}), check)
