"""Flat parameters and shards of original ones: what users see of them, write to them, and train with them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from wrapped import NO_SHARD, PLAIN, shards_of, slice_of

from compare import assert_close, assert_equal, fqn_of
from front_ends import (
    CLOSE,
    FLAT,
    ORIGINAL,
    adam,
    assert_at_rest,
    assert_same_values,
    assert_trains_alike,
    both_backward,
    sharded_with_reference,
)
from fullshard import FlatParameter, FullshardError, ShardingStrategy
from fullshard.layout import FlatLayout, ParameterShape
from fullshard.layout.flat import FlatSlot
from models import Branch, LossOf, Mlp, Stack, batch, reference_backward, square_loss
from pairwise import each_value
from ranks import Rank, on_ranks

BOTH = pytest.mark.parametrize("front_end", [FLAT, ORIGINAL], ids=str)
WRAPPED = "_fsdp_wrapped_module"


def flat_loss(step: int = 0) -> LossOf:
    """For models that take five numbers."""
    return square_loss(step, 4, 5)


# -------------------------------------------------------------------- the layout, without ranks


@st.composite
def layouts(draw: st.DrawFn) -> tuple[FlatLayout, int]:
    """A layout of up to six parameters, some empty, their dims in any order in memory, and its alignment."""
    parameters = []
    for index in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        order = draw(st.permutations(range(len(shape))))
        memory = torch.empty([shape[dim] for dim in order])
        stride = memory.permute([order.index(dim) for dim in range(len(shape))]).stride()
        parameters.append(ParameterShape(f"p{index}", tuple(shape), tuple(stride)))
    alignment = draw(st.sampled_from([1, 2, 4, 8, 16]))
    world_size = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13]))
    return FlatLayout.build(tuple(parameters), world_size=world_size, alignment=alignment), alignment


def whole(numels: list[int], world_size: int, alignment: int) -> list[tuple[int, int] | None]:
    """By plain loops: which element of which parameter every element of the full buffer is; None: padding."""
    elements: list[tuple[int, int] | None] = []
    for index, numel in enumerate(numels):
        while len(elements) % alignment:
            elements.append(None)
        elements += [(index, i) for i in range(numel)]
    while len(elements) % world_size:
        elements.append(None)
    return elements


@given(layouts())
@settings(max_examples=100)
def test_slices_are_those_of_the_concatenation(drawn: tuple[FlatLayout, int]) -> None:
    """Equal slices of the aligned, once padded concatenation are the shards; equal parameters give equal layouts."""
    layout, alignment = drawn
    numels = [math.prod(slot.parameter.shape) for slot in layout.slots]
    elements = whole(numels, layout.world_size, alignment)
    end = max((s.unsharded_offset + n for s, n in zip(layout.slots, numels, strict=True)), default=0)
    assert layout.slice_numel == -(-end // layout.world_size)
    elements += [None] * (layout.unsharded_numel - len(elements))  # empty parameters at the end may be aligned past it
    assert len(elements) == layout.unsharded_numel == layout.slice_numel * layout.world_size
    for rank in range(layout.world_size):
        mine: list[tuple[int, int] | None] = [None] * layout.slice_numel
        for index, slot in enumerate(layout.slots):
            start, numel, offset = slot.shard(rank)
            assert 0 <= offset <= offset + numel <= layout.slice_numel, "an empty shard can be cut out as well"
            for i in range(numel):
                assert mine[offset + i] is None, "two shards in one place"
                mine[offset + i] = (index, start + i)
        assert mine == elements[rank * layout.slice_numel : (rank + 1) * layout.slice_numel]
    again = FlatLayout.build(
        tuple(s.parameter for s in layout.slots), world_size=layout.world_size, alignment=alignment
    )
    assert again == layout and hash(again) == hash(layout)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.slice_numel = 0  # type: ignore[misc]


def test_invalid_layouts_are_refused() -> None:
    """Overlapping parameters, and slices that do not cover all, raise with the name of the parameter."""
    first, second = (ParameterShape(name, (3,), (1,)) for name in ("p0", "p1"))
    with pytest.raises(ValueError, match=r"p1 at 2 overlaps p0, which ends at 3"):
        FlatLayout((FlatSlot(first, 0, 3), FlatSlot(second, 2, 3)), 2, 3)
    with pytest.raises(ValueError, match=r"p1"):
        FlatLayout((FlatSlot(first, 0, 2), FlatSlot(second, 3, 2)), 2, 2)
    with pytest.raises(ValueError, match=r"p1"):
        FlatLayout((FlatSlot(first, 0, 3), FlatSlot(second, 3, 4)), 2, 3)  # slots of another slice


# -------------------------------------------------------------------- what is registered


@on_ranks(2)
def test_flat_parameter_is_what_is_registered(rank: Rank) -> None:
    """With ``use_orig_params=False`` a unit has one 1-D parameter, this rank's slice, with a gradient that is one."""
    model, reference = sharded_with_reference(FLAT, rank, nn.Sequential(Branch(), Mlp(6, 7, 3)), [])
    ((name, parameter),) = model.named_parameters()
    assert name == f"{WRAPPED}._flat_param"
    assert isinstance(parameter, FlatParameter) and isinstance(parameter, nn.Parameter)
    assert parameter.fqns == tuple(name for name, _ in reference.named_parameters())
    assert parameter.shapes == tuple(p.shape for p in reference.parameters())
    assert parameter.requires_grad and parameter.grad is None and parameter.is_leaf
    assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    assert_equal(parameter.detach(), slice_of(list(reference.parameters()), rank), "slice")
    assert model.module._flat_param is parameter
    square_loss()(model, rank.rank).backward()
    ((_, after),) = model.named_parameters()
    assert after is parameter and parameter.grad is not None and parameter.grad.shape == parameter.shape
    reference_backward(reference, rank.world_size, square_loss())
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    assert_equal(parameter.grad, slice_of(expected, rank), "gradient")


@on_ranks(2)
def test_names_of_flat_parameters(rank: Rank) -> None:
    """Each dtype of a unit, and what is frozen, has a flat parameter of its own, named after the unit's module."""
    plain = Stack(2)
    plain.first.double()
    plain.last.weight.requires_grad_(False)
    model, reference = sharded_with_reference(FLAT, rank, plain)
    names = ["_flat_param", "_flat_param_1", "_flat_param_2"] + [f"blocks.{i}.{WRAPPED}._flat_param" for i in range(2)]
    assert [name for name, _ in model.named_parameters()] == [f"{WRAPPED}.{name}" for name in names]
    flats = list(model.parameters())
    found = {p.fqns: (p.dtype, p.requires_grad) for p in flats}
    assert found == {
        ("first.weight", "first.bias"): (torch.float64, True),
        ("last.weight",): (torch.float32, False),
        ("last.bias",): (torch.float32, True),
        ("up.weight", "up.bias", "down.weight", "down.bias"): (torch.float32, True),
    }
    for each, block in zip(flats[3:], reference.blocks, strict=True):
        assert_equal(each.detach(), slice_of(list(block.parameters()), rank), "block")
    inner = model.module.blocks[0].module
    assert "up.weight" not in dict(inner.named_parameters())
    expected = shards_of(list(reference.blocks[0].parameters()), rank)
    for shard, value in zip((inner.up.weight, inner.up.bias), expected, strict=False):
        assert_equal(shard.detach(), value, "attribute")


@on_ranks(2)
def test_original_parameters_stay_the_same_objects(rank: Rank) -> None:
    """With ``use_orig_params=True`` order, objects, classes and attributes are those from before, also after a step."""
    model = Stack(2)
    model.first.bias.requires_grad_(False)
    model.last.weight = type("Marked", (nn.Parameter,), {})(model.last.weight.detach())
    model.last.weight.tag = "mine"
    before = dict(model.named_parameters())
    wrapped = ORIGINAL.wrap(model, rank)

    def check() -> None:
        after = dict(wrapped.named_parameters())
        assert [fqn_of(name) for name in after] == list(before)
        assert all(one is other for one, other in zip(after.values(), before.values(), strict=True))
        assert [p.requires_grad for p in after.values()].count(False) == 1
        assert not model.first.bias.requires_grad
        assert model.last.weight.tag == "mine" and type(model.last.weight).__name__ == "Marked"

    check()
    optimizer = torch.optim.Adam(wrapped.parameters())
    for step in range(2):
        square_loss(step)(wrapped, rank.rank).backward()
        check()
        optimizer.step()
        check()
    wrapped.state_dict()
    check()


@on_ranks(3)
def test_shards_of_original_parameters(rank: Rank) -> None:
    """Each is this rank's 1-D part of the memory of the parameter, maybe empty; shards of a unit share one slice."""
    model, reference = sharded_with_reference(ORIGINAL, rank, Mlp(5, 7, 3), [])
    expected = shards_of(list(reference.parameters()), rank)
    for (name, parameter), shard in zip(model.named_parameters(), expected, strict=True):
        assert parameter.dim() == 1 and type(parameter) is nn.Parameter
        assert_equal(parameter.detach(), shard, name)
    places = [(p.data_ptr(), p.numel()) for p in model.parameters() if p.numel()]
    numel = slice_of(list(reference.parameters()), rank).numel()
    assert places[-1][0] + 4 * places[-1][1] <= places[0][0] + 4 * numel
    plain = nn.Linear(6, 4, bias=False)
    plain.weight.data = plain.weight.data.t().contiguous().t()
    memory = plain.weight.data.t().contiguous()
    (shard,) = ORIGINAL.wrap(plain, rank, []).parameters()
    assert_equal(shard.detach(), shards_of([memory], rank)[0], "shard of a transposed weight")


@on_ranks(2)
def test_without_a_shard_axis_shapes_are_the_original_ones(rank: Rank) -> None:
    """NO_SHARD cuts nothing: original parameters keep their shapes and strides."""
    plain = Mlp(5, 7, 3)
    plain.layers[0].weight.data = plain.layers[0].weight.data.t().contiguous().t()
    model, reference = sharded_with_reference(ORIGINAL, rank, plain, [], strategy="NO_SHARD")
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_equal(one.detach(), other.detach(), name)
        assert one.stride() == other.stride()
    (flat_parameter,) = FLAT.wrap(copy.deepcopy(reference), rank, [], strategy="NO_SHARD").parameters()
    assert flat_parameter.numel() == 35 + 1 + 7 + 1 + 21 + 3 + 3


@on_ranks(2)
@pytest.mark.parametrize(("front_end", "strategy"), [(FLAT, "FULL_SHARD"), (ORIGINAL, "SHARD_GRAD_OP")], ids=str)
def test_parameters_inside_forward(rank: Rank, front_end: Any, strategy: str) -> None:
    """While a module runs, parameters have their original names and shapes; original ones till they are resharded."""
    seen: list[Any] = []
    module = nn.Sequential(nn.Linear(5, 3))
    module[0].register_forward_pre_hook(
        lambda layer, _: seen.extend((name, p.shape) for name, p in module.named_parameters())
    )
    model = front_end.wrap(module, rank, [], strategy=strategy)
    before = {name: id(p) for name, p in model.named_parameters()}
    for _ in range(2):
        seen.clear()
        loss = flat_loss()(model, rank.rank)
        assert seen == [("0.weight", (3, 5)), ("0.bias", (3,))]
        if front_end.flat:
            assert {name: id(p) for name, p in model.named_parameters()} == before
            assert all(p.dim() == 1 for p in model.parameters())
        else:
            assert [tuple(p.shape) for p in model.parameters()] == [(3, 5), (3,)]
        loss.backward()
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert_at_rest(model)


# -------------------------------------------------------------------- written by users


def run(model: nn.Module) -> torch.Tensor:
    return model(batch(7, 0, 3, 5))


def changed(reference: nn.Module) -> nn.Parameter:
    """Change one parameter of the reference and return it."""
    with torch.no_grad():
        return reference.layers[0].weight.mul_(-2).add_(0.25)


def replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Assign a parameter to the module that holds ``name``."""
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, parameter)


# How this rank's shard of a new value is put into a module. (module, name, shard)
WAYS: dict[str, Callable[[nn.Module, str, torch.Tensor], object]] = {
    "in place": lambda m, name, shard: m.get_parameter(name).data.copy_(shard),
    "data": lambda m, name, shard: setattr(m.get_parameter(name), "data", shard.clone()),
    "parameter": lambda m, name, shard: replace(m, name, nn.Parameter(shard.clone())),
}


@on_ranks(2)
@BOTH
@each_value(way=WAYS, when=["first", "forward", "step"], strategy=PLAIN)
def test_new_values_count(rank: Rank, way: str, when: str, strategy: ShardingStrategy, front_end: Any) -> None:
    """A new shard or flat parameter is used and saved from then on, before the first forward, after it, or a step."""
    model, reference = sharded_with_reference(front_end, rank, Mlp(5, 7, 3), [], strategy=strategy.name)
    if when == "forward":
        # What a forward with grad keeps for backward is not unsharded again for edits in place: as documented.
        # With original parameters, those that are kept for backward are seen until then, unsharded.
        with torch.set_grad_enabled(way != "in place" and (front_end.flat or strategy.name != "SHARD_GRAD_OP")):
            run(model)
    elif when == "step":
        assert_trains_alike(model, reference, rank, flat_loss, steps=1)
    changed(reference)
    alone = Rank(0, 1, rank.mesh, rank.group, rank.device) if strategy is NO_SHARD else rank
    parameters = list(reference.parameters())
    name = "_flat_param" if front_end.flat else "layers.0.weight"
    if front_end.flat:
        new = slice_of(parameters, alone)
    else:
        new = parameters[0].detach() if strategy is NO_SHARD else shards_of(parameters, rank)[0]
    WAYS[way](model.module, name, new)
    assigned = model.module.get_parameter(name)
    for key, value in model.state_dict().items():
        assert_close(value, reference.state_dict()[key], key, 1e-4, 1e-6)
    with torch.no_grad():
        assert_close(run(model), run(reference), "output", 1e-4, 1e-6)
    assert front_end.flat or model.module.get_parameter(name) is assigned
    model.zero_grad()
    reference.zero_grad()
    assert_trains_alike(model, reference, rank, flat_loss, steps=2)


@on_ranks(2)
@pytest.mark.parametrize("way", ["data", "parameter"])
def test_unsharded_values_are_cut(rank: Rank, way: str) -> None:
    """A rank may assign an unsharded value: its shard is taken out of it; or a parameter that needs no gradient."""
    model, reference = sharded_with_reference(ORIGINAL, rank, Mlp(5, 8, 3), [])
    WAYS[way](model.module, "layers.0.weight", changed(reference).detach())
    assert_equal(run(model), run(reference), "output")
    assert all(p.dim() == 1 for p in model.parameters())
    layer = model.module.layers[1]
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    reference.layers[1].weight.requires_grad_(False)
    assert_trains_alike(model, reference, rank, flat_loss, steps=2)
    assert layer.weight.grad is None


@on_ranks(2)
@pytest.mark.parametrize("way", ["data", "parameter"])
@BOTH
def test_wrong_values_are_refused(rank: Rank, way: str, front_end: Any) -> None:
    """Values of another shape, and removed or hidden parameters, raise by name; once put right, training goes on."""
    model, reference = sharded_with_reference(front_end, rank, Mlp(5, 8, 3), [])
    name = "_flat_param" if front_end.flat else "layers.0.weight"
    old = model.module.get_parameter(name).detach().clone()
    WAYS[way](model.module, name, torch.zeros(2, 3))
    with pytest.raises(FullshardError, match=r"cannot write back.*(layers\.0\.weight|_flat_param).*\(2, 3\)"):
        run(model)
    with pytest.raises(FullshardError, match="cannot write back"):
        model.state_dict()
    WAYS[way](model.module, name, old)
    assert_equal(run(model), run(reference), "output")
    assert_trains_alike(model, reference, rank, flat_loss, steps=2)
    layer = model.module.layers[1]
    if front_end.flat:
        layer.weight = nn.Parameter(torch.zeros(3, 8))
    elif way == "data":
        layer.weight = None
    else:
        del layer.weight
    with pytest.raises(FullshardError, match=r"weight.*use_orig_params" if front_end.flat else "weight"):
        run(model)


@on_ranks(2)
def test_padding_is_dropped(rank: Rank) -> None:
    """What is written to the padding of a flat parameter changes nothing."""
    model, reference = sharded_with_reference(FLAT, rank, Mlp(5, 7, 3), [])
    (parameter,) = model.parameters()
    padding = slice_of([torch.ones_like(p) for p in reference.parameters()], rank) == 0
    assert padding.any()
    with torch.no_grad():
        parameter[padding] = float("nan")
    assert_same_values(model, reference)
    assert_equal(run(model), run(reference), "output")
    flat_loss()(model, rank.rank).backward()
    assert not parameter.grad[padding].any()
    model.zero_grad()
    assert_trains_alike(model, reference, rank, flat_loss)


# -------------------------------------------------------------------- optimizers


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not and learn faster. By names: shards have one dim only."""
    named = [(fqn_of(name), p) for name, p in model.named_parameters()]
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
    ]


@on_ranks(2)
@pytest.mark.parametrize(("before", "strategy"), [(True, "FULL_SHARD"), (True, "NO_SHARD"), (False, "SHARD_GRAD_OP")])
def test_optimizers_from_before_wrapping(rank: Rank, before: bool, strategy: str) -> None:
    """With original parameters they train the same objects, with the groups' settings and sharded state."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    early = adam(decay_groups(model), foreach=False)
    wrapped = ORIGINAL.wrap(model, rank, strategy=strategy)
    ours = early if before else adam(decay_groups(wrapped), foreach=False)
    theirs = adam(decay_groups(reference), foreach=False)
    assert_trains_alike(wrapped, reference, rank, optimizers=[ours, theirs])
    for parameter in wrapped.parameters():
        assert ours.state[parameter]["exp_avg"].shape == parameter.shape


@on_ranks(2)
def test_optimizer_in_backward_from_before_wrapping(rank: Rank) -> None:
    """torch's optimizers in backward, installed before wrapping, train as an ordinary one does."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
    wrapped = ORIGINAL.wrap(model, rank)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        both_backward(wrapped, reference, rank, square_loss(step))
        theirs.step()
        theirs.zero_grad()
        assert all(p.grad is None for p in wrapped.parameters())
        assert_same_values(wrapped, reference, **CLOSE)
