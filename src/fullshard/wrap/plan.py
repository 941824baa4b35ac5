"""The wrap plan: the modules that become units, the parameters of each unit, and one pass that wraps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.engine.ownership import all_modules
from fullshard.errors import FullshardError
from fullshard.wrap.report import table
from fullshard.wrap.tree import ModuleTree, PlannedParameter
from fullshard.wrap.units import PlannedUnit

__all__ = ["ShardingPlan", "WrapFunction", "WrapPlan", "WrapTargets"]

WrapFunction = Callable[[Any, dict[str, Any], frozenset[nn.Parameter]], Any]
WrapTargets = Mapping[Any, dict[str, Any]]  # arguments by module, or by tuple of modules that become one unit


class ShardingPlan(ABC):
    """All that there is to say about how a model is sharded, such as a plan of ``fullshard.plan``."""

    @abstractmethod
    def shard(self, model: nn.Module) -> Any:
        """Shard a model in place, over the ranks of the default process group, and return it."""


@dataclass(frozen=True, eq=False)
class WrapPlan:
    """The modules below ``root`` that a policy wraps. Print it to inspect the units.

    ``fullshard.wrap.plan_for`` creates it. It describes the model at that time: make a new plan after changes.

    Args:
        root: The model. It becomes a unit too, but its caller wraps it, not the plan.
        units: Units of the modules to wrap, children before parents, and last the root's.
        reason: Why these units, as text; empty if the policy does not say.
    """

    root: nn.Module = field(repr=False)
    units: tuple[PlannedUnit, ...]
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
        chosen = {**_chosen(tree, targets), (tree.root,): dict(root_kwargs)}
        return cls(tree.root, _units(tree, chosen), reason)

    @property
    def entries(self) -> tuple[PlannedUnit, ...]:
        """Units of the modules to wrap, without the root's."""
        return self.units[:-1]

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
        left_out = [entry.left_out for entry in self.entries]  # before modules change in place
        for entry, parameters in zip(self.entries, left_out, strict=True):
            module, *others = entry.modules
            if others:
                wrap(list(entry.modules), dict(entry.kwargs), parameters)
                continue
            new = wrap(module, dict(entry.kwargs), parameters)
            if not isinstance(new, nn.Module):
                raise TypeError(
                    f"wrap plan: expected a module in place of {entry.name!r}, found a {type(new).__name__}"
                )
            for holder, name in places[module] if new is not module else ():
                holder._modules[name] = new  # not by setattr, which containers and compiled modules override


def _chosen(tree: ModuleTree, targets: WrapTargets) -> dict[tuple[nn.Module, ...], dict[str, Any]]:
    """Return modules and arguments of each unit, each after all modules below: a unit of several after the last one."""
    place = {module: index for index, module in enumerate(tree.modules)}
    chosen: dict[tuple[nn.Module, ...], dict[str, Any]] = {}
    seen: set[nn.Module] = set()
    for target, kwargs in targets.items():
        members = tuple(filter(tree.wrappable, target if isinstance(target, tuple) else (target,)))
        for module in members:
            if module in seen:
                raise ValueError(f"wrap plan: expected each module in one unit, found {tree.name(module)!r} in two")
            seen.add(module)
        if members:
            chosen[members] = kwargs
    return dict(sorted(chosen.items(), key=lambda unit: max(place[module] for module in unit[0])))


def _places(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return for each module all (parent, attribute) where it is registered."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for holder in all_modules(root):
        for name, child in holder._modules.items():
            if child is not None:
                places.setdefault(child, []).append((holder, name))
    return places


def _units(tree: ModuleTree, chosen: Mapping[tuple[nn.Module, ...], dict[str, Any]]) -> tuple[PlannedUnit, ...]:
    unit_of = {module: modules for modules in chosen for module in modules}
    owned: dict[tuple[nn.Module, ...], list[PlannedParameter]] = {modules: [] for modules in chosen}
    for parameter in tree.parameters:
        owned[_owner(parameter, unit_of)].append(parameter)
    shared = [
        (owner, parameter)
        for owner, parameters in owned.items()
        for parameter in parameters
        if len(parameter.names) > 1 and not parameter.ignored
    ]
    units = []
    for modules, kwargs in chosen.items():
        below = {module for top in modules for module in top.modules()} if shared else set()
        held = {id(p) for module in below for p in module._parameters.values()}
        elsewhere = tuple(
            parameter
            for owner, parameter in shared
            if owner is not modules and owner[0] not in below and id(parameter.reference()) in held
        )
        name = "" if modules == (tree.root,) else " + ".join(map(tree.name, modules))
        sharded = tuple(parameter for parameter in owned[modules] if not parameter.ignored)
        units.append(PlannedUnit(name, modules, kwargs, sharded, elsewhere, len(owned[modules]) - len(sharded)))
    return tuple(units)


def _owner(found: PlannedParameter, unit_of: Mapping[nn.Module, tuple[nn.Module, ...]]) -> tuple[nn.Module, ...]:
    """Return the modules of the lowest unit with a module on every path to the parameter."""
    first, *others = ({unit_of[module]: None for module in chain if module in unit_of} for chain in found.chains)
    return next(modules for modules in reversed(first) if all(modules in other for other in others))
