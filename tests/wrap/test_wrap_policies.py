"""Which modules the policies choose."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    Policy,
    WrapPlan,
    _or_policy,
    _Policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    plan_for,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Block(nn.Sequential):
    """Two layers: 6 + 6 elements."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(up=nn.Linear(2, 2), down=nn.Linear(2, 2)))


class WideBlock(Block):
    """A subclass."""


def model_of_blocks() -> Any:
    """An embedding of 20 elements, 12 in each of two blocks, a norm of 4."""
    blocks = nn.ModuleList([Block(), WideBlock()])
    return nn.Sequential(OrderedDict(embed=nn.Embedding(10, 2), blocks=blocks, norm=nn.LayerNorm(2)))


def names(plan: WrapPlan) -> list[str]:
    return [entry.name for entry in plan.entries]


def by_size(min_num_params: int, **options: Any) -> Callable[..., bool]:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params, **options)


ALL = [
    "embed",
    "blocks.0.up",
    "blocks.0.down",
    "blocks.0",
    "blocks.1.up",
    "blocks.1.down",
    "blocks.1",
    "blocks",
    "norm",
]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ModuleWrapPolicy({Block}), ["blocks.0", "blocks.1"]),
        (ModuleWrapPolicy([WideBlock]), ["blocks.1"]),
        (ModuleWrapPolicy(iter((nn.Linear, Block))), ALL[1:7]),
        (ModuleWrapPolicy(()), []),
        (ModuleWrapPolicy({nn.Module}), ALL),
        (always_wrap_policy, ALL),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)), ["norm"]),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["blocks.0", "blocks.1"]),
        (
            functools.partial(_or_policy, policies=[ModuleWrapPolicy({WideBlock}), by_size(20)]),
            ["embed", "blocks.1"],  # what is left of blocks is below 20
        ),
        (lambda module, recurse, nonwrapped_numel: not recurse, []),  # does not even look into the root
    ],
)
def test_choice(policy: Any, expected: list[str]) -> None:
    """Each policy wraps what it says, children before parents, and never the root."""
    model = model_of_blocks()
    plan = plan_for(policy, model)
    assert names(plan) == expected
    modules = dict(model.named_modules())
    assert [entry.target for entry in plan.entries] == [modules[name] for name in expected]
    assert plan.root is model


def test_kwargs_of_each_module() -> None:
    """True: a shallow copy of the root's arguments. A dict: these override them. False and {}: not wrapped."""
    model, shared = model_of_blocks(), {"deep": 1}
    answers = {id(model.embed): True, id(model.norm): {"a": 5, "c": 6}, id(model.blocks): {}}
    root = {"a": 1, "b": shared}
    plan = plan_for(CustomPolicy(lambda m: answers.get(id(m), False)), model, root_kwargs=root)
    assert plan.modules == {model.embed: {"a": 1, "b": shared}, model.norm: {"a": 5, "b": shared, "c": 6}}
    assert all(kwargs["b"] is shared for kwargs in plan.modules.values())
    for policy in (ModuleWrapPolicy({Block}), always_wrap_policy):
        plan = plan_for(policy, model, root_kwargs=root)
        assert all(entry.kwargs == root for entry in plan.entries)
        assert len({id(entry.kwargs) for entry in plan.entries} | {id(root)}) == len(plan.entries) + 1
    assert root == {"a": 1, "b": {"deep": 1}}


def test_wrong_input() -> None:
    """What is neither a bool nor a dict, no policy, no class or of the wrong type is refused, and named."""
    model = model_of_blocks()
    for answer in (None, 1, "yes", [], torch.tensor(True)):
        policy = CustomPolicy(lambda m, answer=answer: answer if m is model.blocks[1].up else False)  # type: ignore[misc]
        with pytest.raises(ValueError, match=r"'blocks\.1\.up' \(Linear\), found ") as raised:
            plan_for(policy, model)
        assert repr(answer) in str(raised.value)
    for no_policy in (None, 3, "policy", ModuleWrapPolicy, {nn.Linear}):
        with pytest.raises(TypeError, match="expected a Policy"):
            plan_for(no_policy, model)  # type: ignore[arg-type]
    for classes in (nn.Linear, "Linear", None, [nn.Linear, "Block"], [nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match=r"ModuleWrapPolicy: module_classes: expected"):
            ModuleWrapPolicy(classes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lambda_fn"):
        CustomPolicy({nn.Linear})  # type: ignore[arg-type]
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (model, {"ignored_modules": [3]}, "ignored_modules"),
        (model, {"ignored_modules": model.embed}, "ignored_modules"),
        (model, {"ignored_params": model.embed.weight}, "ignored_params"),
        ([model], {}, "root"),
    ]
    for root, arguments, name in wrong:
        with pytest.raises(TypeError, match=name):
            plan_for(always_wrap_policy, root, **arguments)


def test_own_policy() -> None:
    """A policy written for torch's base class works; one that chooses a module from elsewhere is refused.

    A root that matches is not wrapped, what is below it is. The repr of a policy names its classes.
    """

    class First(_Policy):
        def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
            return {root_module: {}, next(root_module.children()): {"own": 1}}

    class Foreign(Policy):
        def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: Any) -> Any:
            return {nn.Linear(2, 2): {}}

    model = model_of_blocks()
    assert plan_for(First(), model).modules == {model.embed: {"own": 1}}
    assert plan_for(First(), model, ignored_modules=[model.embed]).modules == {}
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    for policy in (ModuleWrapPolicy({nn.Sequential}), CustomPolicy(lambda m: isinstance(m, nn.Sequential))):
        assert names(plan_for(policy, nested)) == ["0"]
    assert repr(ModuleWrapPolicy({nn.Linear, Block})) == "ModuleWrapPolicy({Block, Linear})"
    with pytest.raises(ValueError, match=r"Foreign selected a Linear that is not a submodule of the root"):
        plan_for(Foreign(), model)


def test_size_bookkeeping() -> None:
    """What is wrapped further down does not count again further up."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 2), nn.Linear(1, 2))
    )
    assert names(plan_for(by_size(17), model)) == ["0"]  # 16 + 2 together
    assert names(plan_for(by_size(16), model)) == ["0.0"]  # the 2 that are left are too few
    assert names(plan_for(by_size(8), model)) == ["0.0", "1"]  # 4 + 4 together
    assert names(plan_for(by_size(3), model)) == ["0.0", "1.0", "1.1"]
    assert names(plan_for(by_size(2), model)) == ["0.0", "0.1", "1.0", "1.1"]
    assert names(plan_for(by_size(27), model)) == []
    assert names(plan_for(size_based_auto_wrap_policy, model)) == []  # 100 million


def test_what_a_policy_is_told() -> None:
    """A function is asked on the way down with what is inside, on the way up with what is left."""
    asked = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((next(name for name, m in model.named_modules() if m is module), recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.Embedding)

    model = nn.Sequential(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)), nn.Linear(2, 1))
    plan_for(policy, model, ignored_params=[model[0][1].bias])
    assert asked == [
        ("", True, 13),
        ("0", True, 10),
        ("0.0", True, 6),
        ("0.0", False, 6),
        ("0.1", True, 4),
        ("0.1", False, 4),
        ("0", False, 4),
        ("1", True, 3),
        ("1", False, 3),
    ]


def test_size_classes() -> None:
    """Containers are looked into but not wrapped, attention is not even looked into; both can be changed."""
    model = nn.Sequential(
        nn.Linear(10, 10), nn.MultiheadAttention(100, 1), nn.ModuleList([nn.Linear(10, 4), nn.Linear(10, 4)])
    )
    assert names(plan_for(by_size(40), model)) == ["0", "2.0", "2.1"]
    assert names(plan_for(by_size(45), model)) == ["0"]
    assert names(plan_for(by_size(45, exclude_wrap_modules=set()), model)) == ["0", "2"]
    leaves = {nn.ModuleList}
    assert names(plan_for(by_size(40, force_leaf_modules=leaves), model)) == ["0", "1.out_proj", "1"]
    presets = (size_based_auto_wrap_policy.FORCE_LEAF_MODULES, size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES)
    assert presets == ({nn.MultiheadAttention}, {nn.ModuleList, nn.ModuleDict})


@pytest.mark.parametrize("policy", [ModuleWrapPolicy({nn.Module}), always_wrap_policy, CustomPolicy(lambda m: True)])
def test_ignored_and_sharded_modules(policy: Any) -> None:
    """Neither these nor what is below them is wrapped, nor asked about."""
    model = model_of_blocks()
    left = [name for name in ALL if not name.startswith("blocks.1")]
    assert names(plan_for(policy, model, ignored_modules=(m for m in [model.blocks[1]]))) == left
    with mock.patch("fullshard.wrap.tree.unit_of", lambda m: m if m is model.blocks[1] else None):
        assert names(plan_for(policy, model)) == left
    assert names(plan_for(policy, model, ignored_modules=[model])) == []
    assert names(plan_for(policy, model, ignored_modules=[nn.Linear(1, 1)])) == ALL
    with mock.patch("fullshard.wrap.tree.unit_of", lambda m: m if m is model else None):
        assert names(plan_for(policy, model)) == ALL  # the root is not asked


def test_shared_module() -> None:
    """A module registered twice is asked about and wrapped once; ignored ones are not asked about."""
    model = model_of_blocks()
    model.blocks[1].up = model.blocks[0].up
    assert names(plan_for(always_wrap_policy, model)) == [name for name in ALL if name != "blocks.1.up"]
    assert names(plan_for(by_size(6), model)) == ["embed", "blocks.0.up", "blocks.0.down", "blocks.1.down"]
    model, asked = model_of_blocks(), []
    model.again = model.norm
    plan_for(CustomPolicy(lambda m: asked.append(m) or False), model, ignored_modules=[model.blocks])
    assert asked == [model.embed, model.norm]


def test_tied_parameters_count_where_they_are_held() -> None:
    """A tied parameter counts once, for modules that contain all its holders."""
    inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    inner[1].weight = inner[0].weight
    model = nn.Sequential(inner, nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    assert names(plan_for(by_size(16), model)) == ["0", "1"]
    assert names(plan_for(by_size(17), model)) == []
    model[1].weight = inner[0].weight  # now only the root can hold it
    assert names(plan_for(by_size(12), model)) == ["2"]
