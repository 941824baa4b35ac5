"""Flat parameters and pieces: where they lie, what users see of them, write to them, and train with them."""

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
from wrapped import NO_SHARD, PLAIN, pieces_of, slice_of

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
from fullshard import CPUOffload, FlatParameter, FullshardError, ShardingStrategy
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
    """Cutting the aligned, once padded concatenation into equal slices gives exactly the shards of every rank.

    The same parameters give an equal, hashable layout.
    """
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


def shapes(*sizes: tuple[int, ...]) -> list[ParameterShape]:
    """Contiguous parameters p0, p1, ... of these sizes."""
    return [ParameterShape(f"p{i}", size, tuple(torch.empty(size).stride())) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "slice_numel", "shards"),
    [
        # A square of 25 over two ranks: 13 and 12 elements, and one of padding.
        ([(5, 5)], 13, [[(0, 13, 0)], [(13, 12, 0)]]),
        # A weight of 35, one element up to 16 bytes, a bias of 7, one at the end: the bias is rank 1's alone.
        ([(7, 5), (7,)], 22, [[(0, 22, 0), (0, 0, 22)], [(22, 13, 0), (0, 7, 14)]]),
        # A scalar between two others.
        ([(3,), (), (2, 2)], 6, [[(0, 3, 0), (0, 1, 4), (0, 0, 6)], [(3, 0, 0), (1, 0, 0), (0, 4, 2)]]),
    ],
)
def test_worked_examples(
    sizes: list[tuple[int, ...]], slice_numel: int, shards: list[list[tuple[int, int, int]]]
) -> None:
    """Examples worked out by hand, for two ranks and 4-byte elements."""
    layout = FlatLayout.build(tuple(shapes(*sizes)), world_size=2)
    assert layout.slice_numel == slice_numel
    assert [[tuple(slot.shard(rank)) for slot in layout.slots] for rank in range(2)] == shards


def test_invalid_layouts_are_refused() -> None:
    """Overlapping parameters, and slices that do not cover all, raise with the name of the parameter."""
    first, second = shapes((3,), (3,))
    with pytest.raises(ValueError, match=r"p1 at 2 overlaps p0, which ends at 3"):
        FlatLayout((FlatSlot(first, 0, 3), FlatSlot(second, 2, 3)), 2, 3)
    with pytest.raises(ValueError, match=r"p1"):
        FlatLayout((FlatSlot(first, 0, 2), FlatSlot(second, 3, 2)), 2, 2)
    with pytest.raises(ValueError, match=r"p1"):
        FlatLayout((FlatSlot(first, 0, 3), FlatSlot(second, 3, 4)), 2, 3)  # slots of another slice


# -------------------------------------------------------------------- what is registered


@on_ranks(2)
def test_flat_parameter_is_what_is_registered(rank: Rank) -> None:
    """With ``use_orig_params=False`` a unit has one 1-D parameter: its slice, which knows what is in it.

    Its ``.grad`` is this rank's slice of all averaged gradients, and zero in between and where there are none.
    """
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
    """Those of nested units are named after the modules that they belong to; the root's comes first.

    Each dtype of a unit has its own, as have frozen parameters, which need no gradient; the first keeps the plain name.
    At rest modules do not have their parameters registered, but their attributes are still there.
    """
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
    expected = pieces_of(list(reference.blocks[0].parameters()), rank)
    for piece, value in zip((inner.up.weight, inner.up.bias), expected, strict=False):
        assert_equal(piece.detach(), value, "attribute")


class Marked(nn.Parameter):
    """A kind of parameter that a user has made."""


@on_ranks(2)
def test_original_parameters_stay_the_same_objects(rank: Rank) -> None:
    """With ``use_orig_params=True`` order, objects, classes and attributes are those from before, also after a step."""
    model = Stack(2)
    model.first.bias.requires_grad_(False)
    model.last.weight = Marked(model.last.weight.detach())
    model.last.weight.tag = "mine"  # type: ignore[attr-defined]
    before = dict(model.named_parameters())
    wrapped = ORIGINAL.wrap(model, rank)

    def check() -> None:
        after = dict(wrapped.named_parameters())
        assert [fqn_of(name) for name in after] == list(before)
        assert all(one is other for one, other in zip(after.values(), before.values(), strict=True))
        assert [p.requires_grad for p in after.values()].count(False) == 1
        assert not model.first.bias.requires_grad
        assert model.last.weight.tag == "mine" and type(model.last.weight) is Marked  # type: ignore[attr-defined]

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
def test_pieces_are_cut_from_the_concatenation(rank: Rank) -> None:
    """Each parameter is this rank's 1-D part of it, which may be empty; pieces of a unit share one slice.

    That of a parameter that is dense but not contiguous is cut from its memory as it lies.
    """
    model, reference = sharded_with_reference(ORIGINAL, rank, Mlp(5, 7, 3), [])
    expected = pieces_of(list(reference.parameters()), rank)
    for (name, parameter), piece in zip(model.named_parameters(), expected, strict=True):
        assert parameter.dim() == 1 and type(parameter) is nn.Parameter
        assert_equal(parameter.detach(), piece, name)
    places = [(p.data_ptr(), p.numel()) for p in model.parameters() if p.numel()]
    numel = slice_of(list(reference.parameters()), rank).numel()
    assert places[-1][0] + 4 * places[-1][1] <= places[0][0] + 4 * numel
    plain = nn.Linear(6, 4, bias=False)
    plain.weight.data = plain.weight.data.t().contiguous().t()
    memory = plain.weight.data.t().contiguous()
    (piece,) = ORIGINAL.wrap(plain, rank, []).parameters()
    assert_equal(piece.detach(), pieces_of([memory], rank)[0], "piece of a transposed weight")


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


class Looking(nn.Module):
    """A linear layer that notes what it sees of its parameters while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.seen: list[tuple[str, torch.Size]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [(name, p.shape) for name, p in self.named_parameters()]
        assert self.linear.weight.shape == (3, 5)
        return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize(("front_end", "strategy"), [(FLAT, "FULL_SHARD"), (ORIGINAL, "SHARD_GRAD_OP")], ids=str)
def test_parameters_inside_forward(rank: Rank, front_end: Any, strategy: str) -> None:
    """While a module runs, its parameters have their original names and full shapes, and then sharded ones.

    With original parameters, the unsharded ones are seen until backward where the strategy keeps them for it.
    """
    model = front_end.wrap(Looking(), rank, [], strategy=strategy)
    before = {name: id(p) for name, p in model.named_parameters()}
    for _ in range(2):
        loss = flat_loss()(model, rank.rank)
        assert model.module.seen == [("linear.weight", (3, 5)), ("linear.bias", (3,))]
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


# How this rank's piece of a new value is put into a module. (module, name, piece)
WAYS: dict[str, Callable[[nn.Module, str, torch.Tensor], object]] = {
    "in place": lambda m, name, piece: m.get_parameter(name).data.copy_(piece),
    "data": lambda m, name, piece: setattr(m.get_parameter(name), "data", piece.clone()),
    "parameter": lambda m, name, piece: replace(m, name, nn.Parameter(piece.clone())),
}


@on_ranks(2)
@BOTH
@each_value(way=WAYS, when=["first", "forward", "step"], strategy=PLAIN)
def test_new_values_count(rank: Rank, way: str, when: str, strategy: ShardingStrategy, front_end: Any) -> None:
    """A new piece, or flat parameter, counts from then on: before the first forward, after a forward, after a step.

    It is in state dicts, also before any forward. An assigned parameter stays the object that is registered.
    """
    model, reference = sharded_with_reference(front_end, rank, Mlp(5, 7, 3), [], strategy=strategy.name)
    if when == "forward":
        # What a forward with grad keeps for backward is not gathered again for edits in place: as documented.
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
        new = parameters[0].detach() if strategy is NO_SHARD else pieces_of(parameters, rank)[0]
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
def test_whole_parameters_count(rank: Rank, way: str) -> None:
    """Instead of its piece a rank may assign the whole parameter; its piece is taken out of it.

    A new parameter that needs no gradient takes the place of a trained one.
    """
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
    """A new value of another shape raises, naming parameter and shapes; once put right, training goes on.

    A parameter that was removed, or put in the place of a hidden one, is refused by name.
    """
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
    """Weights decay, biases do not and learn faster. By names: pieces have one dim only."""
    named = [(fqn_of(name), p) for name, p in model.named_parameters()]
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
    ]


@on_ranks(2)
@pytest.mark.parametrize(
    ("before", "strategy"), [(True, "FULL_SHARD"), (True, "HYBRID_SHARD"), (True, "NO_SHARD"), (False, "SHARD_GRAD_OP")]
)
def test_optimizers_from_before_wrapping(rank: Rank, before: bool, strategy: str) -> None:
    """With original parameters an optimizer from before wrapping trains the same objects, with the groups' settings.

    Its state is sharded as the parameters are.
    """
    model = Stack(2)
    reference = copy.deepcopy(model)
    early = adam(decay_groups(model), foreach=False)
    mesh = rank.make_mesh(1, 2, names=("replicate", "shard")) if strategy == "HYBRID_SHARD" else None
    wrapped = ORIGINAL.wrap(model, rank, strategy=strategy, mesh=mesh)
    ours = early if before else adam(decay_groups(wrapped), foreach=False)
    theirs = adam(decay_groups(reference), foreach=False)
    assert_trains_alike(wrapped, reference, rank, optimizers=[ours, theirs])
    for parameter in wrapped.parameters():
        assert ours.state[parameter]["exp_avg"].shape == parameter.shape


@on_ranks(2)
@pytest.mark.parametrize(
    ("front_end", "when"),
    [(ORIGINAL, "before"), (FLAT, "after")],  # hooks on parameters that are hidden later get no gradient
    ids=str,
)
def test_optimizer_in_backward(rank: Rank, front_end: Any, when: str) -> None:
    """torch's optimizers in backward, installed before wrapping or after a step, train as an ordinary one does."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    if when == "before":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
    wrapped = front_end.wrap(model, rank)
    if when == "after":
        square_loss(9)(wrapped, rank.rank).backward()
        wrapped.zero_grad()
        _apply_optimizer_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.1, "momentum": 0.9})
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        both_backward(wrapped, reference, rank, square_loss(step))
        theirs.step()
        theirs.zero_grad()
        assert all(p.grad is None for p in wrapped.parameters())
        assert_same_values(wrapped, reference, **CLOSE)


@on_ranks(2)
@each_value(way=["mul", "copy"], strategy=["FULL_SHARD", "SHARD_GRAD_OP"], offload=[False, True])
def test_writes_after_an_evaluation_count(rank: Rank, way: str, strategy: str, offload: bool) -> None:
    """The next forward computes with what was written to flat parameters, whatever a forward without gradients left."""
    options: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)} if offload else {}
    model, reference = sharded_with_reference(FLAT, rank, Mlp(5, 7, 3), [], strategy=strategy, **options)
    for _ in range(2):
        with torch.no_grad():
            run(model)
            for parameter in (*model.parameters(), *reference.parameters()):
                if way == "mul":
                    parameter.mul_(0.9)
                else:
                    parameter.copy_(parameter.clone() * 0.9)
        assert_close(run(model), run(reference), "output", 1e-5, 1e-6)
        assert_trains_alike(model, reference, rank, flat_loss, steps=1)
