"""``state_dict`` and ``load_state_dict`` of modules, which see sharded parameters also while they are unsharded."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.engine.ownership import holders_of, holding
from fullshard.engine.runtime import current_runtime
from fullshard.engine.unit import Unit

__all__ = ["is_computing", "show_sharded", "watch_state_dicts"]


def watch_state_dicts(unit: Unit) -> None:
    """Have ``state_dict`` and ``load_state_dict`` of all modules that hold parameters of ``unit`` see sharded ones."""
    for module in holders_of(unit):
        if _register_sharded not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_register_sharded)  # type: ignore[no-untyped-call]
            module._register_load_state_dict_pre_hook(_reshard, with_module=True)  # type: ignore[no-untyped-call]


def _register_sharded(module: nn.Module, *_: Any) -> None:
    for unit in holding(module):
        if not unit.registration.copies and not is_computing(unit):
            show_sharded(unit)


def show_sharded(unit: Unit) -> None:
    """Have the modules of a unit hold its sharded parameters, with what users have put in place of unsharded ones."""
    replaced = unit.shown is not None and not unit.registration.holds_unsharded()
    unit.register_sharded()
    if replaced and not is_computing(unit):  # by parameters that are to be sharded
        unit.reshard()
        unit.write_back()


def _reshard(module: nn.Module, *_: Any) -> None:
    for unit in holding(module):
        if not unit.registration.copies:
            show_sharded(unit)
            unit.reshard()


def is_computing(unit: Unit) -> bool:
    """Return True in the middle of a step, and while the user keeps the unit unsharded."""
    runtime = current_runtime(unit)
    running = runtime is not None and runtime.busy
    return running or not unit.is_idle or unit.user_unshards > 0
