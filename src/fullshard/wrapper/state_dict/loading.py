"""Load state dicts into wrappers: register unsharded or flat parameters meanwhile, and convert values to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.engine.parameters.names import WRAPPED, clean_name
from fullshard.engine.summoned_parameters import SummonedParameters, require_idle
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, list_differences
from fullshard.ranks.groups import data_parallel_groups
from fullshard.wrapper.state_dict.gather import full_tensor
from fullshard.wrapper.state_dict.saving import VisibleSlice, owned_names, visible_slices

__all__ = ["EndLoad", "load_into_full", "load_into_slices"]

EndLoad = Callable[..., None]  # end(writeback=...) ends a load, and writes the registered parameters back to the shards


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
    found = {f"{prefix}{WRAPPED}.{each.home.name}": each for each in visible_slices(unit)}
    _check_same_keys(unit, state, found)
    for key, each in found.items():
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.shape == (each.numel,):
            state[key] = _slice_of(value, each)

    def end(*, writeback: bool) -> None:
        if writeback:
            unit.refresh()  # values are in the shards already, except those that were assigned

    return end


def _slice_of(value: torch.Tensor, each: VisibleSlice) -> torch.Tensor:
    if not isinstance(value, DTensor):
        local = value.narrow(0, min(each.start, each.numel), each.local_numel)
    elif each.has_same_sharding(value):
        local = value._local_tensor
    else:
        local = full_tensor(value.detach()).narrow(0, min(each.start, each.numel), each.local_numel)
    padded = torch.zeros(each.slice_numel, dtype=local.dtype, device=local.device)
    padded.narrow(0, 0, each.local_numel).copy_(local)
    return padded


def _fill(copy: torch.Tensor, value: torch.Tensor) -> bool:
    """Copy ``value`` into the unsharded parameter if ``copy_`` does not suffice; return True if it was copied."""
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
