"""Which unit owns which parameter.

[Note: Tied parameters]
A parameter that several modules hold is owned once, by the lowest unit whose module contains them all. Units
are built bottom-up, so a tie may show only later: the first ``fully_shard`` call owns the parameter and marks it;
a call on a module that contains that unit *and* another holder takes it over; a call on a module that holds it
beside that unit leaves its own attribute alone and notes it as pending, for the common ancestor's call to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from fullshard.engine.form import Form
from fullshard.engine.names import clean_name
from fullshard.engine.parameter import Owner, ShardedParameter, managed_by
from fullshard.engine.placement import ParameterPlacement
from fullshard.errors import TiedParameterError

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = [
    "check_owned",
    "claim_parameters",
    "clear_unit",
    "managed_modules",
    "nested_units",
    "rename",
    "set_unit",
    "unit_of",
]

_UNIT = "_fullshard_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``fully_shard`` made of ``module`` itself, if it did."""
    return module.__dict__.get(_UNIT)


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Attach ``unit`` to its module."""
    module.__dict__[_UNIT] = unit


def clear_unit(module: nn.Module) -> None:
    """Detach the unit again."""
    module.__dict__.pop(_UNIT, None)


def nested_units(module: nn.Module) -> list[Unit]:
    """The units of ``module`` and everything below it, in the order of ``modules()``, each once."""
    return list({id(unit): unit for unit in map(unit_of, module.modules()) if unit is not None}.values())


def managed_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """``modules`` and what is below them but not inside another unit, with names relative to them. Each once."""
    # With a stack: a nested function that calls itself would be a reference cycle that keeps the module alive.
    found: dict[int, tuple[str, nn.Module]] = {}
    roots = {id(module) for module in modules}
    stack = [("", module) for module in reversed(modules)]
    while stack:
        name, current = stack.pop()
        if id(current) in found or (id(current) not in roots and unit_of(current) is not None):
            continue
        found[id(current)] = (name, current)
        children = [(f"{name}.{key}" if name else key, child) for key, child in current.named_children()]
        stack.extend(reversed(children))
    return list(found.values())


class _Holder(NamedTuple):
    fqn: str
    module: nn.Module
    name: str
    parameter: nn.Parameter


def claim_parameters(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    place: Callable[[str, nn.Parameter], ParameterPlacement],
    form: Form,
    lifted: Iterable[nn.Parameter] = (),
) -> list[ShardedParameter]:
    """The parameters that a unit on ``modules`` owns, in model order. See [Note: Tied parameters].

    Those that nested units own and that turn out to be tied are taken away from these, and those ``lifted`` ones that
    they have left out are taken in. ``place`` is called with the name and the parameter for each that no unit owns yet.
    """
    ignored_ids = {id(p) for p in ignored}
    inside = _Inside(modules)
    nested = {id(unit): unit for module in modules for unit in nested_units(module)}
    claimed: dict[int, ShardedParameter] = {}
    lifted_ids = {id(p) for p in lifted}
    below = (holder for holder in _all_holders(modules) if id(holder.parameter) in lifted_ids) if lifted_ids else ()
    for holder in (*_holders(modules), *below):
        if id(holder.parameter) in ignored_ids:
            continue
        owner = Owner.of(holder.module, holder.name)
        existing = managed_by(holder.parameter)
        if existing is not None and not existing.owned and id(existing) not in claimed:
            existing = None  # a call that failed has left its mark
        if existing is not None:
            _check_form(existing, form)
        if existing is None:
            new = form.parameter(holder.parameter, owner, holder.fqn, place(holder.fqn, holder.parameter))
            claimed[id(new)] = new
        elif id(existing) in claimed or (
            # Of a nested unit only: to contain a module that is shared is not to be on every path to it.
            id(existing.unit()) in nested and all(owner in inside for owner in existing.owners)
        ):
            existing.add_owner(owner, holder.fqn)
            claimed[id(existing)] = existing
        elif not _is_above(existing, modules[0]):
            existing.pending_owners.append(owner)
    for unit in nested.values():
        for parameter in unit.parameters:
            if any(owner in inside for owner in parameter.pending_owners):
                _check_form(parameter, form)
                claimed[id(parameter)] = parameter
    _take_over(claimed, inside)
    taken = [parameter for parameter in claimed.values() if parameter.owned]
    if taken:  # their names were those below the units that they are taken from
        names = _names_of(modules)
        for parameter in taken:
            _name(parameter, names)
    return list(claimed.values())


class _Inside:
    """What some modules contain. Found out at the first question: nearly always there is none."""

    _roots: Sequence[nn.Module]
    _modules: set[int] | None

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._roots, self._modules = modules, None

    def __contains__(self, owner: Owner) -> bool:
        if self._modules is None:
            self._modules = {id(submodule) for module in self._roots for submodule in module.modules()}
        return id(owner.module()) in self._modules


def _is_above(parameter: ShardedParameter, module: nn.Module) -> bool:
    """Whether the unit that owns the parameter contains ``module``: then it gathers for it."""
    unit = parameter.unit()
    above = [] if unit is None else [ref() for ref in unit.modules]
    return any(module is submodule for m in above if m is not None for submodule in m.modules())


def _check_form(parameter: ShardedParameter, form: Form) -> None:
    """Before anything is changed."""
    if not form.accepts(parameter):
        raise TiedParameterError(
            f"{parameter.describe()} is shared by a module of a FullyShardedDataParallel unit and one of a fully_shard "
            "unit, which keep it in different forms; use one of them for both modules"
        )


def _take_over(claimed: dict[int, ShardedParameter], inside: _Inside) -> None:
    """Make the units that own claimed parameters give them up, and settle the pending owners that are inside."""
    owners = {id(unit): unit for unit in (p.unit() for p in claimed.values() if p.owned) if unit is not None}
    for unit in owners.values():
        unit.give_up([p for p in unit.parameters if id(p) in claimed])
    for parameter in claimed.values():
        still_pending = []
        for owner in parameter.pending_owners:
            if owner in inside:
                parameter.add_owner(owner, "")
            else:
                still_pending.append(owner)
        parameter.pending_owners = still_pending


def check_owned(units: list[Unit]) -> None:
    """Raise if a tied parameter still waits for a unit above all its holders."""
    waiting = {id(p): p for unit in units for p in unit.parameters if p.pending_owners}
    for unit in units:
        for holder in _holders([module for module in (ref() for ref in unit.modules) if module is not None]):
            parameter = managed_by(holder.parameter)
            if parameter is not None and parameter.pending_owners:  # of a unit elsewhere
                waiting[id(parameter)] = parameter
    if waiting:
        raise TiedParameterError(
            "these parameters are shared by modules of different units: "
            + ", ".join(p.describe() for p in waiting.values())
            + "; call fully_shard on a module that contains all of them (usually the whole model) as well"
        )


def rename(roots: Sequence[nn.Module], units: list[Unit]) -> None:
    """Give units and parameters the names they have below ``roots`` (usually one)."""
    names = _names_of(roots)
    for unit in units:
        unit.name = next(names[id(ref())][0] for ref in unit.modules if id(ref()) in names)
        for parameter in unit.parameters:
            _name(parameter, names)


def _names_of(roots: Sequence[nn.Module]) -> dict[int, list[str]]:
    """All names of all modules, by their ids."""
    names: dict[int, list[str]] = {}
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            known = names.setdefault(id(module), [])
            if (clean := clean_name(name)) not in known:  # a wrapper and what it wraps have one name
                known.append(clean)
    return names


def _name(parameter: ShardedParameter, names: dict[int, list[str]]) -> None:
    found = [
        f"{prefix}.{owner.name}" if prefix else owner.name
        for owner in parameter.owners
        for prefix in names.get(id(owner.module()), [])
    ]
    parameter.fqns = found or parameter.fqns  # its modules may be gone, or elsewhere
    parameter.fqn = parameter.fqns[0]


def _all_holders(modules: Sequence[nn.Module]) -> Iterator[_Holder]:
    return _holders_in([named for module in modules for named in module.named_modules()])


def _holders(modules: Sequence[nn.Module]) -> Iterator[_Holder]:
    return _holders_in(managed_modules(modules))


def _holders_in(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[_Holder]:
    for prefix, submodule in modules:
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                yield _Holder(clean_name(f"{prefix}.{name}" if prefix else name), submodule, name, parameter)
