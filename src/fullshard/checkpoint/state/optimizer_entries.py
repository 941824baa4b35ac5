"""The entries of an optimizer's state by FQN, and which of them are sharded as their parameter is.

[Note: Sharded and replicated optimizer state]
An entry of a parameter's state is either *sharded* as the parameter, with one element for each of its elements, or
*replicated*, the same on all ranks, such as the number of steps. Optimizers do not declare which. A DTensor has
placements; any other entry is taken to be sharded if it has the shape that the parameter has on this rank. A replicated
entry may have that shape by chance, so *constant* names come first: a name that has one shape in all of the state,
while some of its parameters have another one, is replicated. An entry of at most one element called ``step`` is
replicated where even that does not decide.

Ranks come to the same result although their shards have different shapes: a sharded entry has the parameter's shape
on every rank, also where a shard is empty, and a replicated one has it only by chance. Saving compares the results of
the ranks, see :func:`fullshard.checkpoint.state.optimizer.fingerprint`. Loading goes by
the shapes of whole tensors only, which all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.state.parameters import LocalParameter, local_parameters
from fullshard.checkpoint.state.tensor_shards import TensorShards
from fullshard.engine.parameters.sharded import value_of

__all__ = [
    "NAMELESS",
    "OptimizedParameter",
    "Path",
    "StateShapes",
    "TensorSpec",
    "group_options",
    "holds_tensors",
    "leaves_of",
    "map_leaves",
    "optimized_groups",
    "path_name",
    "to_specs",
]

Path = tuple[Any, ...]  # name of an entry, and for nested ones the keys below it

STEP = "step"
NAMELESS = ""  # key of a user's own state that is no mapping
NOT_OPTIONS = ("params", "param_names")  # of a group


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor in a checkpoint, before it is read.

    Args:
        shape: Shape of the unsharded tensor.
        dtype: Dtype of its elements.
    """

    shape: torch.Size
    dtype: torch.dtype


def to_specs(value: Any) -> Any:
    """Replace tensors and :class:`TensorShards` inside of a nested ``value`` by :class:`TensorSpec`."""
    return map_leaves(value, lambda _, leaf: TensorSpec(leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf)


@dataclass(frozen=True, eq=False)
class OptimizedParameter:
    """A parameter object of an optimizer.

    Attributes:
        parameter: The object.
        originals: The model's parameters in it: one, or those of a :class:`FlatParameter`.
        index: Position of the first of them in the model.
    """

    parameter: nn.Parameter
    originals: tuple[LocalParameter, ...]
    index: int

    @property
    def flat(self) -> bool:
        """True if it is a visible flat parameter."""
        return self.originals[0].flat_slice is not None

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local tensor."""
        return value_of(self.parameter).shape

    @property
    def fqns(self) -> list[str]:
        """First FQN of each original parameter."""
        return [original.fqn for original in self.originals]


def optimized_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[list[OptimizedParameter]]:
    """Match the parameters in each group of an optimizer to the parameters of ``model``.

    Args:
        model: The model that the optimizer optimizes.
        groups: ``param_groups`` of the optimizer.

    Raises:
        ValueError: If a parameter is not in the model.
        PhaseError: If a unit is in the middle of a step.
    """
    originals: dict[int, list[LocalParameter]] = {}
    index: dict[int, int] = {}
    for position, original in enumerate(local_parameters(model)):
        originals.setdefault(id(original.parameter), []).append(original)
        index.setdefault(id(original.parameter), position)
    found = []
    for number, group in enumerate(groups):
        members = []
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in originals:
                raise ValueError(
                    f"parameter {place} of group {number} of the optimizer (shape {tuple(parameter.shape)}, "
                    f"{parameter.dtype}) is not in the model; build the optimizer from the parameters that the model "
                    "has now, and pass the same model"
                )
            members.append(OptimizedParameter(parameter, tuple(originals[id(parameter)]), index[id(parameter)]))
        found.append(members)
    return found


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


# ---------------------------------------------------------------- nested state


def holds_tensors(value: Any) -> bool:
    """Return True if ``value`` is a dictionary, list or tuple with tensors in it, at any depth."""
    if isinstance(value, dict):
        return any(_is_tensor(item) or holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_is_tensor(item) or holds_tensors(item) for item in value)
    return False


def map_leaves(value: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Replace the leaves of ``value`` by ``leaf(path, leaf)``, called in an order that depends on keys only.

    Containers for which :func:`holds_tensors` is true are traversed, and ``value`` itself if it is a mapping.
    """
    if isinstance(value, Mapping) and (not path or holds_tensors(value)):
        return {key: map_leaves(value[key], leaf, (*path, key)) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)) and holds_tensors(value):
        items = [map_leaves(item, leaf, (*path, number)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return leaf(path, value)


def leaves_of(state: Mapping[Any, Any]) -> dict[Path, Any]:
    """Return the leaves of one parameter's state by their paths."""
    found: dict[Path, Any] = {}
    map_leaves(state, found.__setitem__)
    return found


def path_name(path: Path) -> str:
    """Join a path for messages."""
    return ".".join(map(str, path))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorSpec, TensorShards))


# ---------------------------------------------------------------- sharded or replicated


class StateShapes:
    """Tells sharded from replicated entries by their shapes. See [Note: Sharded and replicated optimizer state].

    Args:
        seen: For each tensor of the state: its path, its shape, and the shape of its parameter.
    """

    _constant: set[Path]
    _following: set[Path]  # names of which most entries of more than one element are sharded

    def __init__(self, seen: Iterable[tuple[Path, torch.Size, torch.Size]]) -> None:
        shapes: dict[Path, set[torch.Size]] = {}
        matching: dict[Path, list[bool]] = {}
        telling: dict[Path, list[bool]] = {}
        for path, shape, parameter in seen:
            shapes.setdefault(path, set()).add(shape)
            matching.setdefault(path, []).append(shape == parameter)
            if math.prod(parameter) > 1:
                telling.setdefault(path, []).append(shape == parameter)
        self._constant = {path for path, same in matching.items() if len(shapes[path]) == 1 and not all(same)}
        self._following = {path for path, same in telling.items() if 2 * sum(same) > len(same)} - self._constant

    def is_sharded(self, path: Path, shape: torch.Size, parameter: torch.Size) -> bool:
        """Return True if an entry of ``shape`` is sharded as its parameter, which has the shape ``parameter``."""
        if shape != parameter or path in self._constant:
            return False
        return path in self._following or path[-1] != STEP or math.prod(shape) > 1

    def is_wrong(self, path: Path, shape: torch.Size, parameter: torch.Size) -> bool:
        """Return True if a replicated entry should be sharded: others of its name are, and it is no reduction over dims
        either.
        """
        alike = len(shape) == len(parameter) and all(
            own in (1, size) for own, size in zip(shape, parameter, strict=True)
        )
        return path in self._following and len(shape) > 0 and not alike
