"""Unsharded parameters that users ask for: ``FSDPModule.unshard`` and ``fullshard.unsharded``."""

from __future__ import annotations

from fullshard.engine.runtime import runtime_of
from fullshard.engine.unit import Unit

__all__ = ["begin_user_unshard", "end_user_unshard", "user_unshard"]


def begin_user_unshard(unit: Unit) -> None:
    """Issue the all-gather for ``user_unshard``, or for an unshard without an end."""
    if (unit.is_kept or unit.shown is not None) and unit.is_idle and not unit.user_unshards:
        unit.reshard()  # the shards may have been written to since
    runtime_of(unit).begin_unshard([unit])


def user_unshard(unit: Unit) -> None:
    """Have the modules hold the unsharded parameters until ``end_user_unshard``, whatever runs in between."""
    runtime_of(unit).unshard(unit)
    unit.user_unshards += 1


def end_user_unshard(unit: Unit) -> None:
    """End one ``user_unshard``; the last one reshards. Memory stays for the backward of forwards in between."""
    unit.user_unshards -= 1
    if unit.user_unshards or not unit.is_idle:
        return
    if runtime_of(unit).prefetcher.ended:
        unit.keep_for_backward()
    else:
        unit.reshard()
