"""The wrap plan: the modules that become units, the parameters of each unit, and one pass that wraps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.engine.ownership import all_modules
from fullshard.errors import FullshardError
from fullshard.wrap.report import table
from fullshard.wrap.tree import ModuleTree, TreeParameter
from fullshard.wrap.units import PlannedParameter, PlannedUnit

__all__ = ["ShardingPlan", "WrapEntry", "WrapFunction", "WrapPlan", "WrapTargets"]

WrapFunction = Callable[[Any, dict[str, Any], frozenset[nn.Parameter]], Any]
WrapTargets = Mapping[Any, dict[str, Any]]  # arguments by module, or by tuple of modules that become one unit


class ShardingPlan(ABC):
    """All that there is to say about how a model is sharded, such as a plan of ``fullshard.plan``."""

    @abstractmethod
    def shard(self, model: nn.Module) -> Any:
        """Shard a model in place, over the ranks of the default process group, and return it."""


@dataclass(frozen=True, eq=False)
class WrapEntry:
    """One module to wrap, or several that become one unit.

    Args:
        name: Name below the plan's root, as in ``named_modules()``; of several modules, joined by ``" + "``.
        module: The module.
        kwargs: Arguments of the front end for this module.
        others: Further modules of the same unit.
    """

    name: str
    module: nn.Module = field(repr=False)
    kwargs: dict[str, Any]
    others: tuple[nn.Module, ...] = field(default=(), repr=False)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules of the unit."""
        return (self.module, *self.others)

    @property
    def target(self) -> Any:
        """The module, or a tuple of several."""
        return self.modules if self.others else self.module


@dataclass(frozen=True, eq=False)
class WrapPlan:
    """The modules below ``root`` that a policy wraps. Print it to inspect the units.

    ``fullshard.wrap.plan_for`` creates it. It describes the model at that time: make a new plan after changes.

    Args:
        root: The model. It becomes a unit too, but its caller wraps it, not the plan.
        entries: Modules to wrap, children before parents, each once.
        units: Unit of each entry, in the same order, and last the root's.
        reason: Why these units, as text; empty if the policy does not say.
    """

    root: nn.Module = field(repr=False)
    entries: tuple[WrapEntry, ...]
    units: tuple[PlannedUnit, ...] = field(repr=False)
    reason: str = ""

    @classmethod
    def of(cls, tree: ModuleTree, targets: WrapTargets, root_kwargs: Mapping[str, Any], reason: str = "") -> WrapPlan:
        """Return a plan that wraps ``targets``.

        The root, ignored modules and modules that are already sharded are left out.

        Args:
            tree: Modules and parameters of the model.
            targets: Keyword arguments by module of the tree, or by tuple of modules that become one unit.
            root_kwargs: Arguments of the root.
            reason: Why these units.

        Returns:
            The plan.
        """
        entries = _entries(tree, targets)
        root = WrapEntry("", tree.root, dict(root_kwargs))
        return cls(tree.root, entries, _units(tree, (*entries, root)), reason)

    @property
    def modules(self) -> dict[Any, dict[str, Any]]:
        """Modules to wrap, or tuples of modules that become one unit, with their arguments, children before parents.

        Change it and pass it as a policy to change the units.
        """
        return {entry.target: entry.kwargs for entry in self.entries}

    def owners(self) -> dict[str, list[tuple[str, ...]]]:
        """Return the parameters of each unit, each by all its names.

        Ignored parameters, and those of modules that are already sharded, are left out.

        Returns:
            Lists of tuples of FQNs, by the name of the unit; ``""`` is the root.
        """
        return {unit.name: [parameter.names for parameter in unit.parameters] for unit in self.units}

    def owned_by_ancestor(self, entry: WrapEntry) -> set[nn.Parameter]:
        """Return the parameters in ``entry.module`` that it must leave out, because an ancestor unit owns them.

        They are also used outside of the module. See [Note: Owner of a shared parameter].

        Args:
            entry: An entry of this plan.

        Returns:
            Parameters that are still alive.
        """
        return set(_owned_by_ancestor(self.units[self.entries.index(entry)]))

    def mixed_frozen(self) -> dict[str, list[str]]:
        """Return the units with both frozen and trainable parameters.

        Returns:
            Names of the frozen parameters, by the name of the unit; ``""`` is the root.
        """
        return {
            unit.name: [parameter.name for parameter in unit.frozen]
            for unit in self.units
            if 0 < len(unit.frozen) < len(unit.parameters)
        }

    def explain(self, ranks: int | None = None) -> str:
        """Return a table of the units as text: class, elements, unsharded bytes, and notes.

        Args:
            ranks: Number of ranks of the shard axis, for a column with the bytes of the parameters on the first one,
                sharded on dim 0. None: no such column.

        Returns:
            The table, and the reason for the units. ``str(plan)`` is the same, without ``ranks``.
        """
        return table(self.units, ranks) + (f"\n{self.reason}" if self.reason else "")

    def __str__(self) -> str:
        return self.explain()

    def apply(self, wrap: WrapFunction) -> None:
        """Wrap every entry, children before parents.

        A call that raises ends it; what was wrapped before stays wrapped.

        Args:
            wrap: Called with a module, its keyword arguments and the parameters that it must leave out. The result
                replaces the module wherever it is registered below the root; it may be the module itself, changed in
                place. For a unit of several modules: called with the list of them, which it changes in place.

        Raises:
            FullshardError: If a module of the plan is no longer below the root.
            TypeError: If ``wrap`` returns something that is not a module.
        """
        places = _places(self.root)
        for entry in self.entries:
            gone = next((module for module in entry.modules if module not in places), None)
            if gone is not None:
                raise FullshardError(
                    f"wrap plan: {entry.name!r} ({type(gone).__name__}) is no longer a submodule of the root: "
                    "the model has changed since the plan was made; make a new plan"
                )
        owned_by_ancestor = [
            frozenset(_owned_by_ancestor(unit)) for unit in self.units[:-1]
        ]  # before modules change in place
        for entry, left_out in zip(self.entries, owned_by_ancestor, strict=True):
            if entry.others:
                wrap(list(entry.modules), dict(entry.kwargs), left_out)
                continue
            new = wrap(entry.module, dict(entry.kwargs), left_out)
            if not isinstance(new, nn.Module):
                raise TypeError(
                    f"wrap plan: expected a module in place of {entry.name!r}, found a {type(new).__name__}"
                )
            for holder, name in places[entry.module] if new is not entry.module else ():
                holder._modules[name] = new  # not by setattr, which containers and compiled modules override


def _entries(tree: ModuleTree, targets: WrapTargets) -> tuple[WrapEntry, ...]:
    """Return the entries, each after all modules below it: a unit of several modules after the last of them."""
    place = {module: index for index, module in enumerate(tree.modules)}
    entries: dict[int, WrapEntry] = {}  # by the place of the last module
    seen: set[nn.Module] = set()
    for target, kwargs in targets.items():
        members = tuple(filter(tree.wrappable, target if isinstance(target, tuple) else (target,)))
        for module in members:
            if module in seen:
                raise ValueError(f"wrap plan: expected each module in one unit, found {tree.name(module)!r} in two")
            seen.add(module)
        if members:
            name = " + ".join(map(tree.name, members))
            entries[max(place[module] for module in members)] = WrapEntry(name, members[0], kwargs, members[1:])
    return tuple(entry for _, entry in sorted(entries.items()))


def _owned_by_ancestor(unit: PlannedUnit) -> Iterator[nn.Parameter]:
    found = (parameter.reference() for parameter in unit.owned_by_ancestor)
    return (parameter for parameter in found if parameter is not None)


def _places(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return for each module all (parent, attribute) where it is registered."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for holder in all_modules(root):
        for name, child in holder._modules.items():
            if child is not None:
                places.setdefault(child, []).append((holder, name))
    return places


def _units(tree: ModuleTree, entries: tuple[WrapEntry, ...]) -> tuple[PlannedUnit, ...]:
    entry_of = {module: entry for entry in entries for module in entry.modules}
    held: dict[WrapEntry, list[PlannedParameter]] = {entry: [] for entry in entries}
    ignored = dict.fromkeys(entries, 0)
    shared = []  # (parameter, record, owner) that descendants of the owner may have to leave out
    for found in tree.parameters:
        owner = _owner(found, entry_of)
        if found.ignored:
            ignored[owner] += 1
            continue
        record = PlannedParameter.of(found)
        held[owner].append(record)
        if len(record.names) > 1:
            shared.append((found.parameter, record, owner))
    units = []
    for entry in entries:
        below = {module for top in entry.modules for module in top.modules()} if shared else set()
        within = {id(p) for module in below for p in module._parameters.values()}
        owned_by_ancestor = [
            record
            for parameter, record, owner in shared
            if id(parameter) in within and owner is not entry and owner.module not in below
        ]
        classes = " + ".join(type(module).__name__ for module in entry.modules)
        parameters = tuple(held[entry]), tuple(owned_by_ancestor)
        units.append(PlannedUnit(entry.name, classes, entry.kwargs, *parameters, ignored[entry]))
    return tuple(units)


def _owner(found: TreeParameter, entry_of: Mapping[nn.Module, WrapEntry]) -> WrapEntry:
    """Return the lowest entry with a module on every path to the parameter."""
    first, *others = ({id(entry_of[m]): entry_of[m] for m in chain if m in entry_of} for chain in found.chains)
    return next(entry for key, entry in reversed(first.items()) if all(key in other for other in others))
