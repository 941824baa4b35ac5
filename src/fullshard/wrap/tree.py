"""The module tree for policies and plans: order, names, and the modules on every path to a parameter.

[Note: Owner of a shared parameter]
Modules may be registered in several places and parameters tied, so the "tree" is a graph. The owner of a parameter is
the lowest unit that *every* path from the root to *every* module with the parameter goes through. Only such a unit is
certain to be unsharded whenever the parameter is used. (A unit whose subtree merely contains all these modules is not:
two units may both contain a shared module.) Modules that every path to a module goes through are its dominators; they
are found in one pass, without enumerating paths.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import nn

from fullshard.engine.ownership import all_modules, unit_of

__all__ = ["ModuleTree", "PlannedParameter", "check_all", "has_forward"]

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, slots=True)
class PlannedParameter:
    """A parameter as it was when the plan was made, and its location.

    Args:
        names: All its FQNs below the root, that of ``named_parameters()`` first.
        shape: Its shape; of a DTensor, that of this rank's part.
        numel: Number of elements.
        dtype: Dtype of the parameter.
        requires_grad: False if the parameter is frozen.
        ignored: True if it is not to be sharded.
        reference: Weak reference to the parameter, because a plan may outlive the unsharded parameters.
        chains: For each module that has it, the modules that every path from the root to that module goes through, the
            root first.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    requires_grad: bool
    ignored: bool
    reference: weakref.ref[nn.Parameter] = field(repr=False)
    chains: tuple[tuple[nn.Module, ...], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """First FQN."""
        return self.names[0]

    @property
    def above(self) -> tuple[nn.Module, ...]:
        """Modules that every path to it goes through, the root first. See [Note: Owner of a shared parameter]."""
        return _common(list(self.chains))

    def bytes_of_rank(self, ranks: int) -> int:
        """Return the bytes of the largest shard, if the rows are sharded over ``ranks`` ranks.

        Args:
            ranks: Number of ranks of the shard axis.

        Returns:
            The bytes of the first rank's shard, in the parameter's dtype.
        """
        rows = -(-self.shape[0] // ranks) if self.shape else 1
        return rows * math.prod(self.shape[1:]) * self.dtype.itemsize


class ModuleTree:
    """The modules and parameters below ``root``, each once.

    Args:
        root: Root of the tree.
        ignored_modules: Modules that are ignored with all their children and parameters. May be outside of the tree.
        ignored_params: Parameters that are ignored as well.
        sharded: Modules that are sharded already, and all below them, are in the tree as well.

    Raises:
        TypeError: If an argument has the wrong type.
    """

    root: nn.Module
    modules: tuple[nn.Module, ...]  # children before parents, so the root is last
    parameters: tuple[PlannedParameter, ...]  # in the order of named_parameters()
    _names: dict[nn.Module, list[str]]
    _ignored: set[nn.Module]
    _closed: set[nn.Module]
    _children: dict[nn.Module, list[tuple[str, nn.Module]]]  # in the tree, in order of registration

    def __init__(
        self,
        root: nn.Module,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
        sharded: bool = False,
    ) -> None:
        check_all("root", [root], nn.Module)
        self.root = root
        self._ignored = {
            below for module in check_all("ignored_modules", ignored_modules, nn.Module) for below in module.modules()
        }
        ignored = set(check_all("ignored_params", ignored_params, nn.Parameter))
        ignored |= {p for module in self._ignored for p in module._parameters.values() if p is not None}
        below_root = () if sharded else all_modules(root)
        tops = [module for module in below_root if module is not root and unit_of(module) is not None]
        self._closed = {below for module in tops for below in all_modules(module)} - {root}
        self._children, self._names = {}, {}
        self.modules = tuple(self._post_order(root))
        for name, module in self._paths("", root, frozenset()):
            self._names.setdefault(module, []).append(name)
        self.parameters = tuple(self._all_parameters(ignored))

    def wrappable(self, module: nn.Module) -> bool:
        """Return True if a policy may select ``module``: in the tree, not its root, not ignored."""
        return module in self._names and module is not self.root and module not in self._ignored

    def children(self, module: nn.Module) -> Iterator[nn.Module]:
        """Iterate over the children in the tree, in order of registration; twice if registered twice."""
        return (child for _, child in self._children[module])

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield names and modules in the order of ``named_modules()``."""
        return ((names[0], module) for module, names in self._names.items())

    def name(self, module: nn.Module) -> str:
        """Return the name below the root, as in ``named_modules()``."""
        return self._names[module][0]

    def inside(self, module: nn.Module) -> list[PlannedParameter]:
        """Return the parameters that are used only through ``module``, without ignored ones."""
        return self._inside[module]

    def numel(self, module: nn.Module) -> int:
        """Return the number of elements of the parameters that are used only through ``module``."""
        return sum(parameter.numel for parameter in self._inside[module])

    @cached_property
    def _inside(self) -> dict[nn.Module, list[PlannedParameter]]:
        inside: dict[nn.Module, list[PlannedParameter]] = {module: [] for module in self.modules}
        for parameter in self.parameters:
            for module in () if parameter.ignored else parameter.above:
                inside[module].append(parameter)
        return inside

    def _post_order(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules at and below one, children first, and note their children."""
        closed = self._closed
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        self._children[module] = [(name, child) for name, child in children if child not in closed]
        for _, child in self._children[module]:
            if child not in self._children:
                yield from self._post_order(child)
        yield module

    def _paths(self, name: str, module: nn.Module, above: frozenset[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Yield every name of every module at and below one, in the order of ``named_modules()``."""
        yield name, module
        above |= {module}
        for key, child in self._children[module]:
            if child not in above:  # a module may contain one of its ancestors
                yield from self._paths(_join(name, key), child, above)

    def _all_parameters(self, ignored: set[nn.Parameter]) -> Iterator[PlannedParameter]:
        holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._names:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    holders.setdefault(parameter, []).append((module, key))
        dominators = self._dominators()
        for parameter, locations in holders.items():
            names = tuple(_join(name, key) for module, key in locations for name in self._names[module])
            yield PlannedParameter(
                names=names,
                shape=tuple(getattr(parameter, "_local_tensor", parameter).shape),
                numel=parameter.numel(),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
                ignored=parameter in ignored,
                reference=weakref.ref(parameter),
                chains=tuple(dominators[module] for module, _ in locations),
            )

    def _dominators(self) -> dict[nn.Module, tuple[nn.Module, ...]]:
        """Return for each module the modules that every path to it goes through, from the root to itself."""
        parents: dict[nn.Module, list[nn.Module]] = {}
        for module in self.modules:
            for child in self.children(module):
                parents.setdefault(child, []).append(module)
        found: dict[nn.Module, tuple[nn.Module, ...]] = {self.root: (self.root,)}
        changed = True
        while changed:
            changed = False
            for module in reversed(self.modules[:-1]):  # parents before children
                known = [found[parent] for parent in parents[module] if parent in found]
                new = (*_common(known), module)
                # One pass is enough, unless a module contains one of its ancestors.
                changed |= len(known) < len(parents[module]) or (module in found and found[module] != new)
                found[module] = new
        return found


def has_forward(module: nn.Module) -> bool:
    """Return True if ``module`` has a forward, which lists of modules and of parameters do not have."""
    # torch.compile, and programs that patch models, set a forward on the instance.
    without = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    return "forward" in module.__dict__ or type(module).forward not in without


def _common(chains: list[tuple[nn.Module, ...]]) -> tuple[nn.Module, ...]:
    first, *others = chains
    if not others:
        return first
    return tuple(module for module in first if all(module in other for other in others))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def check_all(argument: str, values: Iterable[_T], *expected: type) -> list[_T]:
    """Return ``values`` as a list.

    Raises:
        TypeError: If it is no iterable, or contains something of none of the ``expected`` types.
    """
    names = " or ".join(kind.__name__ for kind in expected)
    if isinstance(values, torch.Tensor) or not isinstance(values, Iterable):
        raise TypeError(f"{argument}: expected an iterable of {names}, found a {type(values).__name__}")
    found = list(values)
    for value in found:
        if not isinstance(value, expected):
            raise TypeError(f"{argument}: expected {names}, found a {type(value).__name__}: {value!r:.100}")
    return found
