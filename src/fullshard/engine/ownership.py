"""Which unit owns which parameter.

[Note: Tied parameters]
A parameter that several modules hold is owned once, by the lowest unit whose module contains them all. Units
are built bottom-up, so a tie may show only later: the first ``fully_shard`` call owns the parameter and marks it;
a call on a module that contains that unit *and* another holder takes it over; a call on a module that holds it
beside that unit leaves its own attribute alone and notes it as pending, for the common ancestor's call to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from fullshard.engine.parameter import Owner, ShardedParameter, managed_by, parameter_shape
from fullshard.errors import TiedParameterError

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

__all__ = ["check_owned", "claim_parameters", "managed_modules", "nested_units", "rename", "set_unit", "unit_of"]

_UNIT = "_fullshard_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``fully_shard`` made of ``module`` itself, if it did."""
    return module.__dict__.get(_UNIT)


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Attach ``unit`` to its module."""
    module.__dict__[_UNIT] = unit


def nested_units(module: nn.Module) -> list[Unit]:
    """The units of ``module`` and everything below it, in the order of ``modules()``."""
    return [unit for unit in map(unit_of, module.modules()) if unit is not None]


def managed_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """``module`` and what is below it but not inside another unit, with names relative to it. Each once."""
    # With a stack: a nested function that calls itself would be a reference cycle that keeps the module alive.
    found: dict[int, tuple[str, nn.Module]] = {}
    stack = [("", module)]
    while stack:
        name, current = stack.pop()
        if id(current) in found or (current is not module and unit_of(current) is not None):
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


def claim_parameters(module: nn.Module, ignored: Iterable[nn.Parameter]) -> list[ShardedParameter]:
    """The parameters that a unit on ``module`` owns, in model order. See [Note: Tied parameters].

    Those that nested units own and that turn out to be tied are taken away from these.
    """
    ignored_ids = {id(p) for p in ignored}
    inside = nested_units(module)
    claimed: dict[int, ShardedParameter] = {}
    for holder in _holders(module):
        if id(holder.parameter) in ignored_ids:
            continue
        owner = Owner.of(holder.module, holder.name)
        existing = managed_by(holder.parameter)
        if existing is None:
            shape = parameter_shape(holder.fqn, holder.parameter)
            new = ShardedParameter(holder.parameter, [owner], [holder.fqn], shape)
            claimed[id(new)] = new
        elif id(existing) in claimed or _belongs_below(existing, module):
            existing.add_owner(owner, holder.fqn)
            claimed[id(existing)] = existing
        elif not _is_above(existing, module):
            existing.pending_owners.append(owner)
    for unit in inside:
        for parameter in unit.parameters:
            if any(_is_inside(owner, module) for owner in parameter.pending_owners):
                claimed[id(parameter)] = parameter
    _take_over(claimed, module)
    return list(claimed.values())


def _belongs_below(parameter: ShardedParameter, module: nn.Module) -> bool:
    """Whether a unit on ``module`` is the lowest for a managed parameter: it contains all holders known so far."""
    return all(_is_inside(owner, module) for owner in parameter.owners)


def _is_above(parameter: ShardedParameter, module: nn.Module) -> bool:
    """Whether the unit that owns the parameter contains ``module``: then it gathers for it."""
    unit = parameter.unit()
    above = None if unit is None else unit.module()
    return above is not None and any(module is submodule for submodule in above.modules())


def _take_over(claimed: dict[int, ShardedParameter], module: nn.Module) -> None:
    """Make the units that own claimed parameters give them up, and settle the pending owners in ``module``."""
    owners = {id(unit): unit for unit in (p.unit() for p in claimed.values() if hasattr(p, "unit")) if unit is not None}
    for unit in owners.values():
        unit.give_up([p for p in unit.parameters if id(p) in claimed])
    for parameter in claimed.values():
        still_pending = []
        for owner in parameter.pending_owners:
            if _is_inside(owner, module):
                parameter.add_owner(owner, "")
            else:
                still_pending.append(owner)
        parameter.pending_owners = still_pending


def check_owned(units: list[Unit]) -> None:
    """Raise if a tied parameter still waits for a unit above all its holders."""
    waiting = {id(p): p for unit in units for p in unit.parameters if p.pending_owners}
    for unit in units:
        module = unit.module()
        for holder in [] if module is None else _holders(module):
            parameter = managed_by(holder.parameter)
            if parameter is not None and parameter.pending_owners:  # of a unit elsewhere
                waiting[id(parameter)] = parameter
    if waiting:
        raise TiedParameterError(
            "these parameters are shared by modules of different units: "
            + ", ".join(p.describe() for p in waiting.values())
            + "; call fully_shard on a module that contains all of them (usually the whole model) as well"
        )


def rename(root: nn.Module, units: list[Unit]) -> None:
    """Give units and parameters the names they have below ``root``."""
    names: dict[int, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    for unit in units:
        unit.name = names[id(unit.module())][0]
        for parameter in unit.parameters:
            parameter.fqns = [
                f"{prefix}.{owner.name}" if prefix else owner.name
                for owner in parameter.owners
                for prefix in names.get(id(owner.module()), [])
            ]
            parameter.fqn = parameter.fqns[0]


def _holders(module: nn.Module) -> Iterator[_Holder]:
    for prefix, submodule in managed_modules(module):
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                yield _Holder(f"{prefix}.{name}" if prefix else name, submodule, name, parameter)


def _is_inside(owner: Owner, module: nn.Module) -> bool:
    holder = owner.module()
    return any(holder is submodule for submodule in module.modules())
