"""Tensors inside the nested containers that modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["cast_tensors", "iterate_tensors", "map_tensors"]


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, sets, mappings and dataclasses, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iterate_tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from iterate_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iterate_tensors(getattr(value, field.name, None))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor replaced by ``function`` of it; containers are copied only where one changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        return _with_items(value, items) if any(items[k] is not value[k] for k in items) else value
    if isinstance(value, (list, tuple, set, frozenset)):
        mapped = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(mapped, value, strict=True)):
            return value
        if isinstance(value, PackedSequence):  # its sizes have to stay where they are
            return PackedSequence(mapped[0], value.batch_sizes, *mapped[2:])
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*mapped)
        return type(value)(mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(function, value)
    return value


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    changed = copy.copy(mapping)  # keeps what a subclass carries (default factories, class, order)
    for key, item in items.items():
        changed[key] = item  # type: ignore[index]
    return changed


def _with_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = map_tensors(function, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)  # not dataclasses.replace: that runs __init__ and __post_init__ again
    for name, new in changed.items():
        object.__setattr__(result, name, new)
    return result


def cast_tensors(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with all floating-point tensors in it cast, as autograd sees it."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)
