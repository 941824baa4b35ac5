"""What modules of both front ends have in common: pending gradients, prefetch, the wire, moves and copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fullshard.arguments import check_bool
from fullshard.engine.ownership import nested_units, set_unit, unit_of
from fullshard.engine.unit import Unit
from fullshard.engine.wire import UnitWire
from fullshard.engine.wire_report import WireReport
from fullshard.errors import FullshardError, PhaseError
from fullshard.policy import Wire

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PendingGradient", "ShardedModule", "note_inside", "outside_graph", "reads_copies", "unit_at", "units_at"]


def unit_at(module: nn.Module) -> Unit:
    """The unit of a sharded module."""
    unit = unit_of(module)
    if unit is None:
        raise FullshardError(f"{type(module).__name__} lost its unit; was its __dict__ replaced?")
    return unit


def units_at(module: nn.Module, recurse: bool) -> list[Unit]:
    """The unit of a sharded module, and with ``recurse`` those of all modules below."""
    check_bool("recurse", recurse)
    return nested_units(module) if recurse else [unit_at(module)]


def reads_copies(unit: Unit) -> bool:
    """Whether a forward now is one on the copies of ``summon_full_params``: it has nothing to gather, nor to cast.

    Without gradients only: those would go to the copies.
    """
    return unit.progress.copied and not torch.is_grad_enabled()


def note_inside(module: nn.Module) -> None:
    """The sharded modules below ``module`` are no roots any more."""
    for below in module.modules():
        if below is not module and isinstance(below, ShardedModule):
            below._inside = True


class ShardedModule(nn.Module):
    """A module that is a unit."""

    _inside: bool = False  # whether another one contains it

    def get_pending_gradients(self) -> dict[nn.Parameter, PendingGradient]:
        """The gradients, of this module's and all nested units, that are not in ``.grad`` yet. No communication.

        Returns:
            By sharded parameter, those that have any. The tensors are live: what is written to them counts. What is
            on its way, as after a backward with :meth:`set_is_last_backward` False, is in neither place.
        """
        unit_at(self).settle()
        return {
            parameter.sharded: PendingGradient(unreduced, partial)
            for unit in nested_units(self)
            for parameter, unreduced, partial in unit.gradients.pending()
        }

    def synchronize_gradients(self) -> None:
        """Reduce what microbatches without sync have left, of this module's and all nested units, into ``.grad``.

        Call it on all ranks. Where nothing is left it does nothing.
        """
        unit_at(self).settle()
        units = nested_units(self)
        schedules = list({id(u.schedule): u.schedule for u in units if u.schedule is not None}.values())
        for schedule in schedules:
            schedule.finish_reductions()
        for unit in units:
            unit.synchronize()
        for schedule in schedules:
            schedule.finish_reductions()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of ``nn.Module``, and for gradients that wait for a later microbatch to be reduced as well."""
        for unit in nested_units(self):
            if unit.schedule is not None:
                unit.schedule.finish_reductions()  # what is under way would land afterwards
        super().zero_grad(set_to_none)
        for unit in nested_units(self):
            if unit.progress.held:  # inside `unsharded`, nn.Module has seen the full parameters
                unit.gradients.zero_sharded(set_to_none=set_to_none)
            if set_to_none:
                unit.drop_gradients()
            else:
                unit.gradients.zero_pending()

    def set_prefetch_bytes(self, budget: int | None) -> None:
        """How much to gather ahead of the unit that computes, in forward and in backward. The root's budget counts.

        More hides latency, and uneven units: while a small one computes, a large one after it may need longer to
        arrive. Units with lists of their own (``set_modules_to_forward_prefetch``) keep to these.

        Args:
            budget: Bytes of full parameters, in the dtype in which they are gathered, that may be gathered and not in
                use yet: as many of the next units as fit, but at least one. None, as at first: one unit. 0: none.

        Raises:
            TypeError: If it is neither an int nor None.
            ValueError: If it is negative.
        """
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise TypeError(f"set_prefetch_bytes: expected a number of bytes or None, found {budget!r}")
        if budget is not None and budget < 0:
            raise ValueError(f"set_prefetch_bytes: expected at least 0 bytes, found {budget}")
        unit_at(self).settings.prefetch_bytes = budget

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        schedule = unit_at(self).schedule
        if schedule is not None:
            schedule.overlap.gather_again()
        super()._load_from_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of ``nn.Module``; after a backward that raised, the sharded parameters again."""
        unit_at(self).settle()
        return super().named_parameters(*args, **kwargs)

    def set_wire(self, shard: Wire | None = None, replicate: Wire | None = None, *, recurse: bool = True) -> None:
        """Have large parameters and gradients travel in fewer bytes than they have, for slow networks.

        Off at first; without arguments, off again. Call it between steps, on all ranks alike. What has travelled is
        counted from here on, see :meth:`wire_report`.

        Args:
            shard: How over the axis that parameters are sharded over. None: in full precision.
            replicate: How over the replicate axis of a 2-D mesh, where nothing is gathered. None: in full precision.
            recurse: Set all units below as well.

        Raises:
            TypeError: If one is not a :class:`~fullshard.policy.Wire`.
            ValueError: If one asks for what its axis does not have, or a unit has custom collectives or a
                communication hook.
            FullshardError: If a unit is in the middle of a step, or holds gradients that wait for the replicate axis.
        """
        _check_wires(shard, replicate)
        units = units_at(self, recurse)
        for unit in units:
            _check_may_change_wire(unit)
        for unit in units:
            wire = None
            if shard is not None or replicate is not None:
                wire = UnitWire(shard, replicate)
                wire.unit = unit.ref
            unit.settings.collectives.wire = wire
            unit.reroute()

    def wire_report(self) -> WireReport:
        """What has travelled since :meth:`set_wire` for this module and all below, and what is rounded or why not.

        On this rank; no communication. ``print`` it for a table.
        """
        return WireReport.of(nested_units(self))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        unit = unit_at(self)
        for nested in nested_units(self):  # all of them before any is moved
            nested.check_not_summoned("moved")
            if any(_changes(fn, parameter.sharded) for parameter in nested.parameters):
                nested.check_nothing_waits()
        unit.settle()
        unit.reshard()
        for parameter in unit.parameters:
            parameter.remember_attributes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        unit.adopt()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A sharded copy with shards of its own; it starts at rest."""
        unit = unit_at(self)
        unit.check_not_summoned("copied")
        unit.settle()
        unit.reshard()
        unit.settle_parameters()
        for parameter in unit.parameters:  # DTensor's own copies would copy the mesh too
            if id(parameter.sharded) not in memo:
                parameter.memoize(memo)
        copied: Self = object.__new__(type(self))
        memo[id(self)] = copied
        memo.update((id(shared), shared) for shared in self._shared_with_copies())
        chosen: Any = getattr(type(self), "__getstate__", None)  # Lightning's modules leave their Trainer out
        whole = chosen is getattr(object, "__getstate__", None)  # which Python 3.10 does not have
        given: Any = self.__dict__ if whole else chosen(self)
        state = dict(given if isinstance(given, dict) else self.__dict__)
        state.pop("_fullshard_unit", None)
        copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        members = [module for module in (ref() for ref in unit.modules) if module is not None]
        for module in members:
            copy.deepcopy(module, memo)  # nothing, for those that are copied already
        if unit_of(memo[id(members[-1])]) is None:  # else the copy of another member has done it
            made = _copy_of(unit, [memo[id(module)] for module in members], memo)
            for module in members:
                set_unit(memo[id(module)], made)
        copied._inside = False
        note_inside(copied)
        return copied

    def _shared_with_copies(self) -> list[object]:
        """What belongs to a process group and is the same for a deep copy."""
        return []

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FullshardError(
            f"{type(self).__name__} cannot be pickled: its shards belong to a process group; "
            "save model.state_dict() with torch.distributed.checkpoint instead"
        )


class PendingGradient(NamedTuple):
    """Gradients of one parameter that are still to be reduced; each is None if there is none.

    Args:
        unreduced: This rank's full gradient, of the parameter's full shape, in the reduce dtype.
        partial: This rank's rows, reduced over the shard axis and not yet over the replicate axis.
    """

    unreduced: torch.Tensor | None
    partial: torch.Tensor | None


def _check_wires(shard: Wire | None, replicate: Wire | None) -> None:
    for axis, wire in (("shard", shard), ("replicate", replicate)):
        if wire is not None and not isinstance(wire, Wire):
            raise TypeError(f"set_wire: {axis}: expected a fullshard.Wire or None, found {type(wire).__name__}")
    if shard is not None and shard.error_feedback:
        raise ValueError(
            "set_wire: shard: expected no error_feedback, found True; it would keep a copy of all full gradients on "
            "every rank, which is what sharding is there to avoid"
        )
    if replicate is not None and replicate.gather is not None:
        raise ValueError(
            f"set_wire: replicate: expected gather=None, found {replicate.gather!r}; nothing is gathered over the "
            "replicate axis, and reduce is how its all-reduce travels"
        )


def _check_may_change_wire(unit: Unit) -> None:
    name, settings = unit.name or "<root>", unit.settings
    if settings.comm_hook is not None:
        raise ValueError(f"set_wire: unit {name!r} has a communication hook, which reduces instead of the wire")
    if settings.collectives.all_gather is not None or settings.collectives.reduce_scatter is not None:
        raise ValueError(f"set_wire: unit {name!r} has custom collectives; set those to None first")
    unit.check_not_summoned("given another wire")
    if not unit.resting or unit.progress.held:
        raise PhaseError(
            f"set_wire: unit {name!r} is in the middle of a step, or held unsharded; call it between steps"
        )
    if unit.gradients.partial:
        raise FullshardError(
            f"set_wire: unit {name!r} holds gradients that are still to be reduced over the replicate axis; call "
            "synchronize_gradients() first"
        )


def _changes(fn: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> bool:
    """Whether ``fn`` would move a tensor like the parameter to another dtype or device."""
    before = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    after = fn(before)
    return after.dtype is not before.dtype or after.device != before.device


def _copy_of(unit: Unit, modules: Sequence[nn.Module], memo: dict[int, Any]) -> Unit:
    """The unit of deep copies of a unit's modules; these, with what is below them, are in ``memo`` already."""
    settings = replace(unit.settings, forward_prefetch=[], backward_prefetch=[], lanes=None, post_optim_event=None)
    settings.reduction = replace(settings.reduction)
    wire = settings.collectives.wire
    settings.collectives = replace(settings.collectives, wire=None if wire is None else wire.copy())
    policy = unit.policy._replace(form=unit.policy.form.copy_for(memo))
    made = Unit(modules, unit.mesh, [p.copy_for(memo) for p in unit.parameters], policy, settings)
    if settings.collectives.wire is not None:
        settings.collectives.wire.unit = made.ref
    return made


_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def outside_graph(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """Keep ``function``, and if ``recursive`` what it calls, out of a graph that torch.compile is tracing."""
    if function not in _outside:
        _outside[function] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return _outside[function]
