"""The flat layout, without ranks: aligned concatenation, one padding, equal slices, shards that reassemble."""

from __future__ import annotations

import dataclasses
import doctest
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.layout import FlatLayout, ParameterShape, flat
from fullshard.layout.flat import FlatSlot

WORLDS = st.sampled_from([1, 2, 3, 4, 5, 8, 13])


@st.composite
def parameter_shapes(draw: st.DrawFn) -> list[ParameterShape]:
    """Up to six parameters of 0 to 3 dims, some empty, their dims in any order in memory."""
    parameters = []
    for index in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        order = draw(st.permutations(range(len(shape))))
        memory = torch.empty([shape[dim] for dim in order])
        stride = memory.permute([order.index(dim) for dim in range(len(shape))]).stride()
        parameters.append(ParameterShape(f"p{index}", tuple(shape), tuple(stride)))
    return parameters


@st.composite
def layouts(draw: st.DrawFn) -> tuple[FlatLayout, int]:
    """A layout of such parameters and its alignment."""
    alignment = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return FlatLayout.build(draw(parameter_shapes()), world_size=draw(WORLDS), alignment=alignment), alignment


def shapes(*sizes: tuple[int, ...]) -> list[ParameterShape]:
    """Contiguous parameters p0, p1, ... of these sizes."""
    strides = (torch.empty(size).stride() for size in sizes)
    return [ParameterShape(f"p{i}", s, tuple(stride)) for i, (s, stride) in enumerate(zip(sizes, strides, strict=True))]


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
@settings(max_examples=150)
def test_slices_are_those_of_the_concatenation(drawn: tuple[FlatLayout, int]) -> None:
    """Cutting the aligned, once padded concatenation into equal slices gives exactly the shards of every rank."""
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
            for i in range(numel):
                assert mine[offset + i] is None, "two shards in one place"
                mine[offset + i] = (index, start + i)
        assert mine == elements[rank * layout.slice_numel : (rank + 1) * layout.slice_numel]


@given(layouts())
@settings(max_examples=150)
def test_gathered_slices_are_the_parameters(drawn: tuple[FlatLayout, int]) -> None:
    """Filling every rank's slice by its shards, then joining slices, gives each parameter with its own strides."""
    layout, _ = drawn
    values = []
    for index, slot in enumerate(layout.slots):
        numbers = torch.arange(slot.parameter.numel, dtype=torch.float64) + 1000 * (index + 1)
        value = torch.empty_strided(slot.parameter.shape, slot.parameter.stride, dtype=torch.float64)
        values.append(value.copy_(numbers.view(slot.parameter.shape)))
    slices = []
    for rank in range(layout.world_size):
        shard = torch.zeros(layout.slice_numel, dtype=torch.float64)
        for slot, value in zip(layout.slots, values, strict=True):
            start, numel, offset = slot.shard(rank)
            shard[offset : offset + numel] = value.as_strided((value.numel(),), (1,))[start : start + numel]
        slices.append(shard)
    full = torch.cat(slices)
    assert full.numel() == layout.unsharded_numel
    for slot, value in zip(layout.slots, values, strict=True):
        found = full.as_strided(slot.parameter.shape, slot.parameter.stride, slot.unsharded_offset)
        assert torch.equal(found, value), slot
    taken = sum(value.numel() for value in values)
    assert layout.padding == layout.unsharded_numel - taken
    assert int((full == 0).sum()) == layout.padding


@given(layouts())
@settings(max_examples=150)
def test_places(drawn: tuple[FlatLayout, int]) -> None:
    """Parameters keep their order, each starts aligned, less than one alignment behind the one before it.

    Also an empty shard begins inside the slice, or at its end, so that it can be cut out of it.
    """
    layout, alignment = drawn
    end = 0
    for slot in layout.slots:
        assert slot.unsharded_offset % alignment == 0
        assert 0 <= slot.unsharded_offset - end < alignment
        end = slot.unsharded_offset + slot.parameter.numel
        for rank in range(layout.world_size):
            start, numel, offset = slot.shard(rank)
            assert 0 <= start <= start + numel <= slot.parameter.numel
            assert 0 <= offset <= offset + numel <= layout.slice_numel
    assert 0 <= layout.unsharded_numel - end < layout.world_size


@given(layouts())
def test_layouts_are_values(drawn: tuple[FlatLayout, int]) -> None:
    """The same parameters give an equal, hashable layout, and nobody can change it.

    Its picture has one line for the unsharded buffer and one per rank, with what each rank holds of each parameter.
    """
    layout, alignment = drawn
    parameters = [slot.parameter for slot in layout.slots]
    again = FlatLayout.build(parameters, world_size=layout.world_size, alignment=alignment)
    assert again == layout and hash(again) == hash(layout)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.slice_numel = 0  # type: ignore[misc]
    head, *lines = layout.picture().split("\n")
    assert head.endswith(f" {layout.unsharded_numel} elements, {layout.padding} of them padding")
    assert len(lines) == layout.world_size
    for rank, line in enumerate(lines):
        held = {name: (int(a), int(b)) for name, a, b in re.findall(r"(p\d)\[(\d+):(\d+)\]", line)}
        shards = {slot.parameter.fqn: slot.shard(rank) for slot in layout.slots}
        assert held == {fqn: (p.start, p.start + p.numel) for fqn, p in shards.items() if p.numel}
        assert line.count("empty") == len(layout.slots) - len(held)


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
    layout = FlatLayout.build(shapes(*sizes), world_size=2)
    assert layout.slice_numel == slice_numel
    assert [[tuple(slot.shard(rank)) for slot in layout.slots] for rank in range(2)] == shards


def test_few_elements() -> None:
    """One element over eight ranks: the first holds it, all have a slice of one; nothing at all makes empty slices."""
    layout = FlatLayout.build(shapes((1,)), world_size=8)
    assert layout.slice_numel == 1 and layout.padding == 7
    assert [layout.slots[0].shard(rank).numel for rank in range(8)] == [1] + [0] * 7
    for parameters in ([], shapes((0, 3), (4, 0))):
        layout = FlatLayout.build(parameters, world_size=4)
        assert (layout.slice_numel, layout.unsharded_numel, layout.padding) == (0, 0, 0)
        assert [slot.shard(3).numel for slot in layout.slots] == [0] * len(parameters)


def test_invalid_layouts_are_refused() -> None:
    """Overlapping parameters, and slices that do not cover all, raise with the name of the parameter."""
    first, second = shapes((3,), (3,))
    with pytest.raises(ValueError, match=r"p1 at 2 overlaps what ends at 3"):
        FlatLayout((FlatSlot(first, 0, 3), FlatSlot(second, 2, 3)), 2, 3)
    with pytest.raises(ValueError, match=r"p1"):
        FlatLayout((FlatSlot(first, 0, 2), FlatSlot(second, 3, 2)), 2, 2)
    with pytest.raises(ValueError, match=r"p1"):
        FlatLayout((FlatSlot(first, 0, 3), FlatSlot(second, 3, 4)), 2, 3)  # slots of another slice


def test_example_of_the_module() -> None:
    """The picture in the docstring is what is printed."""
    results = doctest.testmod(flat, extraglobs={"FlatLayout": FlatLayout, "ParameterShape": ParameterShape})
    assert results.attempted >= 2 and results.failed == 0
