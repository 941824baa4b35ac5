"""In what modules return their tensors: containers of all kinds, and how a caller takes the tensors out again."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

Tensors = Sequence[torch.Tensor]


@dataclasses.dataclass
class Fields:
    """A dataclass, as transformers' outputs are."""

    tensors: tuple[torch.Tensor, ...]


class Named(NamedTuple):
    """A named tuple."""

    tensors: tuple[torch.Tensor, ...]
    note: str


class Registered:
    """A class that torch's pytree knows, and nothing else."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tuple(tensors)


pytree.register_pytree_node(
    Registered,
    lambda value: (list(value.tensors), None),
    lambda tensors, _: Registered(list(tensors)),
    serialized_type_name="fullshard.tests.fuzz.Registered",
)


class Plain:
    """A class that nobody knows."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tuple(tensors)


CONTAINERS: dict[str, Callable[[Tensors], Any]] = {
    "tensor": lambda tensors: tensors[0],
    "tuple": tuple,
    "dict": lambda tensors: {f"t{index}": tensor for index, tensor in enumerate(tensors)},
    "nested": lambda tensors: {"all": [tuple(tensors), "text"], "none": None},
    "dataclass": lambda tensors: Fields(tuple(tensors)),
    "named tuple": lambda tensors: Named(tuple(tensors), "text"),
    "deque": collections.deque,
    "registered": Registered,
    "plain": Plain,
}


def pack(container: str, *tensors: torch.Tensor) -> Any:
    """The tensors in a container; of "tensor" only the first."""
    return CONTAINERS[container](tensors)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors that :func:`pack` was given."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = output["all"][0] if "all" in output else output.values()
    elif not isinstance(output, (list, tuple, collections.deque)) or isinstance(output, Named):
        output = output.tensors
    return list(output)
