"""The wrap plan: which modules become units, what each unit holds, and one pass that wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.errors import FullshardError
from fullshard.wrap.report import table
from fullshard.wrap.tree import ModuleTree
from fullshard.wrap.units import PlannedParameter, PlannedUnit

__all__ = ["WrapEntry", "WrapFunction", "WrapPlan"]

WrapFunction = Callable[[nn.Module, dict[str, Any], frozenset[nn.Parameter]], nn.Module]


@dataclass(frozen=True, eq=False)
class WrapEntry:
    """A module to wrap.

    Args:
        name: Its name below the plan's root, as ``named_modules()`` has it.
        module: The module.
        kwargs: What the front end is called with, for this module.
    """

    name: str
    module: nn.Module = field(repr=False)
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class WrapPlan:
    """Which modules below ``root`` a policy wraps. Print it to see what would come of that.

    Made by :func:`fullshard.wrap.plan_for`. It describes the model as it was then: make a new one after changes.

    Args:
        root: The model. It becomes a unit too, but not by the plan: its caller wraps it.
        entries: The modules to wrap, children before parents, each once.
        units: What each entry will hold, in the same order, and last what the root will.
    """

    root: nn.Module = field(repr=False)
    entries: tuple[WrapEntry, ...]
    units: tuple[PlannedUnit, ...] = field(repr=False)

    @classmethod
    def of(
        cls, tree: ModuleTree, targets: Mapping[nn.Module, dict[str, Any]], root_kwargs: Mapping[str, Any]
    ) -> WrapPlan:
        """The plan that wraps ``targets``, a mapping from modules of ``tree`` to keyword arguments.

        The root, ignored modules and modules that a front end has already are left out.
        """
        entries = tuple(
            WrapEntry(tree.name(module), module, targets[module])
            for module in tree.modules
            if module in targets and tree.wrappable(module)
        )
        return cls(tree.root, entries, _units(tree, (*entries, WrapEntry("", tree.root, dict(root_kwargs)))))

    @property
    def modules(self) -> dict[nn.Module, dict[str, Any]]:
        """The modules to wrap and what each is wrapped with, children before parents."""
        return {entry.module: entry.kwargs for entry in self.entries}

    def owners(self) -> dict[str, list[tuple[str, ...]]]:
        """Per unit ("" is the root) the parameters it will hold: each by all its names.

        Ignored parameters, and those of modules that a front end has already, are nobody's.
        """
        return {unit.name: [parameter.names for parameter in unit.parameters] for unit in self.units}

    def lifted(self, entry: WrapEntry) -> set[nn.Parameter]:
        """The parameters in ``entry.module`` that it must leave out, because a unit above holds them.

        They are used outside of the module as well. See [Note: Who holds a shared parameter].
        """
        return set(_lifted(self.units[self.entries.index(entry)]))

    def mixed_frozen(self) -> dict[str, list[str]]:
        """Units ("" is the root) with frozen parameters beside trainable ones, and the names of the frozen ones."""
        return {
            unit.name: [parameter.name for parameter in unit.frozen]
            for unit in self.units
            if 0 < len(unit.frozen) < len(unit.parameters)
        }

    def explain(self) -> str:
        """A table of the units: class, elements, bytes to gather, and what is worth knowing about each."""
        return table(self.units)

    __str__ = explain

    def apply(self, wrap: WrapFunction) -> None:
        """Wrap every entry, children before parents.

        Args:
            wrap: Called with a module, the keyword arguments for it and the parameters it must leave out. What it
                returns takes the module's place wherever that is registered below the root; returning the module
                itself (after changing it in place) leaves it there.

        Raises:
            FullshardError: If a module of the plan is not below the root any more.
            TypeError: If ``wrap`` returns something that is not a module.

        If a call raises, all modules are put back where they were. What calls did to modules in place is not undone.
        """
        places = _places(self.root)
        for entry in self.entries:
            if entry.module not in places:
                raise FullshardError(
                    f"wrap plan: expected {entry.name!r} ({type(entry.module).__name__}) below the root, as when the "
                    "plan was made; it is not there any more: make a new plan"
                )
        lifted = [frozenset(_lifted(unit)) for unit in self.units[:-1]]  # before anything is changed in place
        replaced: list[WrapEntry] = []
        try:
            for entry, left_out in zip(self.entries, lifted, strict=True):
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


def _lifted(unit: PlannedUnit) -> Iterator[nn.Parameter]:
    found = (parameter.reference() for parameter in unit.lifted)
    return (parameter for parameter in found if parameter is not None)


def _places(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Per module all (holder, attribute) where it is registered."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for holder in root.modules():
        for name, child in holder._modules.items():
            if child is not None:
                places.setdefault(child, []).append((holder, name))
    return places


def _put(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    # Not by setattr: classes that define their own (containers, compiled modules) may do something else with it.
    for holder, name in places:
        holder._modules[name] = module


def _units(tree: ModuleTree, entries: tuple[WrapEntry, ...]) -> tuple[PlannedUnit, ...]:
    modules = {entry.module for entry in entries}
    held: dict[nn.Module, list[PlannedParameter]] = {module: [] for module in modules}
    ignored = dict.fromkeys(modules, 0)
    shared = []  # (record, its owner) of what may have to be left out below that
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
        lifted = [record for parameter, record, owner in shared if id(parameter) in within and owner not in below]
        units.append(
            PlannedUnit(
                entry.name,
                type(entry.module).__name__,
                entry.kwargs,
                tuple(held[entry.module]),
                tuple(lifted),
                ignored[entry.module],
            )
        )
    return tuple(units)
