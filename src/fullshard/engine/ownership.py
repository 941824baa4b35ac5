"""Assigns parameters to units, with tied parameters.

[Note: Tied parameters]
A parameter that several modules hold is owned by one unit, the lowest one whose module contains them all. Units are
built bottom-up, so a tie may be detected only later: the first ``fully_shard`` call owns the parameter and marks it; a
call on a module that contains that unit *and* another holder becomes the owner; a call on a module that holds it but
does not contain that unit notes its own attribute as pending, for the common ancestor's call to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.engine.buckets.formats import ShardingFormat
from fullshard.engine.parameters.flat import FlatParameter
from fullshard.engine.parameters.names import clean_name, wrapped_name
from fullshard.engine.parameters.placement import ParameterPlacement
from fullshard.engine.parameters.sharded import Owner, ShardedParameter, managed_by, managed_or_unsharded
from fullshard.engine.unit import Unit, unit_owning
from fullshard.errors import TiedParameterError

__all__ = [
    "IGNORED",
    "Subtree",
    "all_modules",
    "check_owned",
    "claim_parameters",
    "holders_of",
    "holding",
    "nested_units",
    "rename",
    "set_unit",
    "superseding",
    "unit_of",
    "units_of",
]

IGNORED = "_fullshard_ignores_parameters"  # attribute of modules with parameters that sharding was told to ignore
_UNIT = "_fullshard_unit"
_HOLDING = "_fullshard_holding"  # the units that own parameters of a module, in the module's own dictionary


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of ``module`` itself; None if it is not sharded."""
    return module.__dict__.get(_UNIT)


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Attach ``unit`` to its module, and to those that hold its parameters, which may outlive a wrapper."""
    module.__dict__[_UNIT] = unit
    for holder in holders_of(unit):
        holder.__dict__[_HOLDING] = _Holding(holder.__dict__.get(_HOLDING, {}) | {id(unit): unit})


class _Holding(dict[int, Unit]):
    """Units by their ids. Copied or pickled, it becomes an empty, harmless dictionary."""

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()


def holding(module: nn.Module) -> list[Unit]:
    """Return the units that own parameters which ``module`` itself holds."""
    held: dict[int, Unit] = module.__dict__.get(_HOLDING, {})
    return [unit for unit in held.values() if any(holder is module for holder in holders_of(unit))]


def holders_of(unit: Unit) -> Iterator[nn.Module]:
    """Yield the modules that hold parameters of ``unit``, also those that no unit contains yet."""
    for parameter in unit.parameters:
        for owner in (*parameter.owners, *parameter.pending_owners):
            if (module := owner.module()) is not None:
                yield module


def nested_units(module: nn.Module) -> list[Unit]:
    """Return the units of ``module`` and all modules below, in the order of ``modules()``, each once."""
    return list({id(unit): unit for unit in map(unit_of, all_modules(module)) if unit is not None}.values())


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units that hold any parameter of ``module``: those nested in it, and then those around it.

    Of the latter, ``module`` may be all that a wrapper wraps, or a part in the middle.
    """
    found = {id(unit): unit for unit in nested_units(module)}
    for each in all_modules(module):
        for unit in holding(each):
            found.setdefault(id(unit), unit)
    return list(found.values())


def all_modules(root: nn.Module) -> list[nn.Module]:
    """Return what ``root.modules()`` yields, for a fifth of its cost."""
    found: dict[int, nn.Module] = {}
    stack = [root]
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                stack += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


@dataclass(frozen=True)
class Subtree:
    """Some modules and all below them.

    Args:
        roots: Those modules.
        managed: They, and those below that are not in another unit, with names relative to them, each once.
        nested: The first modules with units of their own on each way down.
    """

    roots: Sequence[nn.Module]
    managed: list[tuple[str, nn.Module]]
    nested: list[nn.Module]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Subtree:
        """Walk through the modules once."""
        # With a stack: a recursive nested function would be a reference cycle that keeps the module alive.
        found: dict[int, tuple[str, nn.Module]] = {}
        nested: dict[int, nn.Module] = {}
        roots = {id(module) for module in modules}
        stack = [("", module) for module in reversed(modules)]
        while stack:
            name, current = stack.pop()
            key = id(current)
            if key in found or key in nested:
                continue
            if _UNIT in current.__dict__ and key not in roots:
                nested[key] = current
                continue
            found[key] = (name, current)
            prefix = f"{name}." if name else ""
            stack += [(prefix + own, child) for own, child in reversed(current._modules.items()) if child is not None]
        return cls(modules, list(found.values()), list(nested.values()))

    @cached_property
    def in_nested_units(self) -> list[nn.Module]:
        """The modules with units of their own, and all below."""
        return [below for module in self.nested for below in all_modules(module)]


class _Holder(NamedTuple):
    fqn: str
    module: nn.Module
    name: str
    parameter: nn.Parameter


def _holders(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[_Holder]:
    """Yield the parameters that named modules hold themselves, in model order, also those that are in a flat one."""
    for path, module in modules:
        prefix = clean_name(path)
        flat = (p for unit in module.__dict__.get(_HOLDING, {}).values() for p in unit.parameters)
        hidden = {own.name: p.sharded for p in flat for own in p.owners if own.parameters is module._parameters}
        for name, held in module._parameters.items():
            parameter = hidden.get(name) if held is None else held
            if parameter is not None and not isinstance(parameter, FlatParameter):
                yield _Holder(f"{prefix}.{name}" if prefix else name, module, name, parameter)


def claim_parameters(
    subtree: Subtree,
    ignored: Iterable[nn.Parameter],
    place: Callable[[str, nn.Parameter], ParameterPlacement],
    form: ShardingFormat,
    take: Callable[[Unit, list[ShardedParameter]], None],
    owned_by_ancestor: Iterable[nn.Parameter] = (),
) -> list[ShardedParameter]:
    """Return the parameters that a unit owns, in model order, see [Note: Tied parameters].

    Args:
        subtree: The modules of the unit, and those below.
        ignored: Parameters that are not managed.
        place: Returns the placement of a parameter that no unit owns yet, by FQN and parameter.
        form: Sharding format of the unit.
        take: Removes tied parameters from the nested unit that owns them.
        owned_by_ancestor: Parameters of modules in nested units that belong to this unit.

    Raises:
        TiedParameterError: If a tied parameter is owned by a unit with another sharding format.
    """
    modules, ignored_ids = subtree.roots, set(map(id, ignored))
    inside = _tests_inside(modules)
    nested = {id(unit): unit for unit in map(unit_of, subtree.in_nested_units) if unit is not None}
    claimed: dict[int, ShardedParameter] = {}
    left_ids = {id(p) for p in owned_by_ancestor}
    everything = [named for module in modules for named in module.named_modules()] if left_ids else []
    below = (holder for holder in _holders(everything) if id(holder.parameter) in left_ids)
    for holder in (*_holders(subtree.managed), *below):
        if id(holder.parameter) in ignored_ids:
            holder.module.__dict__[IGNORED] = True
            continue
        owner = Owner.of(holder.module, holder.name)
        existing = managed_by(holder.parameter)
        if existing is None or (not existing.owned and id(existing) not in claimed):  # marked by a call that failed
            new = form.parameter(holder.parameter, owner, holder.fqn, place(holder.fqn, holder.parameter))
            claimed[id(new)] = new
            continue
        _check_form(existing, form)
        if id(existing) in claimed or (
            # Of a nested unit only: a module may contain a shared module without being on every path to it.
            id(unit_owning(existing)) in nested and all(map(inside, existing.owners))
        ):
            existing.add_owner(owner, holder.fqn)
            claimed[id(existing)] = existing
        elif not _is_owned_by_ancestor(existing, modules[0]):
            existing.pending_owners = (*existing.pending_owners, owner)
    for unit in nested.values():
        for parameter in unit.parameters:
            if parameter.pending_owners and any(map(inside, parameter.pending_owners)):
                _check_form(parameter, form)
                claimed[id(parameter)] = parameter
    _take_from_owners(claimed, inside, take)
    taken = [parameter for parameter in claimed.values() if parameter.owned]
    if taken:  # their FQNs were relative to the units that owned them
        names = _names_of(modules)
        for parameter in taken:
            _name(parameter, names)
    return list(claimed.values())


def _tests_inside(modules: Sequence[nn.Module]) -> Callable[[Owner], bool]:
    """Return a test if an owner is below one of some modules, which are enumerated at the first test."""
    below: set[int] = set()

    def inside(owner: Owner) -> bool:
        if not below:
            below.update(id(submodule) for module in modules for submodule in module.modules())
        return id(owner.module()) in below

    return inside


def _is_owned_by_ancestor(parameter: ShardedParameter, module: nn.Module) -> bool:
    """True if the unit that owns the parameter contains ``module``: then it unshards the parameter for it."""
    module = module._modules.get(wrapped_name(module) or "") or module  # a new wrapper is not in its place yet
    unit = unit_owning(parameter)
    ancestors = () if unit is None else (ref() for ref in unit.modules)
    return any(module is submodule for m in ancestors if m is not None for submodule in m.modules())


def _check_form(parameter: ShardedParameter, form: ShardingFormat) -> None:
    """Raise TiedParameterError if a tied parameter is sharded in another format."""
    if not form.accepts(parameter):
        raise TiedParameterError(
            f"{parameter.describe()} is tied between modules that are sharded in different formats, by "
            "FullyShardedDataParallel and by fully_shard, or by fully_shard with different layouts; shard both modules "
            "in the same way"
        )


def _take_from_owners(
    claimed: dict[int, ShardedParameter],
    inside: Callable[[Owner], bool],
    take: Callable[[Unit, list[ShardedParameter]], None],
) -> None:
    """Remove claimed parameters from the units that own them, and add the pending owners that are inside."""
    owners = {id(unit): unit for unit in map(unit_owning, claimed.values()) if unit is not None}
    for unit in owners.values():
        take(unit, [p for p in unit.parameters if id(p) in claimed])
    for parameter in (p for p in claimed.values() if p.pending_owners):
        for owner in filter(inside, parameter.pending_owners):
            parameter.add_owner(owner, "")
        parameter.pending_owners = tuple(owner for owner in parameter.pending_owners if not inside(owner))


def superseding(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the state of the parameter that an optimizer has to be given in place of this object, because sharding has
    replaced it or it is an unsharded one; None for all others.
    """
    managed = managed_or_unsharded(parameter)
    if managed is None or unit_owning(managed) is None or managed.optimized is parameter:
        return None
    return managed


def check_owned(units: list[Unit]) -> None:
    """Raise TiedParameterError if no unit contains all modules of a tied parameter."""
    waiting = {id(p): p for unit in units for p in unit.parameters if p.pending_owners}
    modules = [module for unit in units for ref in unit.modules if (module := ref()) is not None]
    for holder in _holders(Subtree.of(modules).managed):
        parameter = managed_by(holder.parameter)
        if parameter is not None and parameter.pending_owners:  # of a unit elsewhere
            waiting[id(parameter)] = parameter
    if waiting:
        raise TiedParameterError(
            "these parameters are tied between modules of different units: "
            + ", ".join(p.describe() for p in waiting.values())
            + "; call fully_shard on a module that contains all of them (usually the whole model) as well"
        )


def rename(roots: Sequence[nn.Module], units: list[Unit]) -> None:
    """Set the names of units and the FQNs of parameters, relative to ``roots`` (usually one)."""
    names = _names_of(roots)
    for unit in units:
        unit.name = next(names[id(ref())][0] for ref in unit.modules if id(ref()) in names)
        for parameter in unit.parameters:
            _name(parameter, names)


def _names_of(roots: Sequence[nn.Module]) -> dict[int, list[str]]:
    """Return all names of all modules, by the ids of modules."""
    names: dict[int, list[str]] = {}
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            clean, known = clean_name(name), names.get(id(module))
            if known is None:
                names[id(module)] = [clean]
            elif clean not in known:  # a wrapper and the module in it have the same
                known.append(clean)
    return names


def _name(parameter: ShardedParameter, names: dict[int, list[str]]) -> None:
    found = [
        f"{prefix}.{owner.name}" if prefix else owner.name
        for owner in parameter.owners
        for prefix in names.get(id(owner.module()), [])
    ]
    parameter.fqns = tuple(found) or parameter.fqns  # its modules may be gone, or outside of the roots
    parameter.fqn = parameter.fqns[0]
