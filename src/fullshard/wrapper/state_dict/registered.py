"""Register the values to save or to load with the modules of a wrapper while its state dict is taken or loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.checkpoint.state.types import StateDictType
from fullshard.engine.parameters.names import WRAPPED, clean_name
from fullshard.engine.parameters.sharded import ShardedParameter, value_of
from fullshard.engine.parameters.tensor_shards import full_tensor
from fullshard.engine.summoned_parameters import SummonedParameters, require_idle
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.memory import own_storage
from fullshard.ranks.agreement import compare, list_differences
from fullshard.ranks.groups import data_parallel_groups

__all__ = [
    "EndLoad",
    "SaveFormat",
    "load_into_full",
    "load_into_slices",
    "owned_names",
    "registered_for_saving",
    "visible_handles",
]

EndLoad = Callable[..., None]  # end(writeback=...) ends a load, and writes the registered parameters back to the shards


@dataclass(frozen=True)
class SaveFormat:
    """Format of one unit in a state dict."""

    kind: StateDictType  # FULL_STATE_DICT if the unit is not sharded
    offload: bool  # values are in CPU memory
    saves: bool  # this rank gets values


@contextlib.contextmanager
def registered_for_saving(unit: Unit, save_format: SaveFormat, *, keep_vars: bool) -> Iterator[None]:
    """Register the values to save with the modules of an idle unit. A collective, except for LOCAL_STATE_DICT.

    With ``keep_vars``, values are the parameters themselves, and need no separate memory.

    Raises:
        PhaseError: If the unit is in the middle of a step, or unsharded by ``summon_full_params``.
    """
    if save_format.kind is StateDictType.LOCAL_STATE_DICT:
        require_idle(unit, "its flat parameter")
        yield
        return
    full = save_format.kind is StateDictType.FULL_STATE_DICT
    copies = SummonedParameters(unit, offload_to_cpu=full and save_format.saves and save_format.offload)
    try:
        if not save_format.saves:  # it took part in the all-gather; its keys are removed afterwards
            copies.close(writeback=False)
        elif full:
            for parameter in copies.parameters.values():
                if not keep_vars and type(parameter.data) is torch.Tensor:
                    parameter.data = own_storage(parameter.data)
        else:
            with torch.inference_mode(False), torch.no_grad():
                copies.parameters.update(_shards(unit, copies.parameters, offload=save_format.offload))
            unit.registration.use_copies(copies.parameters)
        copies.keep_memory()  # what the values do not reference is freed by itself
        yield
    finally:
        copies.close(writeback=False)


def _shards(unit: Unit, full: dict[int, nn.Parameter], *, offload: bool) -> dict[int, nn.Parameter]:
    """Return this rank's shards as ``fully_shard`` would keep them: same meshes, placements, shapes and strides."""
    shards = {}
    for parameter in unit.parameters:
        value = value_of(full[id(parameter)])
        shard = parameter.shard_of(value, torch.device("cpu") if offload else value.device)
        made = shards[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.attributes)
    return shards


def visible_handles(unit: Unit) -> list[Any]:
    """Return the handles of the flat parameters of a unit that users see; none with ``use_orig_params=True``."""
    return [bucket.handle for bucket in unit.buckets if bucket.handle is not None]


def owned_names(wrapper: nn.Module, unit: Unit) -> Iterator[tuple[str, ShardedParameter]]:
    """Yield all names, relative to the wrapper and as before wrapping, of the parameters of its unit."""
    names: dict[int, list[str]] = {}
    for name, module in wrapper.named_modules(remove_duplicate=False):
        known = names.setdefault(id(module), [])
        if (clean := clean_name(name)) not in known:
            known.append(clean)
    for parameter in unit.parameters:
        for owner in parameter.owners:
            for prefix in names.get(id(owner.module()), []):
                yield f"{prefix}.{owner.name}" if prefix else owner.name, parameter


# ---------------------------------------------------------------- loading


def load_into_full(wrapper: nn.Module, unit: Unit, state: dict[str, Any], prefix: str) -> EndLoad:
    """Register unsharded parameters with the modules, and copy DTensors of ``state`` into them. A collective.

    [Note: Loading sharded values]
    A DTensor, of either front end and on any mesh, is gathered and copied into the unsharded parameter, one parameter
    at a time, before the modules load it; the state dict then has that parameter itself. Which collectives run depends
    on the values, so ranks first compare the kinds of values under each key. Missing keys stay missing, and are
    reported by the modules.

    Raises:
        FullshardError: On all ranks, if they have different kinds of values under a key.
    """
    inside = f"{prefix}{WRAPPED}."
    found = {inside + name: parameter for name, parameter in owned_names(wrapper, unit)}
    _check_same_keys(unit, state, found)
    copies = SummonedParameters(unit)
    try:
        with torch.inference_mode(False), torch.no_grad():
            for key, parameter in found.items():
                value, copy = state.get(key), copies.parameters[id(parameter)].detach()
                if isinstance(value, torch.Tensor) and value.shape == copy.shape and _fill(copy, value):
                    state[key] = copy
    except BaseException:
        copies.close(writeback=False)
        raise
    return copies.close


def load_into_slices(unit: Unit, state: dict[str, Any], prefix: str) -> EndLoad:
    """Replace full values of visible flat parameters in ``state`` by this rank's slices."""
    require_idle(unit, "its flat parameter")
    found = {f"{prefix}{WRAPPED}.{handle.name}": handle for handle in visible_handles(unit)}
    _check_same_keys(unit, state, found)
    for key, handle in found.items():
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.shape == (handle.numel,):
            state[key] = handle.slice_of(value)

    def end(*, writeback: bool) -> None:
        if writeback:
            unit.refresh()  # values are in the shards already, except those that were assigned

    return end


def _fill(copy: torch.Tensor, value: torch.Tensor) -> bool:
    """Copy a DTensor, for which plain ``copy_`` is wrong, into the unsharded parameter; False: the caller copies."""
    if isinstance(copy, DTensor):  # sharded by tensor parallelism
        if isinstance(value, DTensor) and value.device_mesh == copy.device_mesh:
            return False
        full = full_tensor(value).to(copy.device)
        own = distribute_tensor(full, copy.device_mesh, copy.placements, src_data_rank=None)
        copy._local_tensor.copy_(own._local_tensor)
        return True
    if isinstance(value, DTensor):
        copy.copy_(full_tensor(value))
        return True
    return False


def _check_same_keys(unit: Unit, state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise FullshardError on all ranks unless all have the same kinds of values under ``keys``."""
    compare({key: _kind(state.get(key)) for key in keys}, data_parallel_groups(unit.mesh), _different_keys)


def _different_keys(kinds: Mapping[int, Mapping[str, str]]) -> FullshardError:
    differences = list_differences(
        {rank: {clean_name(key): kind for key, kind in own.items()} for rank, own in kinds.items()}
    )
    return FullshardError(
        f"load_state_dict: expected the same keys and kinds of values on all ranks, found {differences}; a state dict "
        "that was saved with rank0_only=True has to be loaded on every rank, or on rank 0 before wrapping with "
        "sync_module_states=True"
    )


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, DTensor):
        return "a DTensor"
    return "a tensor" if isinstance(value, torch.Tensor) else "no tensor"
