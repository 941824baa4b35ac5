"""What plans say and do: who holds which parameter, one pass that wraps, and a table."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fullshard import FullshardError, MixedPrecisionPolicy
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy, WrapPlan, enable_wrap, plan_for, wrap
from models import Block, Language


class Node(nn.Module):
    """What random trees are made of."""


class Wrapper(nn.Module):
    """What a front end puts around a module."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs


@dataclass
class Case:
    """A random model with modules registered several times and tied parameters, and what to do with it."""

    root: nn.Module
    wrapped: set[nn.Module] = field(default_factory=set)
    ignored_modules: list[nn.Module] = field(default_factory=list)
    ignored_params: list[nn.Parameter] = field(default_factory=list)

    def plan(self) -> WrapPlan:
        return plan_for(
            CustomPolicy(lambda module: module in self.wrapped),
            self.root,
            ignored_modules=self.ignored_modules,
            ignored_params=self.ignored_params,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Node i holds some of the nodes after it, at least its successor is held by someone."""
    nodes = [Node() for _ in range(draw(st.integers(1, 8)))]
    pool = [nn.Parameter(torch.zeros(size)) for size in range(1, draw(st.integers(1, 6)) + 1)]
    for index, node in enumerate(nodes[1:], start=1):
        for number, above in enumerate(draw(st.lists(st.integers(0, index - 1), min_size=1, max_size=3))):
            setattr(nodes[above], f"n{index}_{number}", node)
    for number, parameter in enumerate(pool):
        for node in draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3)):
            setattr(node, f"p{number}", parameter)
    some = st.lists(st.sampled_from(nodes), max_size=2)
    return Case(
        nodes[0],
        draw(st.sets(st.sampled_from(nodes))),
        draw(some) if draw(st.booleans()) else [],
        draw(st.lists(st.sampled_from(pool), max_size=2)),
    )


def paths(module: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[tuple[nn.Module, ...]]:
    """Every path from the root down to every module."""
    here = (*above, module)
    yield here
    for child in module._modules.values():
        assert child is not None
        yield from paths(child, here)


def expected_owners(case: Case) -> dict[nn.Parameter, nn.Module]:
    """By listing all paths: the last module that is a unit and lies on all paths to all holders."""
    ignored_modules = {below for module in case.ignored_modules for below in module.modules()}
    ignored = {*case.ignored_params, *(p for module in ignored_modules for p in module.parameters())}
    units = (case.wrapped - ignored_modules) | {case.root}
    owners: dict[nn.Parameter, nn.Module] = {}
    for parameter in case.root.parameters():
        if parameter in ignored:
            continue
        ways = [path for path in paths(case.root) if any(p is parameter for p in path[-1]._parameters.values())]
        common = [module for module in ways[0] if module in units and all(module in way for way in ways)]
        owners[parameter] = common[-1]
    return owners


@settings(max_examples=100)
@given(case=cases())
def test_every_parameter_has_one_owner(case: Case) -> None:
    """The lowest unit on all ways to it holds a parameter, listed by all its names; ignored ones nobody holds."""
    plan, expected = case.plan(), expected_owners(case)
    named: dict[nn.Parameter, list[str]] = {}
    for name, parameter in case.root.named_parameters(remove_duplicate=False):
        named.setdefault(parameter, []).append(name)
    found: dict[nn.Parameter, str] = {}
    for unit, held in plan.owners().items():
        for names in held:
            (parameter,) = {case.root.get_parameter(name) for name in names}
            assert sorted(names) == sorted(named[parameter]) and names[0] == named[parameter][0]
            assert parameter not in found
            found[parameter] = unit
    first_names = {module: name for name, module in case.root.named_modules()}
    assert found == {parameter: first_names[owner] for parameter, owner in expected.items()}


@settings(max_examples=50)
@given(case=cases())
def test_apply_wraps_children_first(case: Case) -> None:
    """Each entry is wrapped once, after all entries below it, and its wrapper stands wherever it was."""
    plan, before = case.plan(), slots(case.root)
    done: dict[nn.Module, Wrapper] = {}

    def record(module: nn.Module, kwargs: dict[str, Any], owned_by_ancestor: frozenset[nn.Parameter]) -> nn.Module:
        assert module not in done
        below = {entry.target for entry in plan.entries} & set(originals(module)) - {module}
        assert below <= done.keys()
        done[module] = Wrapper(module)
        return done[module]

    plan.apply(record)
    assert list(done) == [entry.target for entry in plan.entries] == list(plan.modules)
    after = {(id(holder), name): child for holder in originals(case.root) for name, child in holder._modules.items()}
    assert after == {slot: done.get(child, child) for slot, child in before.items()}
    assert case.root not in done


def originals(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if not isinstance(module, Wrapper)]


def slots(root: nn.Module) -> dict[tuple[int, str], nn.Module | None]:
    return {(id(holder), name): child for holder in root.modules() for name, child in holder._modules.items()}


def test_cycles_of_modules() -> None:
    """A cycle is gone round once; a parameter inside one that is entered from two units is the root's."""
    model: Any = nn.Sequential(Block(2), nn.Linear(2, 2))
    model[0].parent = model
    plan = plan_for(ModuleWrapPolicy({Block, nn.Linear}), model)
    assert [entry.name for entry in plan.entries] == ["0.up", "0.down", "0", "1"]
    assert plan.owners()["0.down"] == [("0.down.weight",), ("0.down.bias",)]
    assert plan.owners()[""] == []
    one, other = Block(2), Block(2)
    one.other, other.one = other, one
    model = nn.Sequential(nn.Sequential(one), nn.Sequential(other))
    plan = plan_for(ModuleWrapPolicy({nn.Sequential}), model)
    assert len(plan.owners()[""]) == 8
    assert all(entry.left_out == set(model.parameters()) for entry in plan.entries)


def test_apply_refuses() -> None:
    """A module that has gone meanwhile, and a front end that returns nothing, are errors; nothing is wrapped then."""
    model = Language()
    with pytest.raises(TypeError, match=r"'blocks\.0\.up', found a NoneType"):
        plan_for(ModuleWrapPolicy({nn.Linear}), model).apply(lambda *_: None)  # type: ignore[arg-type,return-value]
    assert type(model.blocks[0].up) is nn.Linear
    plan = plan_for(ModuleWrapPolicy({Block}), model, root_kwargs={"a": 1})

    def record(module: nn.Module, kwargs: dict[str, Any], owned_by_ancestor: frozenset[nn.Parameter]) -> nn.Module:
        assert kwargs.pop("a") == 1
        return module

    plan.apply(record)
    assert all(entry.kwargs == {"a": 1} for entry in plan.entries)
    model.blocks[1] = nn.Identity()
    with pytest.raises(FullshardError, match=r"'blocks\.1' \(Block\)"):
        plan.apply(lambda module, kwargs, owned_by_ancestor: Wrapper(module))
    assert type(model.blocks[0]) is Block


def test_a_plan_keeps_no_parameter_alive() -> None:
    """A plan may outlive the parameters."""
    model = Language()
    plan = plan_for(ModuleWrapPolicy({nn.Embedding, nn.Linear}), model)
    old = weakref.ref(model.embedding.weight)
    model.embedding.weight = model.head.weight = nn.Parameter(torch.zeros(1))
    gc.collect()
    assert old() is None
    assert plan.entries[0].left_out == set()
    assert "embedding.weight = head.weight" in str(plan)


EXPLAINED = """\
unit         class      elements  unsharded  notes
embedding    Embedding         0        0 B  without embedding.weight, shared: see (root); holds no parameters
blocks.0     Block           280      560 B  all frozen
blocks.1.up  Linear          144      576 B  mp_policy=None; reshard_after_forward=False
blocks.1     Block             8       16 B  1 ignored
blocks.2     Block           280      560 B  mixed, frozen: blocks.2.down.bias; mixed dtypes: float32, float64
(root)       Language        816    1.6 KiB  tied: embedding.weight = head.weight
total                      1,528    3.3 KiB  6 units, the largest 1.6 KiB"""


def test_explain() -> None:
    """The table names every unit with its size in the dtype of its all-gather, and what is special about it."""
    model = Language(100, 8, 3)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].down.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64), requires_grad=False)
    own = {"reshard_after_forward": False, "mp_policy": None}
    answers = {model.blocks[1].up: own, model.embedding: True} | dict.fromkeys(model.blocks, True)
    plan = plan_for(
        CustomPolicy(lambda module: answers.get(module, False)),
        model,
        ignored_params=[model.blocks[1].down.weight],
        root_kwargs={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "mesh": object()},
    )
    assert plan.explain() == str(plan) == EXPLAINED


def test_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how_to/wrap_policies.md shows the table that its first snippet prints."""
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "wrap_policies.md").read_text()
    (snippet, *_), (shown,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    exec(compile(snippet, "docs/how_to/wrap_policies.md", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out == shown


def test_explain_is_short() -> None:
    """Long lists of names and long arguments are cut; integers keep their dtype."""
    model = Language(100, 8, 8)
    model.embedding.weight.requires_grad_(False)
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.register_parameter("table", nn.Parameter(torch.zeros(1 << 20, dtype=torch.uint8), requires_grad=False))
    precision = {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "tags": ["tag"] * 99}
    text = plan_for(CustomPolicy(lambda module: False), model, root_kwargs=precision).explain()
    (root,) = [line for line in text.splitlines() if line.startswith("(root)")]
    assert "mixed, frozen: table, embedding.weight, blocks.0.up.weight, blocks.1.up.weight and 6 more" in root
    assert "1.0 MiB" in root and "tags" not in root
    text = plan_for(CustomPolicy(lambda m: {"tags": ["tag"] * 99} if m is model.head else False), model).explain()
    assert "tags=['tag', 'tag', 'tag', 'tag', 'tag', 'tag', ...]" in text


# -------------------------------------------------------------------- wrapping in the model's own code


def test_wrap_inside_of_enable_wrap() -> None:
    """Inside the block modules are wrapped, with overrides; outside, and in other threads, they are left alone."""
    layer, found = nn.Linear(1, 1), []
    assert wrap(layer, a=1) is layer
    with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        wrapped, changed = wrap(layer), wrap(layer, b=3, c=4)
        thread = threading.Thread(target=lambda: found.append(wrap(layer)))
        thread.start()
        thread.join()
    assert type(wrapped) is Wrapper and wrapped.module is layer and wrapped.kwargs == {"a": 1, "b": 2}
    assert changed.kwargs == {"a": 1, "b": 3, "c": 4}
    assert wrap(layer) is layer and found == [layer]


def test_errors_of_enable_wrap() -> None:
    """A block inside a block, and what cannot be called, are refused; after an exception nothing is wrapped."""
    layer = nn.Linear(1, 1)
    with enable_wrap(wrapper_cls=Wrapper, a=1):
        with pytest.raises(NotImplementedError, match="enable_wrap"):
            with enable_wrap(wrapper_cls=Wrapper):
                pass
        assert wrap(layer).kwargs == {"a": 1}
    with pytest.raises(TypeError, match="wrapper_cls"):
        with enable_wrap(wrapper_cls=None):  # type: ignore[arg-type]
            pass
    with pytest.raises(KeyError):
        with enable_wrap(wrapper_cls=Wrapper):
            raise KeyError
    assert wrap(layer) is layer
    with enable_wrap(wrapper_cls=lambda module: module):
        assert wrap(layer) is layer
