"""Find, map and cast tensors in the nested containers that modules take and return."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

__all__ = ["cast_tensors", "iterate_tensors", "map_tensors", "tensors_within"]

_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size})
MOST_OBJECTS = 10_000  # that tensors_within visits: outputs have fewer, unless they refer to large data structures
_NO_CONTAINERS = (str, bytes, bytearray, int, float, complex, type(None), type, FunctionType, MethodType, ModuleType)


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples, sets, mappings, dataclasses and classes registered as pytrees."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in _items(value):
        yield from iterate_tensors(item)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors that ``iterate_tensors`` finds, and those in attributes of objects of any other class.

    At most ``MOST_OBJECTS`` objects are visited, each once. Attributes that raise are skipped.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids are not reused
    stack = [value]
    while stack and len(seen) < MOST_OBJECTS:
        current = stack.pop()
        if isinstance(current, torch.Tensor):
            yield current
        elif not isinstance(current, (*_NO_CONTAINERS, nn.Module)) and id(current) not in seen:
            seen[id(current)] = current
            with contextlib.suppress(Exception):  # proxies, closed files, properties of users
                items = [*_items(current), *_attributes(current)]
                stack += [item for item in reversed(items) if type(item) not in _ATOMS]


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a container; none if the value is of no known container class."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    node = SUPPORTED_NODES.get(type(value))
    if node is not None:
        items: list[Any] = node.flatten_fn(value)[0]
        return items
    return _fields(value).values()


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; none if the value is no dataclass."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for member in (member for cls in type(value).__mro__ for member in vars(cls).values()):
        if isinstance(member, MemberDescriptorType):  # of __slots__
            with contextlib.suppress(AttributeError):  # not set
                found.append(member.__get__(value))
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to every tensor in ``value``; containers are copied only if a tensor in them changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    items = list(_items(value))
    if not items:
        return value
    mapped = [map_tensors(function, item) for item in items]
    if all(new is old for new, old in zip(mapped, items, strict=True)):
        return value
    return _with_items(value, mapped)


def _with_items(value: Any, items: list[Any]) -> Any:
    """Return a container like ``value`` with other items, in the order of ``_items``."""
    if isinstance(value, Mapping):
        changed: Any = {} if type(value) is dict else copy.copy(value)  # which keeps the state of subclasses
        for key, item in zip(value, items, strict=True):
            changed[key] = item
        return changed
    if isinstance(value, PackedSequence):  # its batch sizes have to stay on the CPU
        return PackedSequence(items[0], value.batch_sizes, *items[2:])
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    node = SUPPORTED_NODES.get(type(value))
    if node is not None:
        return node.unflatten_fn(items, node.flatten_fn(value)[1])
    changed = copy.copy(value)  # not dataclasses.replace: that runs __init__ and __post_init__ again
    for (name, old), new in zip(_fields(value).items(), items, strict=True):
        if new is not old:
            object.__setattr__(changed, name, new)
    return changed


def cast_tensors(dtype: torch.dtype, value: Any) -> Any:
    """Cast all floating-point tensors in ``value``, differentiably."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)
