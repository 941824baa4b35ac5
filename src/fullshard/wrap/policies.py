"""Policies: which modules below a root become units of their own.

A policy is an object (:class:`Policy`), or a callable that is asked ``policy(module=, recurse=, nonwrapped_numel=)``
on the way down (``recurse=True``: look into this module?) and on the way up (``recurse=False``: wrap it?), with the
number of elements that are in the module, not ignored, and not wrapped yet.

A parameter that a module shares with modules elsewhere does not count for it: it could not hold it. So the number is
what the unit would hold if the answer were yes. See [Note: Who holds a shared parameter].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from fullshard.wrap.plan import WrapPlan
from fullshard.wrap.tree import ModuleTree, TreeParameter

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
    """Base class of policies that say for all modules at once what to wrap, and with which arguments."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """The modules to wrap, and with which arguments. For subclasses to define; named as torch names it.

        Args:
            root_module: The model.
            ignored_modules: Modules that are left alone whatever is returned: ignored, or sharded already.
            root_kwargs: Arguments for the root. To be copied, not to be changed.
        """

    def plan(
        self,
        root: nn.Module,
        *,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
        root_kwargs: Mapping[str, Any] | None = None,
        sharded: Callable[[nn.Module], bool] | None = None,
    ) -> WrapPlan:
        """What this policy makes of ``root``; the arguments are those of :func:`plan_for`."""
        tree = ModuleTree(root, ignored_modules, ignored_params, sharded)
        kwargs = dict(root_kwargs or {})
        left_alone = {module for module in root.modules() if module is not root and not tree.wrappable(module)}
        targets = self._run_policy(root, left_alone, kwargs)
        known = set(root.modules())
        for module in targets:
            if module not in known:
                raise ValueError(f"{type(self).__name__} chose a {type(module).__name__} that is not below the root")
        return WrapPlan.of(tree, targets, kwargs)


_Policy = Policy  # the name that subclasses written for torch know


class ModuleWrapPolicy(Policy):
    """Wrap every module of the given classes (or subclasses), with the root's arguments.

    Can also be called like the policies that are functions, for instance inside of :func:`_or_policy`.

    Args:
        module_classes: For instance the class of the blocks.

    Raises:
        TypeError: If ``module_classes`` is not an iterable of classes.
    """

    _module_classes: frozenset[type]

    def __init__(self, module_classes: Iterable[type]) -> None:
        self._module_classes = frozenset(_classes("ModuleWrapPolicy: module_classes", module_classes))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and module is not root_module and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """As a function: look into every module, wrap those of the classes."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = sorted(cls.__qualname__ for cls in self._module_classes)
        return f"ModuleWrapPolicy({{{', '.join(names)}}})"


class CustomPolicy(Policy):
    """Ask a function about each module below the root.

    Args:
        lambda_fn: Given a module, False or ``{}``: do not wrap it. True: wrap it with the root's arguments. A dict:
            wrap it with the root's arguments, overridden by these.

    Raises:
        TypeError: If ``lambda_fn`` cannot be called.
        ValueError: When planning, if it returns anything else.
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
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Look into every module; wrap those for which ``lambda_fn(module)`` is true. To be used with ``partial``.

    Args:
        module: The module asked about.
        recurse: Whether to look into it, or to wrap it.
        nonwrapped_numel: Elements not wrapped yet; unused.
        lambda_fn: Whether to wrap a module.
    """
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type]
) -> bool:
    """Look into every module; wrap those of the given classes. To be used with ``partial``.

    Args:
        module: The module asked about.
        recurse: Whether to look into it, or to wrap it.
        nonwrapped_numel: Elements not wrapped yet; unused.
        transformer_layer_cls: The classes to wrap.
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
    """Wrap a module as soon as so many elements in it are not wrapped yet. To be used with ``partial``.

    Args:
        module: The module asked about.
        recurse: Whether to look into it, or to wrap it.
        nonwrapped_numel: Elements not wrapped yet.
        min_num_params: The least number of elements of a unit.
        force_leaf_modules: Classes not to look into: neither they nor what is in them is wrapped. None:
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``, which is ``{nn.MultiheadAttention}``: that reads
            the weights of its parts without running them.
        exclude_wrap_modules: Classes to look into, but not to wrap. None:
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``, which is ``{nn.ModuleList, nn.ModuleDict}``:
            these have no forward.
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
    """Yes if any of ``policies`` says yes. To be used with ``partial``."""
    # mypy does not know which Policy classes can be called; the others raise by themselves.
    asked: Iterable[Any] = policies
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in asked)


def plan_for(
    policy: Policy | PolicyFunction,
    root: nn.Module,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    root_kwargs: Mapping[str, Any] | None = None,
    sharded: Callable[[nn.Module], bool] | None = None,
) -> WrapPlan:
    """The plan that a policy makes for a model. Nothing is changed.

    Args:
        policy: A :class:`Policy`, or a callable ``policy(module=, recurse=, nonwrapped_numel=)``.
        root: The model. No policy wraps the root itself.
        ignored_modules: These and all below them are never wrapped, and their parameters held by nobody.
        ignored_params: Held by nobody, and not counted.
        root_kwargs: The arguments of the root. Each module gets a shallow copy, which a policy may override.
        sharded: Whether a front end has a module already. Such modules are left alone, with all below them, so that
            wrapping by hand and by policy can be mixed. None: there are none.

    Returns:
        The plan; ``print(plan)`` shows it.

    Raises:
        TypeError: If ``policy`` is neither, or another argument has the wrong type.
        ValueError: If a policy answers with something that is no answer.
    """
    options = {"ignored_modules": ignored_modules, "ignored_params": ignored_params, "sharded": sharded}
    if isinstance(policy, Policy):
        return policy.plan(root, root_kwargs=root_kwargs, **options)  # type: ignore[arg-type]
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "auto_wrap_policy: expected a Policy (ModuleWrapPolicy, CustomPolicy) or a callable "
            f"(module=, recurse=, nonwrapped_numel=) -> bool, found {policy!r}"
        )
    tree = ModuleTree(root, ignored_modules, ignored_params, sharded)
    kwargs = dict(root_kwargs or {})
    asked = _Asking(policy, tree)
    asked.look_into(root)
    return WrapPlan.of(tree, {module: dict(kwargs) for module in asked.chosen}, kwargs)


class _Asking:
    """A policy that is a function, being asked about all modules of a tree."""

    chosen: list[nn.Module]
    _policy: PolicyFunction
    _tree: ModuleTree
    _seen: set[nn.Module]
    _wrapped: set[TreeParameter]

    def __init__(self, policy: PolicyFunction, tree: ModuleTree) -> None:
        self._policy, self._tree = policy, tree
        self.chosen = []
        self._seen, self._wrapped = {tree.root}, set()

    def look_into(self, module: nn.Module) -> None:
        held = self._tree.inside(module)
        if not self._yes(module, True, held):
            return
        for child in self._tree.children(module):
            if child not in self._seen and self._tree.wrappable(child):
                self._seen.add(child)
                self.look_into(child)
        rest = [parameter for parameter in held if parameter not in self._wrapped]
        if module is not self._tree.root and self._yes(module, False, rest):
            self.chosen.append(module)
            self._wrapped.update(rest)

    def _yes(self, module: nn.Module, recurse: bool, parameters: list[TreeParameter]) -> bool:
        numel = sum(parameter.parameter.numel() for parameter in parameters)
        return bool(self._policy(module=module, recurse=recurse, nonwrapped_numel=numel))


def _classes(argument: str, classes: Iterable[type]) -> list[type]:
    if isinstance(classes, (str, type)) or not isinstance(classes, Iterable):
        raise TypeError(f"{argument}: expected an iterable of classes, found {classes!r}")
    found = list(classes)
    for cls in found:
        if not isinstance(cls, type):
            raise TypeError(f"{argument}: expected classes, found {cls!r:.100}")
    return found
