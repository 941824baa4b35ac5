"""The default plan: repeated blocks, large modules outside of them, and the last norm and head as one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fullshard.wrap.blocks import LEAST_SHARE, BlockList, is_experts, plain_module, repeated_blocks
from fullshard.wrap.plan import WrapPlan
from fullshard.wrap.policies import plan_for, size_based_auto_wrap_policy
from fullshard.wrap.tree import ModuleTree, has_forward

__all__ = ["plan_blocks"]

UNITS_BY_SIZE = 8  # without blocks, units have at least one such share of all elements


def plan_blocks(
    root: nn.Module,
    *,
    blocks_per_unit: int = 1,
    ignored_params: Iterable[nn.Parameter] = (),
    root_kwargs: Mapping[str, Any] | None = None,
) -> WrapPlan:
    """Plan the units of a model by its structure, without changing it. ``fullshard.shard`` uses this plan.

    Units are the repeated blocks: the modules of an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` that look
    alike, or what is in them if they have no forward, such as ``nn.ModuleList([attention, mlp])``. Embeddings, heads
    and other modules without children outside of the blocks are units if they have at least a quarter of the elements
    of the largest block. If the last of them follows the blocks, the norm before it joins its unit. Tied weights belong
    to a unit above, usually the root. If there are no repeated blocks, units are selected by size, each with at least
    an eighth of all elements. Lists of experts, known by their name, have no units in them, for ranks may call
    different experts. Modules that are sharded already are skipped, with all their children. The plan says which
    modules were found.

    Args:
        root: The model.
        blocks_per_unit: Consecutive blocks of a list that are one unit.
        ignored_params: Parameters that are not sharded and not counted.
        root_kwargs: Arguments of the root and of each unit.

    Returns:
        The plan; ``print(plan)`` shows it. Pass it, or a changed copy of ``plan.modules``, to ``fullshard.shard`` or
        ``fully_shard``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``blocks_per_unit`` is less than 1.

    Example:
        ```python
        from torch import nn

        from fullshard import shard
        from fullshard.wrap import plan_blocks

        block = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        model = nn.Sequential(nn.Embedding(100, 16), nn.TransformerEncoder(block, num_layers=3), nn.Linear(16, 100))
        plan = plan_blocks(model)
        print(plan)
        units = plan.modules
        del units[model[0]]  # leave the embedding in the root unit
        units[model[1].layers[0]] = {"reshard_after_forward": False}
        shard(model, plan=units)
        ```
    """
    if blocks_per_unit < 1:
        raise ValueError(f"plan_blocks: blocks_per_unit: expected at least 1, found {blocks_per_unit}")
    ignored = list(ignored_params)
    kwargs = dict(root_kwargs or {})
    tree = ModuleTree(root, ignored_params=ignored)
    lists = repeated_blocks(tree)
    if not lists:
        return _by_size(tree, ignored, kwargs)
    blocks = [block for found in lists for block in found.blocks]
    targets: dict[Any, dict[str, Any]] = {
        group: dict(kwargs) for found in lists for group in _groups(found.blocks, blocks_per_unit)
    }
    least = max(map(tree.numel, blocks)) / LEAST_SHARE
    outside, after = _outside(tree, set(blocks))
    large = [module for module in outside if tree.numel(module) >= least]
    if large and large[-1] is outside[-1] and (norm := _norm_before(after)) is not None:
        large[-1:] = [(norm, large[-1])]  # type: ignore[list-item]
    targets.update((target, dict(kwargs)) for target in large)
    return WrapPlan.of(tree, targets, kwargs, _reason(tree, lists))


def _groups(blocks: tuple[nn.Module, ...], size: int) -> list[Any]:
    """Return consecutive blocks in tuples; blocks as they are if each is a unit of its own."""
    groups = [blocks[at : at + size] for at in range(0, len(blocks), size)]
    return [group[0] if len(group) == 1 else group for group in groups]


def _outside(tree: ModuleTree, blocks: set[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that may be units outside of the blocks, in order, and those of them after all blocks.

    They have parameters and run as a whole, so that no other module reads their parameters: they have no children, or
    children whose parameters they read themselves.
    """
    seen: set[nn.Module] = set()
    found: list[nn.Module] = []
    after: list[nn.Module] = []
    for _, module in tree.named():
        if is_experts(tree, module):
            seen.update(module.modules())
        if module in seen or module in blocks:
            if module in blocks:
                after.clear()
                seen.update(module.modules())
            continue
        whole = isinstance(module, nn.MultiheadAttention) or "parametrizations" in module._modules
        if not whole and any(True for _ in module.children()):
            continue
        seen.update(module.modules())
        if tree.wrappable(module) and tree.numel(module) and has_forward(module):
            found.append(module)
            after.append(module)
    return found, after


def _norm_before(after: list[nn.Module]) -> nn.Module | None:
    """Return the module before the last one after the blocks, if it has vectors only, as norms have."""
    if len(after) < 2 or any(parameter.ndim > 1 for parameter in after[-2].parameters()):
        return None
    return after[-2]


def _by_size(
    tree: ModuleTree,
    ignored: list[nn.Parameter],
    kwargs: dict[str, Any],
) -> WrapPlan:
    least = max(1, tree.numel(tree.root) // UNITS_BY_SIZE)

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if is_experts(tree, module):
            return False
        if "parametrizations" in module._modules:  # it reads the parameters of its children
            return not recurse and nonwrapped_numel >= least
        large = size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=least)
        return large and (recurse or has_forward(module))

    plan = plan_for(policy, tree.root, ignored_params=ignored, root_kwargs=kwargs)
    reason = f"units by size, of at least {least:,} elements: no list of repeated blocks was found"
    return dataclasses.replace(plan, reason=reason)


def _reason(tree: ModuleTree, lists: list[BlockList]) -> str:
    """Say which blocks were found, and how much of the model they are."""
    texts = []
    for found in lists:
        classes = dict.fromkeys(type(plain_module(block)).__name__ for block in found.blocks)
        where = f"in {found.name}" if found.name else "in the model itself"
        share = sum(map(tree.numel, found.blocks)) / tree.numel(tree.root)
        texts.append(f"{len(found.blocks)} {' and '.join(classes)} {where} ({share:.0%} of the elements)")
    return "repeated blocks: " + ", ".join(texts)
