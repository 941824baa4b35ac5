"""What an optimizer holds, by the names of the model's parameters: which of its entries are cut as they are, and where.

[Note: Which state is cut]
An entry of a parameter's state is either *cut*, one element for each of the parameter's, and then every rank has its
part; or *shared*, the same on all ranks, as the number of steps is. Nobody says which. A DTensor knows it itself;
otherwise an entry is cut if it has the shape that the parameter has here. That misleads in two cases, so names that
are *constant* come first: a name that has one shape in all of the state, while some of its parameters have another
one, is shared, also where a parameter (or this rank's part of it) happens to have that shape. What has one element
at most and is called ``step`` is shared where even that does not tell.

Ranks come to the same result although their parts have different shapes: an entry that follows its parameter does so
on every rank, an empty part included, and one that does not has a shape that is no rank's part but by chance. Saving
compares what the ranks found out, see :func:`fullshard.checkpoint.optimizer_state.fingerprint`. Loading goes by
the shapes of whole tensors only, which all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.parameters import LocalParameter, local_parameters
from fullshard.checkpoint.pieces import Pieces
from fullshard.engine.parameter import value_of

__all__ = [
    "NAMELESS",
    "Described",
    "OptimizedParameter",
    "Path",
    "StateShapes",
    "describe",
    "group_options",
    "holds_tensors",
    "leaves_of",
    "mapped",
    "optimized_groups",
    "path_name",
]

Path = tuple[Any, ...]  # of an entry: its name, and for nested ones the keys below it

STEP = "step"
NAMELESS = ""  # key of what users have put into the state under a name of their own and is no mapping
NOT_OPTIONS = ("params", "param_names")  # of a group; the second is a list beside the first, of no use to other groups


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as a checkpoint knows it before it is read.

    Args:
        shape: Of the whole tensor.
        dtype: Of its elements.
    """

    shape: torch.Size
    dtype: torch.dtype


def describe(value: Any) -> Any:
    """Tensors (and :class:`Pieces`) inside of ``value``, however nested, as :class:`Described`; the rest as it is."""
    return mapped(value, lambda _, leaf: Described(leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf)


@dataclass(frozen=True, eq=False)
class OptimizedParameter:
    """A parameter object of an optimizer.

    Attributes:
        parameter: The object.
        parts: The model's parameters in it: one, or those of a :class:`FlatParameter`.
        index: Of the first of them, in the order of the model.
    """

    parameter: nn.Parameter
    parts: tuple[LocalParameter, ...]
    index: int

    @property
    def flat(self) -> bool:
        """Whether it is a visible flat parameter."""
        return self.parts[0].place is not None

    @property
    def local_shape(self) -> torch.Size:
        """Of what this rank holds."""
        return value_of(self.parameter).shape

    @property
    def fqns(self) -> list[str]:
        """The first name of each part."""
        return [part.fqn for part in self.parts]


def optimized_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[list[OptimizedParameter]]:
    """The parameters of each group of an optimizer, as parameters of ``model``.

    Args:
        model: See :func:`local_parameters`.
        groups: ``param_groups`` of the optimizer.

    Raises:
        ValueError: If one is not the model's.
        PhaseError: See :func:`local_parameters`.
    """
    parts: dict[int, list[LocalParameter]] = {}
    index: dict[int, int] = {}
    for position, part in enumerate(local_parameters(model)):
        parts.setdefault(id(part.parameter), []).append(part)
        index.setdefault(id(part.parameter), position)
    found = []
    for number, group in enumerate(groups):
        members = []
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in parts:
                raise ValueError(
                    f"parameter {place} of group {number} of the optimizer (shape {tuple(parameter.shape)}, "
                    f"{parameter.dtype}) is not one of the model's; build the optimizer from the parameters that the "
                    "model has now, and pass the model that they are of"
                )
            members.append(OptimizedParameter(parameter, tuple(parts[id(parameter)]), index[id(parameter)]))
        found.append(members)
    return found


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


# ---------------------------------------------------------------- nested state


def holds_tensors(value: Any) -> bool:
    """Whether ``value`` is a dictionary, list or tuple with tensors in it, at any depth."""
    if isinstance(value, dict):
        return any(_is_tensor(item) or holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_is_tensor(item) or holds_tensors(item) for item in value)
    return False


def mapped(value: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """``value`` with its leaves replaced by ``leaf(path, it)``, called in an order that depends on keys only.

    What :func:`holds_tensors` is taken apart, and so is ``value`` itself if it is a mapping; all else is a leaf.
    """
    if isinstance(value, Mapping) and (not path or holds_tensors(value)):
        return {key: mapped(value[key], leaf, (*path, key)) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)) and holds_tensors(value):
        items = [mapped(item, leaf, (*path, number)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return leaf(path, value)


def leaves_of(state: Mapping[Any, Any]) -> dict[Path, Any]:
    """The leaves of one parameter's state, by their paths."""
    found: dict[Path, Any] = {}
    mapped(state, found.__setitem__)
    return found


def path_name(path: Path) -> str:
    """For messages."""
    return ".".join(map(str, path))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Described, Pieces))


# ---------------------------------------------------------------- cut or shared


class StateShapes:
    """What the names in a state mean. See [Note: Which state is cut].

    Args:
        seen: For each tensor in it: its path, its shape, and that of its parameter.
    """

    _constant: set[Path]
    _following: set[Path]  # names of which most entries of more than one element are cut

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

    def is_cut(self, path: Path, shape: torch.Size, parameter: torch.Size) -> bool:
        """Whether an entry of ``shape`` is cut as its parameter is, which has the shape ``parameter``."""
        if shape != parameter or path in self._constant:
            return False
        return path in self._following or path[-1] != STEP or math.prod(shape) > 1

    def is_wrong(self, path: Path, shape: torch.Size, parameter: torch.Size) -> bool:
        """Whether an entry that is not cut ought to be: others of its name are, and it is no sum over dims either."""
        alike = len(shape) == len(parameter) and all(
            own in (1, size) for own, size in zip(shape, parameter, strict=True)
        )
        return path in self._following and len(shape) > 0 and not alike
