"""The state of an optimizer by FQN and as regions of unsharded tensors.

That is the same for every way of wrapping and sharding the model, so that what one saved another one loads.

[Note: Sharded and replicated optimizer state]
An entry of a parameter's state is either *sharded* as the parameter, with one element for each of its elements, or
*replicated*, the same on all ranks, such as the number of steps. Optimizers do not declare which. A DTensor has
placements; any other entry is taken to be sharded if it has the shape that the parameter has on this rank. A replicated
entry may have that shape by chance, so *constant* names come first: a name that has one shape in all of the state,
while some of its parameters have another one, is replicated. An entry of at most one element called ``step`` is
replicated where even that does not decide.

Ranks come to the same result although their shards have different shapes: a sharded entry has the parameter's shape
on every rank, also where a shard is empty, and a replicated one has it only by chance. Saving compares the results of
the ranks, see ``fingerprint``. Loading goes by the shapes of whole tensors only, which all ranks know.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.format.host import bytes_of
from fullshard.checkpoint.state.parameters import LocalParameter, local_parameters
from fullshard.engine.parameters.sharded import value_of
from fullshard.engine.parameters.tensor_shards import TensorShards
from fullshard.errors import FullshardError
from fullshard.ranks.agreement import compare, list_differences

__all__ = [
    "NAMELESS",
    "STEP",
    "OptimizedParameter",
    "Path",
    "StateShapes",
    "TensorSpec",
    "as_shards",
    "compare_fingerprints",
    "fingerprint",
    "group_options",
    "holds_tensors",
    "leaves_of",
    "map_leaves",
    "named_groups",
    "optimized_groups",
    "optimizer_state",
    "path_name",
    "state_by_fqn",
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
    """Replace tensors and ``TensorShards`` inside of a nested ``value`` by ``TensorSpec``."""
    return map_leaves(value, lambda _, leaf: TensorSpec(leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf)


@dataclass(frozen=True, eq=False)
class OptimizedParameter:
    """A parameter object of an optimizer.

    Attributes:
        parameter: The object.
        originals: The model's parameters in it: one, or those of a ``FlatParameter``.
        index: Position of the first of them in the model.
    """

    parameter: nn.Parameter
    originals: tuple[LocalParameter, ...]
    index: int

    @property
    def flat(self) -> bool:
        """True if it is a visible flat parameter."""
        sharded = self.originals[0].sharded
        return sharded is not None and sharded.is_hidden

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


def named_groups(
    groups: Iterable[Iterable[OptimizedParameter]], options: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return parameter groups with FQNs in the place of parameters.

    Args:
        groups: Members of each group.
        options: Groups to take the options of.
    """
    return [
        {"params": [fqn for member in members for fqn in member.fqns], **group_options(own)}
        for members, own in zip(groups, options, strict=True)
    ]


# ---------------------------------------------------------------- nested state


def holds_tensors(value: Any) -> bool:
    """Return True if ``value`` is a dictionary, list or tuple with tensors in it, at any depth."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_is_tensor(item) or holds_tensors(item) for item in items)


def map_leaves(value: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Replace the leaves of ``value`` by ``leaf(path, leaf)``, called in an order that depends on keys only.

    Containers for which ``holds_tensors`` is true are traversed, and ``value`` itself if it is a mapping.
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
        entries: dict[Path, list[tuple[torch.Size, torch.Size]]] = {}
        for path, shape, parameter in seen:
            entries.setdefault(path, []).append((shape, parameter))
        self._constant, self._following = set(), set()
        for path, pairs in entries.items():
            matching = [shape == parameter for shape, parameter in pairs if math.prod(parameter) > 1]
            if len({shape for shape, _ in pairs}) == 1 and any(shape != parameter for shape, parameter in pairs):
                self._constant.add(path)
            elif 2 * sum(matching) > len(matching):
                self._following.add(path)

    def is_sharded(self, path: Path, shape: torch.Size, parameter: torch.Size) -> bool:
        """Return True if an entry of ``shape`` is sharded as its parameter, which has the shape ``parameter``."""
        if shape != parameter or path in self._constant:
            return False
        return path in self._following or path[-1] != STEP or math.prod(shape) > 1

    def is_wrong(self, path: Path, shape: torch.Size, parameter: torch.Size) -> bool:
        """Return True if a replicated entry should be sharded: others of its name are, and its shape is not that of the
        parameter with some dims reduced to 1.
        """
        alike = len(shape) == len(parameter) and all(
            own in (1, size) for own, size in zip(shape, parameter, strict=True)
        )
        return path in self._following and len(shape) > 0 and not alike


# ---------------------------------------------------------------- state by FQN


Leaf = Callable[
    [LocalParameter, torch.Tensor, bool], Any
]  # (parameter, state tensor, is it sharded as the parameter) -> value to save


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer``. No communication.

    Args:
        model: The model that it optimizes: plain, DistributedDataParallel, of either front end, or a mixture.
        optimizer: Any optimizer.

    Returns:
        ``{"state": {FQN: {name: value}}, "param_groups": [{"params": [FQN, ...], option: value}]}``. Values are
        ``TensorShards`` if the state is sharded as its parameter, tensors if it is the same on all ranks, and
        other values as they are, all of them live. Tied parameters have their first name. Parameters without state are
        in ``param_groups`` only. State that users added under a string key is included under that key; if it is no
        mapping, in one with the only key "".

    Raises:
        ValueError: If the optimizer has parameters that are not in the model.
        PhaseError: In the middle of a step.
    """
    groups = optimized_groups(model, optimizer.param_groups)
    members = [member for group in groups for member in group]
    state = state_by_fqn(members, optimizer.state, as_shards)
    for key, value in optimizer.state.items():
        if isinstance(key, str):
            state[key] = value if isinstance(value, Mapping) else {NAMELESS: value}
    return {"state": state, "param_groups": named_groups(groups, optimizer.param_groups)}


def as_shards(original: LocalParameter, value: torch.Tensor, is_sharded: bool) -> TensorShards | torch.Tensor:
    """Return a tensor of the state as ``optimizer_state`` does."""
    if is_sharded:
        return original.shards_of(value)
    return TensorShards.of(value) if isinstance(value, DTensor) else value.detach()


def state_by_fqn(
    members: Sequence[OptimizedParameter], state: Mapping[Any, Any], leaf: Leaf
) -> dict[str, dict[str, Any]]:
    """Return the state of the members by the first FQN of each parameter.

    Args:
        members: Parameters of an optimizer.
        state: By parameter object.
        leaf: Maps each tensor to the result. Called in the same order on all ranks, so that it may communicate.
    """
    held = [(member, state[member.parameter]) for member in members if state.get(member.parameter)]
    shapes = StateShapes(
        (path, value.shape, member.local_shape)
        for member, values in held
        for path, value in leaves_of(values).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    )
    found = {}
    for member, values in sorted(held, key=lambda pair: pair[0].index):
        for original in member.originals:

            def converted(path: Path, value: Any, member: Any = member, original: LocalParameter = original) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if isinstance(value, DTensor):
                    return leaf(original, value, value.shape == original.shape)
                return leaf(original, value, shapes.is_sharded(path, value.shape, member.local_shape))

            found[original.fqn] = map_leaves(values, converted)
    return found


# ---------------------------------------------------------------- comparing ranks


def fingerprint(state: Mapping[str, Any]) -> dict[str, str]:
    """Describe the state by FQN in words that must be equal on all ranks that save together.

    Compared are names, shapes, dtypes, and the contents of replicated tensors.

    Args:
        state: ``optimizer_state(...)["state"]``, or a subset of it.
    """
    return {fqn: "; ".join(_words(leaves_of(values))) for fqn, values in state.items() if isinstance(values, Mapping)}


def _words(leaves: Mapping[Path, Any]) -> Iterator[str]:
    for path, value in leaves.items():
        name = path_name(path)
        if isinstance(value, (torch.Tensor, TensorShards)):
            name += f" {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, torch.Tensor) and not value.is_meta:
            host = value.detach().cpu().contiguous()
            shown = host.item() if host.numel() == 1 else f"#{zlib.crc32(bytes_of(host)):08x}"
            yield f"{name} = {shown}"
        else:
            yield f"{name} = {value!r}" if isinstance(value, (bool, int, float, str)) else name


def compare_fingerprints(own: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks of ``group`` if their states differ. All of them call it: a collective of a few bytes.

    Args:
        own: The ``fingerprint`` of this rank.
        group: The ranks. None: all.

    Raises:
        FullshardError: With the parameters and ranks that differ.
    """

    def explain(found: Mapping[int, Mapping[str, str]]) -> FullshardError:
        return FullshardError(
            "optimizer state differs between ranks and cannot be saved; the optimizer must have the same state for a "
            f"parameter on all ranks, also where a rank's shard is empty: {list_differences(found)}"
        )

    compare(dict(sorted(own.items())), [group], explain)
