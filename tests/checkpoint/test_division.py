"""Who writes what in a save, decided from numbers: each box once, by the rank that should, and all of every tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.checkpoint.division import Division, Held, TensorTable, divide
from fullshard.errors import CheckpointError
from fullshard.layout import Box, boxes_of_range, chunk_of

Boxes = Sequence[tuple[int, Box]]


def table(shapes: Sequence[tuple[int, ...]], *, equal: bool = True) -> TensorTable:
    """Of tensors named by their numbers."""
    count = len(shapes)
    keys = tuple(f"t{i}" for i in range(count))
    return TensorTable(keys, ("float32",) * count, tuple(shapes), (equal,) * count)


def divided(shapes: Sequence[tuple[int, ...]], by_rank: Sequence[Boxes], **options: Any) -> Division:
    """The decision where all ranks have one table."""
    packed = table(shapes, **options).packed
    return divide([Held(None if rank else packed, Held.packed(boxes), ()) for rank, boxes in enumerate(by_rank)])


def written(division: Division, by_rank: Sequence[Boxes]) -> list[list[tuple[int, Box]]]:
    """What each rank writes."""
    pairs = zip(by_rank, division.parts, strict=True)
    return [[box for box, kept in zip(boxes, parts.tolist(), strict=True) if kept] for boxes, parts in pairs]


def rows_of(shape: tuple[int, ...], ranks: int, rank: int, dim: int = 0) -> Box:
    """A rank's part of a tensor that is cut on a dim."""
    start, size = chunk_of(shape[dim], ranks, rank)
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, size
    return Box(tuple(offsets), tuple(sizes))


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_every_element_is_written_once(shapes: list[tuple[int, ...]], shards: int, copies: int, dim: int) -> None:
    """Of tensors cut on any dim, with replicas, the parts written are all elements, none twice."""
    by_rank = [
        [(i, rows_of(shape, shards, rank % shards, min(dim, len(shape) - 1))) for i, shape in enumerate(shapes)]
        for rank in range(shards * copies)
    ]
    division = divided(shapes, by_rank)
    found = [
        (number, *index)
        for boxes in written(division, by_rank)
        for number, box in boxes
        for index in itertools.product(*(range(a, b) for a, b in zip(box.offsets, box.ends, strict=True)))
    ]
    wanted = [(i, *index) for i, shape in enumerate(shapes) for index in itertools.product(*map(range, shape))]
    assert sorted(found) == wanted


def test_slices_of_a_flat_buffer() -> None:
    """Parts that end anywhere in a row are told apart by where they begin."""
    by_rank = [[(0, box) for box in boxes_of_range((4, 3), start, 4)] for start in (0, 4, 8)]
    assert written(divided([(4, 3)], by_rank), by_rank) == by_rank


def test_replicas_share_the_work() -> None:
    """What ranks are known to have in common is spread by size; what they merely both have is the first rank's."""
    by_rank = [[(i, Box((0,), (10,))) for i in range(4)]] * 2
    assert [len(boxes) for boxes in written(divided([(10,)] * 4, by_rank), by_rank)] == [2, 2]
    assert [len(boxes) for boxes in written(divided([(10,)] * 4, by_rank, equal=False), by_rank)] == [4, 0]


def test_ranks_without_anything_to_write_have_no_file() -> None:
    """Files are numbered by the ranks that write one; values count, empty boxes do not."""
    packed = table([(2,), (0,)]).packed
    empty, all_of_it = Held.packed([(1, Box((0,), (0,)))]), Held.packed([(0, Box((0,), (2,)))])
    division = divide([Held(packed, empty, ()), Held(None, all_of_it, ("a",)), Held(None, empty, ("a", "b"))])
    assert division.files == (-1, 0, 1)
    assert division.values == ((), ("a",), ("b",))
    assert [numbers.tolist() for numbers in division.tensors] == [[], [0], []]


def test_tables_may_differ() -> None:
    """A tensor that only a later rank has is saved, under its own name."""
    first, second = (
        TensorTable(("a",), ("float32",), ((2,),), (True,)),
        TensorTable(("b", "a"), ("int64", "float32"), ((3, 1), (2,)), (True, True)),
    )
    held = [
        Held(first.packed, Held.packed([(0, Box((0,), (1,)))]), ()),
        Held(second.packed, Held.packed([(0, Box((0, 0), (3, 1))), (1, Box((1,), (1,)))]), ()),
    ]
    division = divide(held)
    assert division.table.keys == ("a", "b") and division.table.shapes == ((2,), (3, 1))
    assert [numbers.tolist() for numbers in division.tensors] == [[0], [1, 0]]


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([Box((0, 0), (2, 4))], "t0: no rank that saves holds 8 of the 16 elements"),
        (
            [Box((0, 0), (3, 4)), Box((2, 0), (2, 4))],
            r"t0: ranks hold \[0:3, 0:4\] and \[2:4, 0:4\] of it",
        ),
        ([Box((0, 0), (4, 4)), Box((1, 1), (2, 2))], "which overlap"),
        ([Box((2, 0), (4, 4)), Box((0, 0), (2, 4))], "t0: a rank holds a part that is not in the shape"),
    ],
)
def test_what_does_not_make_a_tensor_is_refused(boxes: list[Box], match: str) -> None:
    """Holes, overlaps and parts outside of the shape are errors that name the tensor."""
    with pytest.raises(CheckpointError, match=match):
        divided([(4, 4)], [[(0, box)] for box in boxes])
