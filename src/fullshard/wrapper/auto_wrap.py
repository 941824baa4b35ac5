"""Apply an ``auto_wrap_policy``: plan and check all wrappers inside of a module before the first is created."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fullshard.policy import MixedPrecision
from fullshard.wrap import Policy, PolicyFunction, WrapPlan, plan_for
from fullshard.wrap.tree import ModuleTree
from fullshard.wrapper.options import API, WrapperOptions

__all__ = ["plan_wrappers"]


def plan_wrappers(
    policy: Policy | PolicyFunction,
    module: nn.Module,
    arguments: Mapping[str, Any],
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
    root_options: WrapperOptions,
) -> tuple[WrapPlan, dict[nn.Module, WrapperOptions]]:
    """Plan the wrappers that a policy selects below ``module``, and their options. Nothing is changed yet.

    ``arguments`` are the constructor arguments of the root, of which a policy may choose others for some modules, and
    ``root_options`` the same, validated.

    Raises:
        TypeError, ValueError: If the policy or the arguments that it chose are invalid.
    """
    chosen = plan_for(
        policy,
        module,
        ignored_modules=ignored_modules,
        ignored_params=ignored_parameters,
        root_kwargs=arguments,
    )
    if group := next((entry.name for entry in chosen.entries if len(entry.modules) > 1), None):
        raise ValueError(
            f"{API}: auto_wrap_policy: expected units of one module each, found {group!r}; a unit of several modules "
            "needs fully_shard"
        )
    targets = chosen.modules
    full_precision = _in_full_precision(module, arguments["mixed_precision"], targets)
    if full_precision:
        names = sorted({type(found).__name__ for found in full_precision})
        warnings.warn(
            f"{API}: mixed_precision is given, so modules of the classes {names} are wrapped separately and run in "
            "full precision; pass MixedPrecision(_module_classes_to_ignore=()) to disable that",
            stacklevel=4,
        )
        targets.update((found, {**targets.get(found, arguments), "mixed_precision": None}) for found in full_precision)
        tree = ModuleTree(module, ignored_modules, ignored_parameters)
        chosen = WrapPlan.of(tree, targets, arguments)
    for unit, names in chosen.mixed_frozen().items():
        warnings.warn(
            f"{API}: unit {unit or '<root>'!r} has both frozen and trainable parameters (frozen: {', '.join(names)}); "
            "the frozen ones are all-gathered by a separate collective; wrap them separately to avoid that",
            stacklevel=4,
        )
    options = {}
    for entry in chosen.entries:
        unknown = sorted(set(entry.kwargs) - set(arguments))
        if unknown:
            raise ValueError(
                f"{API}: auto_wrap_policy: expected arguments of the constructor for module {entry.name!r}, found "
                f"{unknown}; valid are {sorted(arguments)}"
            )
        same = all(entry.kwargs.get(name, value) is value for name, value in arguments.items())
        own = root_options if same else WrapperOptions.of(entry.modules[0], {**arguments, **entry.kwargs})
        options[entry.modules[0]] = replace(own, casts_around=True) if entry.modules[0] in full_precision else own
    return chosen, options


def _in_full_precision(
    module: nn.Module, precision: MixedPrecision | None, targets: Mapping[nn.Module, Mapping[str, Any]]
) -> set[nn.Module]:
    """Return the modules to run in full precision, except those whose precision the policy itself chose."""
    if precision is None or precision.param_dtype is None or not precision._module_classes_to_ignore:
        return set()
    classes = tuple(precision._module_classes_to_ignore)
    return {
        found
        for found in module.modules()
        if found is not module
        and isinstance(found, classes)
        and (found not in targets or targets[found].get("mixed_precision") is precision)
    }
