"""Find sharded parameters whose gradients nobody reduces, because a forward has computed with the DTensor itself.

[Note: Sharded parameters read in a forward]
A model that reads ``self.head.weight`` in its forward while the unit of ``head`` is resharded gets the DTensor, and may
compute with it (``.full_tensor()``). Autograd then accumulates the gradient of this rank's data straight into the
sharded parameter, and nobody averages it over the data-parallel ranks. A regularizer on DTensors, whose gradient is the
same function of the parameter on all ranks, comes the same way and is right. In the graph they differ: the regularizer
meets what depends on data in sums only, which pass gradients on unchanged; where a parameter and data meet below
anything that is not linear, the parameter's gradient depends on the data.

The graph behind a forward's outputs is searched after forwards number 1, 2, 4, 8, ...: what is wrong from the first
step on is said in it, what becomes wrong later is said in time, and the mean cost is nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fullshard.engine.containers import tensors_within
from fullshard.engine.parameter import ShardedParameter, managed_by

__all__ = ["UnreducedGradients"]

# Nodes that are linear in what requires a gradient, whatever else they take.
_LINEAR = (
    *("Add", "Sub", "Neg", "Sum", "Mean", "Stack", "Cat", "View", "Unsafe", "Unsqueeze", "Squeeze", "Expand"),
    *("Alias", "Clone", "ToCopy", "Select", "Slice", "Reshape", "Permute", "Transpose", "TBackward", "Split"),
)
_LINEAR_IN_ONE = ("Mul", "Div")  # linear if only one factor requires a gradient


class _Below(NamedTuple):
    """What the gradient of a node goes to.

    Args:
        read: Sharded parameters, by id.
        data: Whether anything else.
    """

    read: frozenset[int]
    data: bool


class UnreducedGradients:
    """Searches the graphs of a root's forwards, and warns once of each parameter that it finds."""

    _forwards: int
    _known: weakref.WeakSet[ShardedParameter]  # that were found

    def __init__(self) -> None:
        self._forwards, self._known = 0, weakref.WeakSet()

    def check(self, output: Any) -> None:
        """Warn of parameters that the forward that returns ``output`` has read in their sharded form.

        Args:
            output: Of the outermost forward, with its graph.
        """
        self._forwards += 1
        if self._forwards & (self._forwards - 1):
            return
        nodes = [tensor.grad_fn for tensor in tensors_within(output) if tensor.grad_fn is not None]
        found = [p for p in _read_with_data(nodes) if p not in self._known and _has_peers(p)]
        self._known.update(found)
        if found:
            warnings.warn(
                "the forward has computed with the sharded form (DTensor) of "
                + ", ".join(parameter.describe() for parameter in found)
                + ": the gradient from there is that of this rank's data only, and is not reduced over the "
                "data-parallel ranks. Call the module instead of reading its parameter, or read it where its unit is "
                "unsharded: put the module that reads it into the same fully_shard call, or use "
                "reshard_after_forward=False and read it after the module has run",
                stacklevel=4,
            )


def _has_peers(parameter: ShardedParameter) -> bool:
    mesh = parameter.placement.mesh
    return mesh.world_size * mesh.replicas > 1


def _read_with_data(nodes: Iterable[Any]) -> list[ShardedParameter]:
    """Sharded parameters whose gradients depend on data, in the graph behind ``nodes``."""
    below: dict[Any, _Below] = {}
    parameters: dict[int, ShardedParameter] = {}
    found: set[int] = set()
    stack = [(node, False) for node in nodes]
    while stack:
        node, entered = stack.pop()
        if node in below:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if not entered:
            stack.append((node, True))
            stack += [(child, False) for child in children if child not in below]
            continue
        leaf = getattr(node, "variable", None)
        managed = managed_by(leaf) if isinstance(leaf, torch.Tensor) else None
        if managed is not None and managed.sharded is leaf:
            parameters[id(managed)] = managed
            below[node] = _Below(frozenset({id(managed)}), data=False)
            continue
        read = frozenset[int]().union(*(below[child].read for child in children if child in below))
        data = not children or any(below[child].data for child in children if child in below)
        below[node] = _Below(read, data)
        if read and data and not _is_linear(node.name(), len(children)):
            found |= read
    return [parameters[key] for key in parameters if key in found]


def _is_linear(name: str, inputs: int) -> bool:
    return name.startswith(_LINEAR) or (inputs == 1 and name.startswith(_LINEAR_IN_ONE))
