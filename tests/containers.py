"""Containers in which modules take and return tensors, and how a caller takes the tensors out again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

Tensors = Sequence[torch.Tensor]


@dataclasses.dataclass
class Fields:
    """A dataclass, as transformers' outputs are."""

    first: Any
    others: Any = None
    label: str = "fields"


@dataclasses.dataclass(frozen=True)
class FrozenFields:
    """A dataclass that cannot be assigned to, with a field that its constructor does not take."""

    first: Any
    others: Any = None
    computed: list[int] = dataclasses.field(default_factory=list, init=False)


class Named(NamedTuple):
    """A named tuple."""

    tensors: tuple[torch.Tensor, ...]
    note: str


class Registered:
    """A class that torch's pytree knows, and nothing else."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = list(tensors)


pytree.register_pytree_node(
    Registered,
    lambda value: (value.tensors, None),
    lambda tensors, _: Registered(list(tensors)),
    serialized_type_name="fullshard.tests.containers.Registered",
)


class Plain:
    """A class that nobody knows, with slots and a reference to itself."""

    __slots__ = ("__dict__", "tensors")

    def __init__(self, tensors: Tensors) -> None:
        self.tensors, self.itself = list(tensors), self


CONTAINERS: dict[str, Callable[[Tensors], Any]] = {
    "tensor": lambda tensors: tensors[0],
    "list": lambda tensors: [*tensors, None],
    "tuple": lambda tensors: (None, *tensors, 3),
    "named tuple": lambda tensors: Named(tuple(tensors), "text"),
    "dict": lambda tensors: {"a": tensors[0], "b": {"c": list(tensors[1:])}, 3: None, "text": "text"},
    "ordered dict": lambda tensors: OrderedDict((f"t{index}", tensor) for index, tensor in enumerate(tensors)),
    "dataclass": lambda tensors: Fields(tensors[0], tuple(tensors[1:])),
    "frozen dataclass": lambda tensors: FrozenFields(tensors[0], list(tensors[1:])),
    "nested": lambda tensors: [{"deep": (Fields(tensors[0], {"b": FrozenFields(Named(tuple(tensors[1:]), ""))}),)}],
    "deque": deque,
    "registered": Registered,
    "plain": Plain,
}
UNKNOWN_CLASSES = ("deque", "registered", "plain")  # tensors in them are watched, and not replaced


def pack(container: str, *tensors: torch.Tensor) -> Any:
    """The tensors in a container; of "tensor" only the first."""
    return CONTAINERS[container](tensors)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that :func:`pack` was given, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Fields | FrozenFields):
        value = [value.first, value.others]
    elif isinstance(value, Registered | Plain):
        value = value.tensors
    elif isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | deque):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]
