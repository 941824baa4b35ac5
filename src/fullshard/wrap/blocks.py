"""Find the repeated blocks of a model, such as transformer layers, from its structure alone.

[Note: Repeated blocks]
Blocks are the modules of a list (``nn.ModuleList``, ``nn.ModuleDict``, ``nn.Sequential``) that look alike. Lists may
be nested: layers contain lists of experts, and the stages of a vision model contain the lists of its layers. The outer
list has the blocks if at least half of its modules have a twin in it, a module of the same class with parameters of the
same names, shapes and dtypes: layers have, stages have not. If it has no twins, the lists inside of its modules are
looked at, and if these have none either, the modules whose class occurs at least twice are the blocks. Lists of
experts, known by their name, never are: a model with one or two layers has twins only there.

A layer may itself be a list without a forward, ``nn.ModuleList([attention, mlp])``, whose modules the model calls. Then
the large ones of these are the blocks; small ones, such as norms, are not.

All ranks find the same blocks, because all build the same modules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from fullshard.engine.parameters.names import wrapped_name
from fullshard.wrap.tree import ModuleTree, has_forward

__all__ = ["LEAST_SHARE", "BlockList", "is_experts", "plain_module", "repeated_blocks"]

LEAST_SHARE = 4  # a module beside blocks, or in a list that is one, is a unit with this share of the largest block

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, eq=False)
class BlockList:
    """Repeated blocks of one list.

    Args:
        name: Name of the list, as in ``named_modules()``; ``""`` is the model itself.
        blocks: The blocks in order, without other modules of the list.
    """

    name: str
    blocks: tuple[nn.Module, ...]


def repeated_blocks(tree: ModuleTree) -> list[BlockList]:
    """Return the lists of repeated blocks of a model, in order. See [Note: Repeated blocks].

    Lists that own less than 1 % of the model's elements are left out.

    Args:
        tree: Modules and parameters of the model. Modules that are ignored or already sharded are no blocks.

    Returns:
        The lists; empty if there are none.
    """
    least = max(1, tree.numel(tree.root) / 100)
    found = {each.name: each for each in _Search(tree).lists(tree.root)}
    return [each for each in found.values() if sum(map(tree.numel, each.blocks)) >= least]


def plain_module(module: nn.Module) -> nn.Module:
    """Return the module inside of those that ``torch.compile`` and activation checkpointing put around it."""
    while inner := module._modules.get(wrapped_name(module) or ""):
        module = inner
    return module


def is_experts(tree: ModuleTree, module: nn.Module) -> bool:
    """Return True if ``module`` is a list of experts. Ranks may call different ones, so none of them may be a unit."""
    lists = isinstance(module, _LISTS) or not has_forward(module)
    return lists and "expert" in tree.name(module).rpartition(".")[2]


class _Search:
    """The search for lists of blocks in a tree."""

    _tree: ModuleTree
    _order: dict[nn.Module, int]

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._order = {module: index for index, module in enumerate(tree.modules)}

    def lists(self, module: nn.Module) -> list[BlockList]:
        """Return the lists of blocks at and below ``module``."""
        children = self._children(module)
        alike: list[nn.Module] = []
        if self._may_have_blocks(module):
            if _has_twins(children):
                alike = _of_repeated_class(children)
            elif not any(map(self._has_twins_below, children)):
                single = isinstance(module, nn.ModuleList) and len(children) == 1 and children[0]._modules
                alike = children if single else _of_repeated_class(children)
        blocks = self._called(alike)
        own = [BlockList(self._tree.name(module), tuple(blocks))] if blocks else []
        return own + [found for child in children if child not in alike for found in self.lists(child)]

    def _called(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Return the modules with a forward, and in place of one without the large ones below."""
        found = []
        for module in modules:
            if has_forward(module):
                found.append(module)
            elif not is_experts(self._tree, module):
                parts = self._called(self._children(module))
                least = max(map(self._tree.numel, parts), default=0) / LEAST_SHARE
                found += [part for part in parts if self._tree.numel(part) >= least]
        return found

    def _has_twins_below(self, module: nn.Module) -> bool:
        children = self._children(module)
        return (self._may_have_blocks(module) and _has_twins(children)) or any(map(self._has_twins_below, children))

    def _may_have_blocks(self, module: nn.Module) -> bool:
        return isinstance(module, _LISTS) and not is_experts(self._tree, module)

    def _children(self, module: nn.Module) -> list[nn.Module]:
        """Return the children that own parameters, each once; none that contains ``module``."""
        children = dict.fromkeys(child for child in self._tree.children(module) if self._tree.wrappable(child))
        return [child for child in children if self._order[child] < self._order[module] and self._tree.numel(child)]


def _has_twins(modules: list[nn.Module]) -> bool:
    """True if at least half of ``modules`` have a twin among them."""
    signatures = [_signature(module) for module in modules]
    count = Counter(signatures)
    return 2 * sum(count[signature] > 1 for signature in signatures) >= max(1, len(modules))


def _signature(module: nn.Module) -> tuple[type, tuple[tuple[object, ...], ...]]:
    plain = plain_module(module)
    return type(plain), tuple((name, p.shape, p.dtype) for name, p in plain.named_parameters())


def _of_repeated_class(modules: list[nn.Module]) -> list[nn.Module]:
    count = Counter(type(plain_module(module)) for module in modules)
    return [module for module in modules if count[type(plain_module(module))] > 1]
