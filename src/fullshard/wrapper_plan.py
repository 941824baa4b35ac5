"""What an ``auto_wrap_policy`` comes to: the wrappers to make inside of a module, all checked before the first is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from fullshard.engine.ownership import unit_of
from fullshard.policy import MixedPrecision
from fullshard.wrap import Policy, PolicyFunction, WrapPlan, plan_for
from fullshard.wrap.tree import ModuleTree
from fullshard.wrapper_options import API, WrapperOptions

__all__ = ["WrapperPlan", "plan_wrappers"]


class WrapperPlan(NamedTuple):
    """The wrappers to make.

    Args:
        plan: What to wrap.
        options: Of each wrapper, by its module.
        full_precision: Modules that run in full precision amid others that do not.
    """

    plan: WrapPlan
    options: dict[nn.Module, WrapperOptions]
    full_precision: set[nn.Module]


def plan_wrappers(
    policy: Policy | PolicyFunction,
    module: nn.Module,
    arguments: Mapping[str, Any],
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
    of_root: WrapperOptions,
) -> WrapperPlan:
    """Ask a policy. Nothing is changed yet.

    Args:
        policy: As given.
        module: The root, which is not in the plan.
        arguments: Of the root's constructor; a policy may choose others for some modules.
        ignored_modules: Left alone.
        ignored_parameters: Nobody's.
        of_root: What the arguments mean.

    Raises:
        TypeError, ValueError: If the policy is none, or the arguments that it chose are wrong.
    """

    def is_sharded(found: nn.Module) -> bool:
        return unit_of(found) is not None

    chosen = plan_for(
        policy,
        module,
        ignored_modules=ignored_modules,
        ignored_params=ignored_parameters,
        root_kwargs=arguments,
        sharded=is_sharded,
    )
    targets = chosen.modules
    apart = _in_full_precision(module, arguments["mixed_precision"], targets)
    if apart:
        names = sorted({type(found).__name__ for found in apart})
        warnings.warn(
            f"{API}: with mixed precision, the modules of {names} run in full precision and become units of their own; "
            "MixedPrecision(_module_classes_to_ignore=()) changes that",
            stacklevel=3,
        )
        targets.update((found, {**targets.get(found, arguments), "mixed_precision": None}) for found in apart)
        tree = ModuleTree(module, ignored_modules, ignored_parameters, is_sharded)
        chosen = WrapPlan.of(tree, targets, arguments)
    for unit, names in chosen.mixed_frozen().items():
        warnings.warn(
            f"{API}: unit {unit or '<root>'!r} has frozen parameters beside trainable ones ({', '.join(names)}); they "
            "are gathered as a message of their own; wrap them apart to gather them together",
            stacklevel=3,
        )
    options = {}
    for entry in chosen.entries:
        unknown = sorted(set(entry.kwargs) - set(arguments))
        if unknown:
            raise ValueError(f"{API}: the policy chose {unknown} for {entry.name!r}, expected of {sorted(arguments)}")
        same = all(entry.kwargs.get(name, value) is value for name, value in arguments.items())
        options[entry.module] = of_root if same else WrapperOptions.of(entry.module, {**arguments, **entry.kwargs})
    return WrapperPlan(chosen, options, apart)


def _in_full_precision(
    module: nn.Module, precision: MixedPrecision | None, targets: Mapping[nn.Module, Mapping[str, Any]]
) -> set[nn.Module]:
    """Modules that their users want in full precision, unless the policy itself chose how to wrap them."""
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
