"""Parameters that a forward reads (``lm_head.weight``) without calling the module that has them.

[Note: Unsharded until the forward ends]
While a unit stays unsharded after its own forward, its modules keep the unsharded parameters registered until the
outermost forward is over: the gradient of an unsharded parameter is reduced wherever it was used. Autograd nodes that
have read one have no pre-backward hook, so such a unit is unsharded as soon as a backward pass comes to the graph of
that forward: all hooks on its nodes know it. (Not by which graphs still exist: that may differ between ranks.)

[Note: Units of several modules]
A unit may belong to several modules. It is unsharded when the first of them runs, and resharded when all have run. If
some have not when the outermost forward ends (a head that is called later, or whose weight was read), it stays
unsharded for backward, where nodes that have read the weight need it. Its backward ends when that of all its calls has
ended, as for one module that is called several times.

What runs between norm and head may read a weight of the head. So a unit with such a module, which has no submodules, is
unsharded as soon as a backward comes to the graph, too. Of blocks, the weights belong to modules inside of them, and
nothing else reads them: between two blocks of a unit, their modules hold the sharded parameters, although the unsharded
ones stay in memory. Then nothing but its own backward needs the unit. What a rank has run cannot tell, such as a norm
that only rank 0 logs: ranks would all-gather different units.

[Note: Sharded parameters read in a forward]
A model that reads ``self.head.weight`` in its forward while the unit of ``head`` is resharded gets the DTensor, and may
compute with it (``.full_tensor()``). Autograd then accumulates the gradient of this rank's data directly into the
sharded parameter, without averaging it over the data-parallel ranks. A regularizer on DTensors, whose gradient is the
same function of the parameter on all ranks, also reaches the sharded parameter directly, and is right. In the graph
they differ: the regularizer and values that depend on data meet in sums only, which pass gradients on unchanged; where
a parameter and data meet below a node that is not linear, the parameter's gradient depends on the data.

The graph behind the outputs of the outermost forward is searched after forwards number 1, 2, 4, 8, ...: a read that
starts in forward n is reported by number 2n, and the amortized cost is negligible. A loss that reads parameters outside
of every forward is not detected.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fullshard.engine.containers import tensors_within
from fullshard.engine.parameters.sharded import ShardedParameter, managed_by
from fullshard.engine.unit import Unit

__all__ = ["ForwardGraph", "ParameterReads"]

_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

# Nodes that are linear in their inputs that require gradients.
_LINEAR = (
    *("Add", "Sub", "Neg", "Sum", "Mean", "Stack", "Cat", "View", "Unsafe", "Unsqueeze", "Squeeze", "Expand"),
    *("Alias", "Clone", "ToCopy", "Select", "Slice", "Reshape", "Permute", "Transpose", "TBackward", "Split"),
    *("Where", "NanToNum", "_Boundary"),
)
_LINEAR_IN_ONE = ("Mul", "Div")  # linear if only one factor requires a gradient


class _Below(NamedTuple):
    """Inputs of a node in the graph, direct or indirect.

    Args:
        read: Sharded parameters, by id.
        data: True if there are other inputs that require gradients.
    """

    read: frozenset[int]
    data: bool


class ForwardGraph:
    """The autograd graph of one outermost forward, as the hooks on its nodes know it.

    Args:
        read: Units whose unsharded parameters the forward may have read outside of their own forwards.
    """

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read = weakref.WeakSet[Unit]()


class ParameterReads:
    """Tracks the units of one root that forwards may read, and searches for sharded parameters that they have read."""

    graph: ForwardGraph | None  # of the forward that runs now
    _open: list[weakref.ref[Unit]]  # units with unsharded parameters registered until the outermost forward ends
    _forwards: int
    _warned: weakref.WeakSet[ShardedParameter]

    def __init__(self) -> None:
        self.graph, self._open = None, []
        self._forwards, self._warned = 0, weakref.WeakSet()

    def begin_forward(self) -> None:
        """Begin the outermost forward. What hooks its nodes refers to ``graph``."""
        self.graph = ForwardGraph()

    def until_end(self, unit: Unit) -> None:
        """Leave the unsharded parameters of ``unit`` registered until ``end_forward``."""
        self._open.append(unit.ref)

    def all_have_run(self, unit: Unit) -> None:
        """Forget ``unit``, whose modules have all run and are blocks: nothing else had the unsharded parameters."""
        self._open = [ref for ref in self._open if ref is not unit.ref]

    def end_forward(self) -> list[Unit]:
        """End the outermost forward, also after a failure.

        Returns:
            The units that have unsharded parameters registered, which it may have read.
        """
        graph, self.graph = self.graph, None
        units = [unit for unit in (ref() for ref in self._open) if unit is not None]
        self._open.clear()
        if graph is not None:
            graph.read.update(units)
        return units

    def check(self, output: Any) -> None:
        """Warn of sharded parameters that were read by the forward that returned ``output``.

        Args:
            output: Output of the outermost forward, with its graph.
        """
        self._forwards += 1
        if self._forwards & (self._forwards - 1):
            return
        nodes = [tensor.grad_fn for tensor in tensors_within(output) if tensor.grad_fn is not None]
        found = [p for p in _read_with_data(nodes) if p not in self._warned and _has_peers(p)]
        self._warned.update(found)
        if found:
            warnings.warn(
                "forward() used the sharded parameter (DTensor) of "
                + ", ".join(parameter.describe() for parameter in found)
                + "; its gradient is computed from this rank's data only and is not reduced over the data-parallel "
                "ranks. Call the module; or do not shard it separately, so that the unit of its parent owns the "
                "parameter; or shard it together with a module that runs earlier (fully_shard([norm, head]))",
                stacklevel=4,
            )


def _has_peers(parameter: ShardedParameter) -> bool:
    mesh = parameter.placement.mesh
    return mesh.world_size * mesh.replicas > 1


def _read_with_data(nodes: Iterable[Any]) -> list[ShardedParameter]:
    """Return the sharded parameters whose gradients depend on data, in the graph behind ``nodes``."""
    nodes = list(nodes)
    if not _reads_sharded(nodes):  # as nearly always; what follows is several times the work
        return []
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
        data = not children or any(below[child].data for child in children if child in below) or _takes_data(node)
        below[node] = _Below(read, data)
        if read and data and not _is_linear(node.name(), len(children)):
            found |= read
    return [parameters[key] for key in parameters if key in found]


def _reads_sharded(nodes: Iterable[Any]) -> bool:
    """True if a leaf of the graph behind ``nodes`` is a sharded parameter."""
    seen = set(nodes)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if type(node) is _Leaf:
            managed = managed_by(node.variable)
            if managed is not None and managed.sharded is node.variable:
                return True
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return False


def _takes_data(node: Any) -> bool:
    """True if a product has a factor without gradient: an input, or an activation of a frozen layer."""
    name: str = node.name()
    if name.startswith("Embedding"):
        return True
    return name.startswith(("Mm", "Addmm", "Bmm")) and None in [child for child, _ in node.next_functions[-2:]]


def _is_linear(name: str, inputs: int) -> bool:
    return name.startswith(_LINEAR) or (inputs == 1 and name.startswith(_LINEAR_IN_ONE))
