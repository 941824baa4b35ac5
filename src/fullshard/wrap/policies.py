"""Policies that select the modules that become separate units.

A policy is an object (``Policy``), or a callable that is called as ``policy(module=, recurse=, nonwrapped_numel=)`` on
the way down (``recurse=True``: recurse into this module?) and on the way up (``recurse=False``: wrap it?), with the
number of elements in the module that are not ignored and not wrapped yet.

A parameter that a module shares with modules elsewhere does not count for it: it could not own it. So the number is the
size of the unit if the module is wrapped. See [Note: Owner of a shared parameter].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fullshard.engine.ownership import all_modules
from fullshard.wrap.plan import WrapPlan, WrapTargets
from fullshard.wrap.tree import ModuleTree, PlannedParameter, check_all

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "PolicyFunction",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "plan_for",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

PolicyFunction = Callable[..., bool]


class Policy(ABC):
    """Base class of policies that select all modules to wrap at once, with their arguments.

    Subclasses implement ``_run_policy``, as in PyTorch.
    """

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap and their arguments. Subclasses implement it; named as in PyTorch.

        Args:
            root_module: The model.
            ignored_modules: Modules that are never wrapped: ignored, or already sharded.
            root_kwargs: Arguments for the root. Copy them, do not change them.

        Returns:
            Arguments by module.
        """


_Policy = Policy  # the name in torch


class ModuleWrapPolicy(Policy):
    """Wrap every module of the given classes (or subclasses), with the root's arguments.

    Instances can also be called like policies that are functions, for instance inside ``_or_policy``.

    Args:
        module_classes: Classes to wrap, for instance the class of the blocks.

    Raises:
        TypeError: If ``module_classes`` is not an iterable of classes.

    Example:
        ```python
        import torch
        from torch import nn

        from fullshard import fully_shard
        from fullshard.wrap import ModuleWrapPolicy

        block = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        model = nn.TransformerEncoder(block, num_layers=3, enable_nested_tensor=False)
        fully_shard(model, policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}))
        model(torch.randn(2, 5, 16)).sum().backward()
        ```
    """

    _module_classes: frozenset[type]

    def __init__(self, module_classes: Iterable[type]) -> None:
        self._module_classes = frozenset(check_all("ModuleWrapPolicy: module_classes", module_classes, type))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in all_modules(root_module)
            if isinstance(module, classes) and module not in ignored_modules and module is not root_module
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Act as a policy function: recurse into every module, wrap those of the classes.

        Args:
            module: The module.
            recurse: True asks whether to recurse into the module, False whether to wrap it.
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            The answer.
        """
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = sorted(cls.__qualname__ for cls in self._module_classes)
        return f"ModuleWrapPolicy({{{', '.join(names)}}})"


class CustomPolicy(Policy):
    """Wrap the modules for which a function returns True or arguments.

    Args:
        lambda_fn: Called with each module below the root. False or ``{}``: do not wrap it. True: wrap it with the
            root's arguments. A dict: wrap it with the root's arguments, overridden by these.

    Raises:
        TypeError: If ``lambda_fn`` is not callable.
        ValueError: When planning, if ``lambda_fn`` returns anything else.

    Example:
        ```python
        from torch import nn

        from fullshard import fully_shard
        from fullshard.wrap import CustomPolicy

        model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 100))


        def select(module):
            if isinstance(module, nn.Embedding):
                return {"reshard_after_forward": False}
            return isinstance(module, nn.Linear)


        fully_shard(model, policy=CustomPolicy(select))
        ```
    """

    _lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise TypeError(f"CustomPolicy: lambda_fn: expected a callable, found {lambda_fn!r}")
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        targets = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules or module is root_module:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    f"CustomPolicy: lambda_fn: expected True, False or a dict of arguments for {name!r} "
                    f"({type(module).__name__}), found {answer!r}"
                )
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module.

    Args:
        *args: Ignored.
        **kwargs: Ignored.

    Returns:
        True.
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which ``lambda_fn(module)`` is true. Use it with ``functools.partial``.

    Args:
        module: The module.
        recurse: True asks whether to recurse into the module (always), False whether to wrap it.
        nonwrapped_numel: Number of elements not wrapped yet; unused.
        lambda_fn: Returns True for modules to wrap.

    Returns:
        The answer.

    Example:
        ```python
        import functools

        from torch import nn

        from fullshard.wrap import lambda_auto_wrap_policy, plan_for

        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear))
        print(plan_for(policy, model))
        ```
    """
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type]
) -> bool:
    """Wrap the modules of the given classes. Use it with ``functools.partial``.

    Args:
        module: The module.
        recurse: True asks whether to recurse into the module (always), False whether to wrap it.
        nonwrapped_numel: Number of elements not wrapped yet; unused.
        transformer_layer_cls: Classes to wrap.

    Returns:
        The answer.

    Example:
        ```python
        import functools

        from torch import nn

        from fullshard import FullyShardedDataParallel
        from fullshard.wrap import transformer_auto_wrap_policy

        block = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        model = nn.TransformerEncoder(block, num_layers=3, enable_nested_tensor=False)
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
        ```
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type] | None = None,
    exclude_wrap_modules: Iterable[type] | None = None,
) -> bool:
    """Wrap a module as soon as it has enough elements that are not wrapped yet. Use it with ``functools.partial``.

    Args:
        module: The module.
        recurse: True asks whether to recurse into the module, False whether to wrap it.
        nonwrapped_numel: Number of elements not wrapped yet.
        min_num_params: Smallest number of elements of a unit.
        force_leaf_modules: Classes not to recurse into: neither they nor their children are wrapped. None:
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``, which is ``{nn.MultiheadAttention}``, because it reads
            the weights of its children without running them.
        exclude_wrap_modules: Classes to recurse into, but not to wrap. None:
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``, which is ``{nn.ModuleList, nn.ModuleDict}``, because
            they have no forward.

    Returns:
        The answer.

    Example:
        ```python
        import functools

        from torch import nn

        from fullshard import fully_shard
        from fullshard.wrap import plan_for, size_based_auto_wrap_policy

        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
        print(plan_for(policy, model))
        fully_shard(model, policy=policy)
        ```
    """
    leaves: Iterable[type] = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    excluded: Iterable[type] = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    leaves = leaves if force_leaf_modules is None else force_leaf_modules
    excluded = excluded if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[PolicyFunction | Policy]
) -> bool:
    """Wrap the modules that any of ``policies`` wraps. Use it with ``functools.partial``.

    Args:
        module: The module.
        recurse: True asks whether to recurse into the module, False whether to wrap it.
        nonwrapped_numel: Number of elements not wrapped yet.
        policies: Policies that can be called like functions.

    Returns:
        True if any of ``policies`` returns True.
    """
    # mypy does not know which Policy classes can be called; the others raise by themselves.
    traversal: Iterable[Any] = policies
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in traversal)


def plan_for(
    policy: Policy | PolicyFunction | WrapPlan | WrapTargets,
    root: nn.Module,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    root_kwargs: Mapping[str, Any] | None = None,
    sharded: bool = False,
) -> WrapPlan:
    """Plan the units of a model for a policy, without changing the model.

    Args:
        policy: A ``Policy``, or a callable ``policy(module=, recurse=, nonwrapped_numel=)``. Or the units themselves: a
            plan of this model, or a dict as in ``plan.modules``, whose keys are modules, or tuples of modules that
            become one unit, and whose values are arguments that override those of the root.
        root: The model. No policy wraps the root itself.
        ignored_modules: Modules that are never wrapped, with all their children; their parameters are ignored.
        ignored_params: Parameters that are not sharded and not counted.
        root_kwargs: Arguments of the root. Each module gets a shallow copy, which a policy may override.
        sharded: Plan for modules that are sharded already, too. Otherwise they are skipped, with all their children, so
            that you can combine manual wrapping and policies.

    Returns:
        The plan; ``print(plan)`` shows it.

    Raises:
        TypeError: If ``policy`` is neither, or another argument has the wrong type.
        ValueError: If a policy returns an invalid value, or a plan or a dict has a module that is not below ``root``.

    Example:
        ```python
        from torch import nn

        from fullshard.wrap import ModuleWrapPolicy, plan_for

        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)])
        plan = plan_for(ModuleWrapPolicy({nn.Sequential}), model)
        print(plan)  # one row per unit: class, elements, unsharded bytes, notes
        ```
    """
    kwargs = dict(root_kwargs or {})
    tree = ModuleTree(root, ignored_modules, ignored_params, sharded)
    reason = ""
    if isinstance(policy, Policy):
        targets = _selected(policy, tree, kwargs)
    elif isinstance(policy, (WrapPlan, Mapping)):
        reason = policy.reason if isinstance(policy, WrapPlan) else ""
        targets = {target: {**kwargs, **own} for target, own in _checked_targets(policy, root).items()}
    elif callable(policy) and not isinstance(policy, type):
        targets = {module: dict(kwargs) for module in _chosen(policy, tree, root, {root}, set())}
    else:
        raise TypeError(
            "auto_wrap_policy: expected a Policy (ModuleWrapPolicy, CustomPolicy) or a callable "
            f"(module=, recurse=, nonwrapped_numel=) -> bool, found {policy!r}"
        )
    return WrapPlan.of(tree, targets, kwargs, reason)


def _selected(policy: Policy, tree: ModuleTree, kwargs: dict[str, Any]) -> WrapTargets:
    """Return the modules that a policy object selects, with their arguments."""
    known = set(all_modules(tree.root))
    left_alone = {module for module in known if module is not tree.root and not tree.wrappable(module)}
    targets = policy._run_policy(tree.root, left_alone, kwargs)
    for module in targets:
        if module not in known:
            raise ValueError(
                f"{type(policy).__name__} selected a {type(module).__name__} that is not a submodule of the root"
            )
    return targets


def _checked_targets(plan: WrapPlan | WrapTargets, root: nn.Module) -> WrapTargets:
    if isinstance(plan, WrapPlan) and plan.root is not root:
        raise ValueError(f"plan: expected a plan of this {type(root).__name__}, found one of another model")
    targets: WrapTargets = plan.modules if isinstance(plan, WrapPlan) else plan
    below = set(root.modules()) - {root}
    for target, kwargs in targets.items():
        if not isinstance(kwargs, dict):
            raise TypeError(f"plan: expected a dict of arguments for each unit, found {kwargs!r:.100}")
        for module in target if isinstance(target, tuple) else (target,):
            if module not in below:
                raise ValueError(
                    f"plan: expected modules below the {type(root).__name__} that is sharded, found "
                    + ("the model itself" if module is root else f"a {type(module).__name__} that is not below it")
                )
    return targets


def _chosen(
    policy: PolicyFunction,
    tree: ModuleTree,
    module: nn.Module,
    seen: set[nn.Module],
    wrapped: set[PlannedParameter],
) -> Iterator[nn.Module]:
    """Yield the modules at and below ``module`` that a policy function wraps, children first.

    Adds to ``seen`` the modules that it was asked about, and to ``wrapped`` the parameters of those that it wraps.
    """
    held = tree.inside(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=_numel(held)):
        return
    for child in tree.children(module):
        if child not in seen and tree.wrappable(child):
            seen.add(child)
            yield from _chosen(policy, tree, child, seen, wrapped)
    rest = [parameter for parameter in held if parameter not in wrapped]
    if module is not tree.root and policy(module=module, recurse=False, nonwrapped_numel=_numel(rest)):
        wrapped.update(rest)
        yield module


def _numel(parameters: list[PlannedParameter]) -> int:
    return sum(parameter.numel for parameter in parameters)
