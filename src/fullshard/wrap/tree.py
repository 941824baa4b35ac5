"""A module tree as policies and plans see it: order, names, and what lies on every path to a parameter.

[Note: Who holds a shared parameter]
Modules may be registered in several places and parameters tied, so a "tree" is a graph, and "the lowest common
ancestor" of a parameter's holders is asked of that graph: it is the lowest unit that *every* path from the root to
*every* holder goes through. Only such a unit is sure to be gathered whenever the parameter is used. (A unit whose
subtree merely contains all holders is not: two units may both contain a shared module.) Modules that every path to a
module goes through are its dominators; they are found in one pass, without listing paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

__all__ = ["ModuleTree", "TreeParameter"]

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class TreeParameter:
    """A parameter and where it is.

    Args:
        parameter: The parameter itself.
        names: All its FQNs below the root, that of ``named_parameters()`` first.
        above: The modules that every path from the root to it goes through, the root first.
            See [Note: Who holds a shared parameter].
        ignored: Whether nobody is to shard it.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    above: tuple[nn.Module, ...]
    ignored: bool


class ModuleTree:
    """The modules and parameters below ``root``, each once.

    Args:
        root: The module to look into.
        ignored_modules: These and all below them are ignored, with all their parameters. May lie elsewhere.
        ignored_params: These are ignored as well.
        sharded: Whether a front end has wrapped or sharded a module already. Such modules (never ``root``), and what
            is below them, are not part of the tree, except that they still stand where they are. None: no module is.

    Raises:
        TypeError: If an argument has the wrong type.
    """

    root: nn.Module
    modules: tuple[nn.Module, ...]  # children before parents, so the root is last
    parameters: tuple[TreeParameter, ...]  # in the order of named_parameters()
    _names: dict[nn.Module, list[str]]
    _ignored: set[nn.Module]
    _closed: set[nn.Module]
    _inside: dict[nn.Module, list[TreeParameter]]

    def __init__(
        self,
        root: nn.Module,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
        sharded: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        _check_all("root", [root], nn.Module)
        self.root = root
        self._ignored = {
            below for module in _check_all("ignored_modules", ignored_modules, nn.Module) for below in module.modules()
        }
        ignored = set(_check_all("ignored_params", ignored_params, nn.Parameter))
        ignored |= {p for module in self._ignored for p in module._parameters.values() if p is not None}
        self._closed = set() if sharded is None else _closed(root, sharded)
        self.modules = tuple(self._post_order())
        self._names = self._all_names()
        self.parameters = tuple(self._all_parameters(ignored))
        self._inside = {module: [] for module in self.modules}
        for parameter in self.parameters:
            for module in () if parameter.ignored else parameter.above:
                self._inside[module].append(parameter)

    def wrappable(self, module: nn.Module) -> bool:
        """Whether a policy may choose ``module``: in the tree, not its root, not ignored."""
        return module in self._names and module is not self.root and module not in self._ignored

    def children(self, module: nn.Module) -> Iterator[nn.Module]:
        """Its children that belong to the tree, in order of registration. Twice if registered twice."""
        for _, child in self._named_children(module):
            yield child

    def name(self, module: nn.Module) -> str:
        """Its name below the root, as ``named_modules()`` has it."""
        return self._names[module][0]

    def inside(self, module: nn.Module) -> list[TreeParameter]:
        """The parameters that are used through ``module`` only, without ignored ones."""
        return self._inside[module]

    def _named_children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module._modules.items():
            if child is not None and child not in self._closed:
                yield name, child

    def _post_order(self) -> list[nn.Module]:
        # Loops with stacks, here and below: a nested function that calls itself is a reference cycle that keeps the
        # module alive.
        found: list[nn.Module] = []
        seen = {self.root}
        stack = [(self.root, self.children(self.root))]
        while stack:
            module, children = stack[-1]
            child = next((child for child in children if child not in seen), None)
            if child is None:
                found.append(module)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, self.children(child)))
        return found

    def _all_names(self) -> dict[nn.Module, list[str]]:
        """Every name of every module, modules in the order of ``modules()``."""
        names: dict[nn.Module, list[str]] = {}
        start: tuple[str, nn.Module, frozenset[nn.Module]] = ("", self.root, frozenset())
        stack = [start]
        while stack:
            name, module, above = stack.pop()
            names.setdefault(module, []).append(name)
            above |= {module}
            stack += [
                (_join(name, key), child, above)
                for key, child in reversed([*self._named_children(module)])
                if child not in above  # a module may hold a module above it
            ]
        return names

    def _all_parameters(self, ignored: set[nn.Parameter]) -> Iterator[TreeParameter]:
        holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._names:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    holders.setdefault(parameter, []).append((module, key))
        dominators = self._dominators()
        for parameter, places in holders.items():
            names = tuple(_join(name, key) for module, key in places for name in self._names[module])
            above = _common([dominators[module] for module, _ in places])
            yield TreeParameter(parameter, names, above, parameter in ignored)

    def _dominators(self) -> dict[nn.Module, tuple[nn.Module, ...]]:
        """Per module those that every path to it goes through, from the root to itself."""
        parents: dict[nn.Module, list[nn.Module]] = {}
        for module in self.modules:
            for child in self.children(module):
                parents.setdefault(child, []).append(module)
        found: dict[nn.Module, tuple[nn.Module, ...]] = {self.root: (self.root,)}
        changed = True
        while changed:  # the second pass changes nothing, unless a module holds a module above it
            changed = False
            for module in reversed(self.modules[:-1]):  # parents before children
                new = (*_common([found[parent] for parent in parents[module] if parent in found]), module)
                changed |= found.get(module) != new
                found[module] = new
        return found


def _common(chains: list[tuple[nn.Module, ...]]) -> tuple[nn.Module, ...]:
    first, *others = chains
    return tuple(module for module in first if all(module in other for other in others))


def _closed(root: nn.Module, sharded: Callable[[nn.Module], bool]) -> set[nn.Module]:
    tops = [module for module in root.modules() if module is not root and sharded(module)]
    return {below for module in tops for below in module.modules()} - {root}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _check_all(argument: str, values: Iterable[_T], expected: type[_T]) -> list[_T]:
    if isinstance(values, torch.Tensor) or not isinstance(values, Iterable):
        raise TypeError(f"{argument}: expected an iterable of {expected.__name__}, found a {type(values).__name__}")
    found = list(values)
    for value in found:
        if not isinstance(value, expected):
            raise TypeError(f"{argument}: expected {expected.__name__}, found a {type(value).__name__}: {value!r:.100}")
    return found
