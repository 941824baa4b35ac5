"""The wrap plan: the modules that become units, the parameters of each unit, and one pass that wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.engine.ownership import all_modules
from fullshard.errors import FullshardError
from fullshard.wrap.report import table
from fullshard.wrap.tree import ModuleTree
from fullshard.wrap.units import PlannedParameter, PlannedUnit

__all__ = ["WrapEntry", "WrapFunction", "WrapPlan"]

WrapFunction = Callable[[nn.Module, dict[str, Any], frozenset[nn.Parameter]], nn.Module]


@dataclass(frozen=True, eq=False)
class WrapEntry:
    """One module to wrap.

    Args:
        name: Name below the plan's root, as in ``named_modules()``.
        module: The module.
        kwargs: Arguments of the front end for this module.
    """

    name: str
    module: nn.Module = field(repr=False)
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class WrapPlan:
    """The modules below ``root`` that a policy wraps. Print it to inspect the units.

    ``fullshard.wrap.plan_for`` creates it. It describes the model at that time: make a new plan after changes.

    Args:
        root: The model. It becomes a unit too, but its caller wraps it, not the plan.
        entries: Modules to wrap, children before parents, each once.
        units: Unit of each entry, in the same order, and last the root's.
    """

    root: nn.Module = field(repr=False)
    entries: tuple[WrapEntry, ...]
    units: tuple[PlannedUnit, ...] = field(repr=False)

    @classmethod
    def of(
        cls, tree: ModuleTree, targets: Mapping[nn.Module, dict[str, Any]], root_kwargs: Mapping[str, Any]
    ) -> WrapPlan:
        """Return a plan that wraps ``targets``.

        The root, ignored modules and modules that are already sharded are left out.

        Args:
            tree: Modules and parameters of the model.
            targets: Keyword arguments by module of the tree.
            root_kwargs: Arguments of the root.

        Returns:
            The plan.
        """
        entries = tuple(
            WrapEntry(tree.name(module), module, targets[module])
            for module in tree.modules
            if module in targets and tree.wrappable(module)
        )
        return cls(tree.root, entries, _units(tree, (*entries, WrapEntry("", tree.root, dict(root_kwargs)))))

    @property
    def modules(self) -> dict[nn.Module, dict[str, Any]]:
        """Modules to wrap with their arguments, children before parents."""
        return {entry.module: entry.kwargs for entry in self.entries}

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

    def explain(self) -> str:
        """Return a table of the units as text: class, elements, unsharded bytes, and notes.

        Returns:
            The table; ``str(plan)`` is the same.
        """
        return table(self.units)

    __str__ = explain

    def apply(self, wrap: WrapFunction) -> None:
        """Wrap every entry, children before parents.

        If a call raises, all modules are restored. Changes to modules in place are not undone.

        Args:
            wrap: Called with a module, its keyword arguments and the parameters that it must leave out. The result
                replaces the module wherever it is registered below the root; it may be the module itself, changed in
                place.

        Raises:
            FullshardError: If a module of the plan is no longer below the root.
            TypeError: If ``wrap`` returns something that is not a module.
        """
        places = _places(self.root)
        for entry in self.entries:
            if entry.module not in places:
                raise FullshardError(
                    f"wrap plan: {entry.name!r} ({type(entry.module).__name__}) is no longer a submodule of the root: "
                    "the model has changed since the plan was made; make a new plan"
                )
        owned_by_ancestor = [
            frozenset(_owned_by_ancestor(unit)) for unit in self.units[:-1]
        ]  # before modules change in place
        replaced: list[WrapEntry] = []
        try:
            for entry, left_out in zip(self.entries, owned_by_ancestor, strict=True):
                new = wrap(entry.module, dict(entry.kwargs), left_out)
                if not isinstance(new, nn.Module):
                    raise TypeError(
                        f"wrap plan: expected a module in place of {entry.name!r}, found a {type(new).__name__}"
                    )
                if new is not entry.module:
                    replaced.append(entry)
                    _put(places[entry.module], new)
        except BaseException:
            for entry in replaced:
                _put(places[entry.module], entry.module)
            raise


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


def _put(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    # Not by setattr, which containers and compiled modules override.
    for holder, name in places:
        holder._modules[name] = module


def _units(tree: ModuleTree, entries: tuple[WrapEntry, ...]) -> tuple[PlannedUnit, ...]:
    modules = {entry.module for entry in entries}
    held: dict[nn.Module, list[PlannedParameter]] = {module: [] for module in modules}
    ignored = dict.fromkeys(modules, 0)
    shared = []  # (parameter, record, owner) that descendants of the owner may have to leave out
    for found in tree.parameters:
        owner = next(module for module in reversed(found.above) if module in modules)
        if found.ignored:
            ignored[owner] += 1
            continue
        record = PlannedParameter.of(found)
        held[owner].append(record)
        if len(record.names) > 1:
            shared.append((found.parameter, record, owner))
    units = []
    for entry in entries:
        below = set(entry.module.modules()) if shared else set()
        within = {id(p) for module in below for p in module._parameters.values()}
        owned_by_ancestor = [
            record for parameter, record, owner in shared if id(parameter) in within and owner not in below
        ]
        units.append(
            PlannedUnit(
                entry.name,
                type(entry.module).__name__,
                entry.kwargs,
                tuple(held[entry.module]),
                tuple(owned_by_ancestor),
                ignored[entry.module],
            )
        )
    return tuple(units)
