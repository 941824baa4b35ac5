"""What modules of both front ends have in common: gradients that wait for their reduction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.arguments import check_bool
from fullshard.engine.ownership import nested_units, unit_of
from fullshard.engine.unit import Unit
from fullshard.errors import FullshardError

__all__ = ["PendingGradient", "ShardedModule", "unit_at", "units_at"]


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


class ShardedModule(nn.Module):
    """A module that is a unit."""

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

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of ``nn.Module``; after a backward that raised, the sharded parameters again."""
        unit_at(self).settle()
        return super().named_parameters(*args, **kwargs)


class PendingGradient(NamedTuple):
    """Gradients of one parameter that are still to be reduced; each is None if there is none.

    Args:
        unreduced: This rank's full gradient, of the parameter's full shape, in the reduce dtype.
        partial: This rank's rows, reduced over the shard axis and not yet over the replicate axis.
    """

    unreduced: torch.Tensor | None
    partial: torch.Tensor | None
