"""What the modules of a wrapper hold while a state dict is loaded, and how values of all kinds get into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.engine.full_copies import FullCopies, bring_to_rest
from fullshard.engine.names import WRAPPED, clean_name
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError
from fullshard.wrapper_state_saving import VisibleSlice, owned_names, visible_slices

__all__ = ["Loading", "open_slices", "open_whole"]

KINDS = ("missing", "a tensor", "a DTensor", "no tensor")


class Loading(Protocol):
    """A load that is under way."""

    def close(self, *, writeback: bool) -> None:
        """It is over; ``writeback``: what the modules hold now counts."""


def open_whole(wrapper: nn.Module, unit: Unit, state: dict[str, Any], prefix: str) -> Loading:
    """Have the modules hold full parameters, and put into these what ``state`` has as DTensors. A collective.

    [Note: Loading sharded values]
    A DTensor, of either front end and on whatever mesh, is gathered and written into the full parameter, one parameter
    at a time, before the modules look for it; what they then find in the state dict is that parameter itself. Which
    collectives run depends on the values, so ranks first agree on what there is under each name. What is missing
    stays missing, and so the modules report it.

    Args:
        wrapper: The module that the unit belongs to.
        unit: At rest.
        state: What is being loaded, with this wrapper's own prefix; changed in place.
        prefix: Of its keys.

    Raises:
        FullshardError: On all ranks, if they hold different kinds of values under a name.
    """
    inside = f"{prefix}{WRAPPED}."
    found = {inside + name: parameter for name, parameter in owned_names(wrapper, unit)}
    _agree(unit, state, found)
    copies = FullCopies(unit)
    try:
        with torch.inference_mode(False), torch.no_grad():
            for key, parameter in found.items():
                value, copy = state.get(key), copies.parameters[id(parameter)].detach()
                if isinstance(value, torch.Tensor) and value.shape == copy.shape and _fill(copy, value):
                    state[key] = copy
    except BaseException:
        copies.close(writeback=False)
        raise
    return copies


def open_slices(unit: Unit, state: dict[str, Any], prefix: str) -> Loading:
    """The same for visible flat parameters under their own names: the modules hold these."""
    bring_to_rest(unit, "its flat parameter")
    found = {f"{prefix}{WRAPPED}.{each.home.name}": each for each in visible_slices(unit)}
    _agree(unit, state, found)
    for key, each in found.items():
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.shape == (each.numel,):
            state[key] = _slice_of(value, each)
    return _SliceLoading(unit)


class _SliceLoading:
    _unit: Unit

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def close(self, *, writeback: bool) -> None:
        """Values are in the shards already, but for those that were assigned."""
        if writeback:
            self._unit.settle_parameters()


def _slice_of(value: torch.Tensor, each: VisibleSlice) -> torch.Tensor:
    if not isinstance(value, DTensor):
        held = value.narrow(0, min(each.start, each.numel), each.held)
    elif each.is_like(value):
        held = value._local_tensor
    else:
        held = _whole_of(value).narrow(0, min(each.start, each.numel), each.held)
    padded = torch.zeros(each.slice_numel, dtype=held.dtype, device=held.device)
    padded.narrow(0, 0, each.held).copy_(held)
    return padded


def _fill(copy: torch.Tensor, value: torch.Tensor) -> bool:
    """Put ``value`` into the full parameter, where that takes more than ``copy_``; whether it did."""
    if isinstance(copy, DTensor):  # of tensor parallelism
        if isinstance(value, DTensor) and value.device_mesh == copy.device_mesh:
            return False
        whole = _whole_of(value).to(copy.device) if isinstance(value, DTensor) else value.to(copy.device)
        own = distribute_tensor(whole, copy.device_mesh, copy.placements, src_data_rank=None)
        copy._local_tensor.copy_(own._local_tensor)
        return True
    if isinstance(value, DTensor):
        copy.copy_(_whole_of(value))
        return True
    return False


def _whole_of(value: DTensor) -> torch.Tensor:
    """Gathered. State dicts that were offloaded have their parts in CPU memory, where the group may not reach."""
    device = value.device_mesh.device_type
    near: Any = value.detach() if value._local_tensor.device.type == device else value.detach().to(device)
    whole: torch.Tensor = near.full_tensor()
    return whole


def _agree(unit: Unit, state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise FullshardError, on all ranks, unless all have the same kinds of values under ``keys``."""
    mesh, keys = unit.mesh, list(keys)
    kinds = [_kind(state.get(key)) for key in keys]
    extremes = torch.tensor([*kinds, *(-kind for kind in kinds)], dtype=torch.int32, device=mesh.device)
    alone = True
    for part, size in ((mesh.shard, mesh.world_size), (mesh.replicate, mesh.replicas)):
        if part is not None and size > 1 and keys:
            alone = False
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=part.get_group())
    if alone:
        return
    highest, lowest = extremes.view(2, -1).tolist()
    differing = [
        f"{clean_name(key)} ({KINDS[-low]} on some, {KINDS[high]} on others)"
        for key, high, low in zip(keys, highest, lowest, strict=True)
        if high != -low
    ]
    if differing:
        raise FullshardError(
            f"load_state_dict: expected the same keys, with values of the same kind, on all ranks; they differ in "
            f"{', '.join(differing[:3])}{' ...' if len(differing) > 3 else ''}; load what was saved with rank0_only "
            "on every rank, or on rank 0 before wrapping with sync_module_states=True"
        )


def _kind(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, DTensor):
        return 2
    return 1 if isinstance(value, torch.Tensor) else 3
